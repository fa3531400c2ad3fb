"""Where a run computes, and how many rows fit there at once."""

from __future__ import annotations

import torch
from torch import nn

from sfumato.data import ImageSet
from sfumato.errors import ConfigError
from sfumato.gradients.memory import bytes_per_row, free_memory, rows_in_memory

WITHOUT_FLOAT64 = ("mps",)  # devices, by torch's names


def choose_device(name: str) -> torch.device:
    """The device by torch's name; ``auto``: the accelerator if it has float64, in which norms are added."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type in WITHOUT_FLOAT64:
            return torch.device("cpu")
        return accelerator
    try:
        device = torch.device(name)
        if device.type not in WITHOUT_FLOAT64:
            torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            "no-device", f"device {name!r} cannot be used: {reason}", fix="Use auto or cpu."
        ) from error
    if device.type in WITHOUT_FLOAT64:
        raise ConfigError(
            "device-without-float64",
            f"device {name!r} has no float64",
            why="Norms are added in float64, so that the bound holds in spite of rounding.",
            fix="Use cpu, or auto, which takes the CPU here.",
        )
    return device


def fitting_rows(model: nn.Module, train: ImageSet, device: torch.device) -> int:
    """Rows of a microbatch, from the memory that is free now."""
    example = torch.zeros(1, *train.images.shape[1:], device=device)
    row_bytes = bytes_per_row(model, example)
    return rows_in_memory(row_bytes, free_memory(device), on_accelerator=device.type != "cpu")
