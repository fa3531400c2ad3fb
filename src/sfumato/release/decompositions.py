"""Operations that ONNX lacks or computes otherwise, written in those that it has; sizes are fixed then.

PyTorch's bicubic resizing with antialiasing weighs pixels as Pillow does, ONNX runtimes do not: the outputs
would differ in the third digit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

_CUBIC = -0.5  # the parameter of Keys 1981 that antialiased resizing uses


def resizing_weights(size_in: int, size_out: int) -> np.ndarray:
    """(size_out, size_in): how each new pixel of a line is weighed from the old ones."""
    scale = size_in / size_out
    stretch = max(scale, 1.0)
    centres = (np.arange(size_out)[:, None] + 0.5) * scale
    distance = np.abs(np.arange(size_in)[None, :] + 0.5 - centres) / stretch
    near = (_CUBIC + 2) * distance**3 - (_CUBIC + 3) * distance**2 + 1
    far = _CUBIC * (distance**3 - 5 * distance**2 + 8 * distance - 4)
    weights = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
    return weights / weights.sum(axis=1, keepdims=True)


def resized(
    images: Tensor,
    output_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Tensor:
    """Images (N, C, H, W) resized by two matrix products."""
    rows = torch.tensor(resizing_weights(images.shape[-2], output_size[0]).tolist(), dtype=images.dtype)
    columns = torch.tensor(resizing_weights(images.shape[-1], output_size[1]).tolist(), dtype=images.dtype)
    return torch.matmul(torch.matmul(rows, images), columns.t())


def adaptive_max_pool(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The largest value in each part of the maps (N, C, H, W); where it lies is not asked for."""
    height, width = x.shape[-2:]
    lines = [
        torch.stack(
            [x[..., top:bottom, left:right].amax((-2, -1)) for left, right in _parts(width, output_size[1])],
            dim=-1,
        )
        for top, bottom in _parts(height, output_size[0])
    ]
    values = torch.stack(lines, dim=-2)
    return values, torch.zeros_like(values, dtype=torch.int64)


def _parts(size: int, count: int) -> list[tuple[int, int]]:
    """The overlapping parts into which adaptive pooling cuts a line."""
    return [(number * size // count, -(-(number + 1) * size // count)) for number in range(count)]


DECOMPOSITIONS: dict[torch._ops.OperatorBase, Callable[..., object]] = {
    torch.ops.aten._upsample_bicubic2d_aa.default: resized,
    torch.ops.aten.adaptive_max_pool2d.default: adaptive_max_pool,
}
