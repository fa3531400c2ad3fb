"""Where a run computes, and how many rows fit there at once."""

from __future__ import annotations

import os

import psutil
import torch
from torch import nn

from sfumato.data import ImageSet
from sfumato.errors import ConfigError
from sfumato.gradients.memory import bytes_per_row, free_memory, rows_in_memory
from sfumato.training.ranks import ALONE, Ranks

WITHOUT_FLOAT64 = ("mps",)  # devices, by torch's names
_LOOK_SECONDS = 0.5  # how long the other programs are watched
_CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def choose_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """The device by torch's name; ``auto``: the accelerator if it has float64, in which norms are added.

    Each of several ``ranks`` on a host takes a device of its own, if they are accelerators.
    """
    device = _device(name)
    if ranks.size > 1 and device.type != "cpu":
        if ranks.size_on_host > torch.accelerator.device_count():
            raise ConfigError(
                "too-many-ranks",
                f"{ranks.size_on_host} ranks on a host with {torch.accelerator.device_count()} devices.",
                why="Two ranks on one device are slower than one.",
                fix="Start as many processes per host as it has devices, or set performance.device=cpu.",
            )
        device = torch.device(device.type, ranks.number_on_host)
        ranks.send_tensors_by_device(device)
    return device


def _device(name: str) -> torch.device:
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


def fitting_rows(model: nn.Module, train: ImageSet, device: torch.device, ranks: Ranks = ALONE) -> int:
    """Rows of a microbatch, from the memory that is free now, which ranks on one host share."""
    example = torch.zeros(1, *train.images.shape[1:], device=device)
    row_bytes = bytes_per_row(model, example)
    on_accelerator = device.type != "cpu"
    free = free_memory(device) // (1 if on_accelerator else ranks.size_on_host)
    return rows_in_memory(row_bytes, free, on_accelerator=on_accelerator)


def spare_busy_cores() -> str | None:
    """Leave the cores that other programs keep busy alone; returns a sentence if threads were taken away.

    Threads wait for the slowest of them: on two cores, one of them busy, two are slower than one. What the
    user has set stays. Call it before a program's first long computation.
    """
    threads = torch.get_num_threads()
    if threads == 1 or any(os.environ.get(name) for name in _CHOSEN_BY_USER):
        return None
    cores = os.cpu_count() or 1
    busy = cores * psutil.cpu_percent(interval=_LOOK_SECONDS) / 100
    fitting = fitting_threads(threads, cores=cores, busy=busy)
    if fitting == threads:
        return None
    torch.set_num_threads(fitting)
    return (
        f"Other programs keep {busy:.1f} of {cores} cores busy, so this one takes {fitting} "
        f"thread{'s' if fitting > 1 else ''}, not {threads}. OMP_NUM_THREADS={threads} decides otherwise."
    )


def fitting_threads(threads: int, *, cores: int, busy: float) -> int:
    """So many of ``threads`` find a core of their own when others use ``busy`` of ``cores``; at least one."""
    return max(1, min(threads, round(cores - busy)))
