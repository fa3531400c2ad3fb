"""A model under examination: rows to pass through it, and everything about it as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.doctor.random_draws import EqualDraws
from sfumato.errors import ModelError, SfumatoError
from sfumato.training.finetuning import training_mode

_SPREAD = 0.1  # of the values that stand in for parameters which begin at zero


@dataclass(frozen=True)
class Tolerance:
    """By how much two passes may differ: in outputs, and in the gradient of each parameter; relative."""

    outputs: float
    gradients: float


STRICT = Tolerance(outputs=1e-5, gradients=1e-3)


def loose(dtype: torch.dtype) -> Tolerance:
    """What rounding may do between batches of different sizes.

    Where it moves a ReLU to the other side of zero, a gradient jumps by up to a hundredth in float32.
    """
    eps = torch.finfo(dtype).eps
    return Tolerance(outputs=max(1e-3, 8 * eps), gradients=0.1 if eps < 1e-6 else 0.5)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model behind ``torch.compile``, whose layers are those of the original."""
    return getattr(model, "_orig_mod", model)


def own_dtype(model: nn.Module) -> torch.dtype:
    """The parameters' precision; the coarsest if there are several."""
    dtypes = {value.dtype for value in model.parameters() if value.is_floating_point()}
    return max(dtypes or {torch.get_default_dtype()}, key=lambda dtype: torch.finfo(dtype).eps)


def is_half(model: nn.Module, inputs: Tensor) -> bool:
    """Whether passes would be in half precision, by the parameters' own or by autocast."""
    return torch.finfo(own_dtype(model)).eps > 1e-6 or torch.is_autocast_enabled(inputs.device.type)


@contextmanager
def probed(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Copies of parameters and buffers in the modes of training inside; all as before afterwards.

    Trained parameters that are zero throughout get small values: a last layer that begins at zero would
    hide whatever goes on before it.
    """
    modes = {module: module.training for module in model.modules()}
    registers: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (register, dict(register))
        for module in model.modules()
        for register in (module._parameters, module._buffers)
    ]
    kept = [(value, value.data) for value in (*model.parameters(), *model.buffers())]
    devices = [value.device for value in model.parameters() if value.device.type == "cuda"][:1]
    # autocast would go on with what it remembers of the parameters: other values, without gradients
    caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.inference_mode(False), torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            for value, data in kept:
                wide = dtype is not None and data.is_floating_point()
                value.data = data.to(dtype, copy=True) if wide else data.clone()
                if value.requires_grad and not data.any():
                    value.data.normal_(std=_SPREAD)
            training_mode(model)
            yield
    finally:
        torch.set_autocast_cache_enabled(caching)
        for register, entries in registers:
            register.clear()
            register.update(entries)
        for value, data in kept:
            value.data = data
        for module, mode in modes.items():
            module.training = mode


class State:
    """Parameters and buffers at one moment, to tell what a forward pass changes and to undo it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = {name: value.detach().clone() for name, value in _named(model)}
        self._registers: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (register, dict(register))
            for module in model.modules()
            for register in (module._parameters, module._buffers)
        ]

    def changed(self) -> dict[str, Tensor]:
        """Name and present value of each parameter and buffer that is not as it was."""
        return {
            name: value.detach().clone()
            for name, value in _named(self.model)
            if name not in self.values or not same(value, self.values[name])
        }

    @torch.no_grad()
    def restore(self) -> None:
        for register, entries in self._registers:
            register.clear()
            register.update(entries)
        for name, value in _named(self.model):
            value.data.copy_(self.values[name])


def same(first: Tensor, second: Tensor) -> bool:
    """Equal, where a value that is not a number equals itself."""
    return first.shape == second.shape and torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def rows_like(inputs: Tensor, count: int) -> Tensor:
    """``count`` rows: those given, then random ones in their range; laid out in memory as those given."""
    if count <= len(inputs):
        with torch.inference_mode(False):  # copies, so that gradients can be asked for
            return inputs[:count].detach().clone()
    generator = torch.Generator().manual_seed(0)
    shape = torch.Size((count - len(inputs), *inputs.shape[1:]))
    if inputs.is_floating_point():
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        scale = inputs.double().std().item() if inputs.numel() > 1 else 1.0
        drawn = drawn * (scale or 1.0) + inputs.double().mean().item()
    else:
        least, most = int(inputs.min()), int(inputs.max())
        drawn = torch.randint(least, most + 1, shape, generator=generator)
    with torch.inference_mode(False):
        alike = torch.empty_like(inputs[:1], dtype=inputs.dtype).stride()[1:]
        rows = torch.empty_strided(
            (count, *inputs.shape[1:]), (shape[1:].numel(), *alike), dtype=inputs.dtype, device=inputs.device
        )
        rows[: len(inputs)], rows[len(inputs) :] = inputs.detach(), drawn
        return rows


@torch.no_grad()
def outputs_of(model: nn.Module, rows: Tensor) -> tuple[Tensor, list[str]]:
    """The model's output under equal draws, and which modules drew; a coded error where it fails."""
    draws = EqualDraws(model, len(rows))
    try:
        with draws.watching():
            output = model(rows.clone())
    except SfumatoError:
        raise
    except Exception as error:
        raise forward_fails(rows, error) from error
    if not isinstance(output, Tensor):
        raise ModelError(
            "no-row-outputs",
            f"the model returns a {type(output).__name__}, not a tensor with one row per input row.",
            fix="Wrap it in a module that returns the class scores, a tensor of shape (rows, classes).",
        )
    if not output.ndim or len(output) != len(rows) or not output.is_floating_point():
        raise ModelError(
            "no-row-outputs",
            f"the model gives an output of shape {tuple(output.shape)} and {output.dtype} for inputs of "
            f"shape {tuple(rows.shape)}.",
            fix="A classifier must return a tensor of shape (rows, classes).",
        )
    return output.detach().clone(), draws.drawing


def forward_fails(rows: Tensor, error: Exception) -> ModelError:
    return ModelError(
        "forward-fails",
        f"the model cannot take {rows.dtype} inputs of shape {tuple(rows.shape)}: {first_line(error)}",
        fix="Pass inputs as the model takes them in training: shape, type and range.",
    )


def first_line(error: Exception) -> str:
    """What an error says, in a line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
