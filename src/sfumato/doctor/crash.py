"""The one operation that is known to kill the process, met with an error instead."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.doctor.operations import Operations
from sfumato.doctor.probing import outputs_of, rows_like
from sfumato.errors import ModelError


def no_crash(model: nn.Module, inputs: Tensor) -> AbstractContextManager[object]:
    """Inside, gradients that would crash PyTorch raise ``ModelError``.

    Its group norm crashes in channels last, where the scale is trained and the input wants no gradient. To
    watch every operation has its price, so that only models are watched that have such norms at all.
    """
    with _Norms() as norms:
        outputs_of(model, rows_like(inputs, 2))
    return _Guard() if norms.in_channels_last else nullcontext()


class _Norms(Operations):
    in_channels_last = False

    def see(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if operation is torch.ops.aten.native_group_norm.default and _in_channels_last(args[0]):
            self.in_channels_last = True
        return operation(*args, **kwargs)


class _Guard(Operations):
    def see(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if operation is torch.ops.aten.native_group_norm_backward.default:
            x, mask = args[1], args[-1]
            if not mask[0] and (mask[1] or mask[2]) and _in_channels_last(x):
                raise ModelError(
                    "crashing-norm",
                    "a group norm would be differentiated in channels last, its input needing no gradient.",
                    why="PyTorch's own code crashes there and takes the whole process with it.",
                    fix="Call .contiguous() on the norm's input, or use plain nn.GroupNorm.",
                )
        return operation(*args, **kwargs)


def _in_channels_last(x: Tensor) -> bool:
    """Whether PyTorch takes it for that: maps of 1 x 1 are contiguous too, and only their strides tell."""
    return not x.is_contiguous() or (x.ndim > 3 and x.stride(1) == 1 and x.stride(-1) >= x.shape[1] > 1)
