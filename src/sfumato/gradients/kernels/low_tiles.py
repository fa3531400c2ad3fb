"""Units' filters from images in bfloat16, where the processor multiplies pairs of such numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.gradients.kernels.library import Convolution, Kernels, low_kernels_for, multiplies_pairs

STRETCH = 1024  # positions of a unit that are summed at once; more are added up in another order


def offers_low_filters(inputs: Tensor, gradients: Tensor) -> bool:
    """Whether ``low_filters`` can take these images on this machine."""
    low = inputs.dtype == gradients.dtype == torch.bfloat16 and inputs.dim() == 4
    kernels = low_kernels_for(inputs, gradients) if low else None
    return kernels is not None and multiplies_pairs(kernels)


def offers_low_filter_sum(inputs: Tensor, gradients: Tensor, most_rows: int) -> bool:
    """The same for ``low_filter_sum``, where no unit has more than so many rows."""
    few = most_rows * math.prod(gradients.shape[2:]) <= STRETCH
    return few and offers_low_filters(inputs, gradients)


def low_filters(
    inputs: Tensor,
    gradients: Tensor,
    directions: Tensor,
    num_units: int,
    geometry: Sequence[int],
    *,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """``unit_filters`` of images in bfloat16.

    The gradients are rounded to it, and the moments are of what was rounded. If they are not to be kept they
    are empty, and the moments are the same.
    """
    inputs, gradients, shape = _images(inputs, gradients, num_units, geometry)
    filters, channels = gradients.shape[1], inputs.shape[1]
    result = inputs.new_empty(num_units if keep else 0, filters, *geometry[:2], channels)
    moments = torch.empty(3, num_units, filters, dtype=torch.float64, device="cpu")
    shifts = directions.new_empty(num_units, filters)
    _pairs(inputs, gradients).call(
        "low_filters", shape, gradients, inputs, directions.contiguous(), result, moments, shifts
    )
    return result, moments, shifts


def low_filter_sum(
    inputs: Tensor, gradients: Tensor, factors: Tensor, geometry: Sequence[int], total: Tensor
) -> None:
    """Add to ``total``, (filters, y, x, channels) in float64, each unit's factor times its gradient.

    Guarantee: that gradient is bit for bit the one that ``low_filters`` gives, kept or not.
    Eight units at a time are added in float32. A unit of factor 0 is not read.
    """
    inputs, gradients, shape = _images(inputs, gradients, len(factors), geometry)
    weights = factors.float().contiguous()
    _pairs(inputs, gradients).call("low_filter_sum", shape, gradients, inputs, weights, total)


def _images(
    inputs: Tensor, gradients: Tensor, num_units: int, geometry: Sequence[int]
) -> tuple[Tensor, Tensor, Convolution]:
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    gradients = gradients.contiguous(memory_format=torch.channels_last)
    rows, channels, *in_space = inputs.shape
    filters, *space = gradients.shape[1:]
    views = rows // max(1, num_units)
    return inputs, gradients, Convolution(num_units, views, *space, *in_space, filters, channels, *geometry)


def _pairs(*images: Tensor) -> Kernels:
    kernels = low_kernels_for(*images)
    if kernels is None:
        raise RuntimeError("no compiled kernels can take these tensors: check offers_… first")
    return kernels
