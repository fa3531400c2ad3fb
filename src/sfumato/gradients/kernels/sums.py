"""Sums over positions, group norm's backward pass and moments of filters, compiled or in PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sfumato.gradients.kernels.library import kernels_for, low_kernels_for

CHUNK_VALUES = 524_288  # values whose product stays in cache until it is summed


def position_sums(rows: Tensor) -> Tensor:
    """(rows, channels, *space) -> (rows, channels): the sum over all positions."""
    flat, axis = _positions(rows)
    return flat.sum(dim=axis)


def channel_sums(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, channels, *space) twice -> (rows, channels) twice: the sums of first, and of first * second."""
    kernels = kernels_for(first, second)
    if kernels is None or not _channels_last(first, second):
        return position_sums(first), position_products(first, second)
    rows, channels = first.shape[:2]
    sums, products = first.new_empty(rows, channels), first.new_empty(rows, channels)
    sizes = (rows, math.prod(first.shape[2:]), channels)
    kernels.call("channel_sums", first, second, *sizes, sums, products)
    return sums, products


def position_products(first: Tensor, second: Tensor) -> Tensor:
    """(rows, channels, *space) twice -> (rows, channels): the sum over positions of first * second.

    ``second`` may have one channel for all. The product is never stored whole.
    """
    a, axis = _positions(first)
    b = second.flatten(2)
    b = b.transpose(1, 2) if axis == 1 else b
    result = first.new_empty(first.shape[:2])
    rows = min(len(a), max(1, CHUNK_VALUES // max(1, a[0].numel())))
    product = torch.empty_like(a[:rows])
    for start in range(0, len(a), rows):
        part = slice(start, min(start + rows, len(a)))
        products = torch.mul(a[part], b[part], out=product[: part.stop - start])
        torch.sum(products, dim=axis, out=result[part])
    return result


def group_norm_backward(
    gradient: Tensor, inputs: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a group norm's input, and of its scale and shift for each row on its own.

    ``mean`` and ``inverse`` are (rows, groups), as the forward pass has computed them. Images may be bfloat16
    beside weights in float32: then the input's gradient is too, and all is summed in float32 or better.
    """
    rows, channels = inputs.shape[:2]
    positions, groups = math.prod(inputs.shape[2:]), mean.shape[1]
    last, low = _channels_last(inputs), inputs.dtype == gradient.dtype == torch.bfloat16 != weight.dtype
    layout = torch.channels_last if last else torch.contiguous_format
    kernels = (low_kernels_for if low else kernels_for)(gradient, inputs, mean, inverse, weight)
    if low and (kernels is None or not last):
        wide = gradient.to(weight.dtype), inputs.to(weight.dtype)
        result, scale, shift = group_norm_backward(*wide, mean, inverse, weight)
        return result.to(inputs.dtype), scale, shift
    gradient, inputs = gradient.contiguous(memory_format=layout), inputs.contiguous(memory_format=layout)
    if kernels is None or not last:
        result = torch.ops.aten.native_group_norm_backward(
            gradient, inputs, mean, inverse, weight, rows, channels, positions, groups, [True, False, False]
        )[0]
        sums, products = channel_sums(gradient, inputs)
        centre, spread = (value.repeat_interleave(channels // groups, dim=1) for value in (mean, inverse))
        return result, (products - centre * sums) * spread, sums
    result = torch.empty_like(inputs)
    scale, shift = weight.new_empty(rows, channels), weight.new_empty(rows, channels)
    kernels.call(
        "low_group_norm_backward" if low else "group_norm_backward",
        *(gradient, inputs, mean.contiguous(), inverse.contiguous(), weight.contiguous()),
        *(rows, positions, channels, groups),
        *(result, scale, shift),
    )
    return result, scale, shift


def weighted_rows(rows: Tensor, factors: Tensor, total: Tensor | None = None) -> Tensor | None:
    """(rows, length) -> (length,): the sum of factor * row in float64, eight rows at a time in float32.

    It is added to ``total``, if that is given. Rows of factor 0 are not read. None where it is not compiled,
    or for rows of another kind.
    """
    low = rows.dtype == torch.bfloat16
    kernels = (low_kernels_for if low else kernels_for)(rows)
    if kernels is None or not rows.is_contiguous():
        return None
    if total is None:
        total = torch.zeros(rows.shape[1], dtype=torch.float64, device="cpu")
    name = "low_weighted_sum" if low else "weighted_sum"
    kernels.call(name, rows, factors.float().contiguous(), *rows.shape, total)
    return total


def filter_moments(filters: Tensor, directions: Tensor) -> Tensor:
    """(parts, units, filters, length) and (parts, filters, length) -> (3, units, filters), float64.

    Of each unit's filter, over all its parts: sum of squares, sum, and product with its direction.
    """
    parts, units, count, length = filters.shape
    kernels = kernels_for(filters, directions)
    if kernels is None or not filters[0].is_contiguous():
        squares = torch.linalg.vector_norm(filters, dim=3).double().square().sum(dim=0)
        sums = filters.sum(dim=3).double().sum(dim=0)
        along = (filters * directions[:, None]).sum(dim=3).double().sum(dim=0)
        return torch.stack([squares, sums, along])
    result = torch.empty(3, units, count, dtype=torch.float64, device="cpu")
    sizes = (parts, filters.stride(0), units, count, length)
    kernels.call("filter_moments", filters, directions.contiguous(), *sizes, result)
    return result


def _channels_last(*images: Tensor) -> bool:
    """Whether the compiled sums know this layout."""
    return all(
        image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last) for image in images
    )


def _positions(rows: Tensor) -> tuple[Tensor, int]:
    """All positions as one axis, in the order of memory, and which axis that is: (rows, channels, positions)
    or (rows, positions, channels)."""
    if rows.dim() == 4 and rows.stride(1) == 1:  # channels last
        return rows.permute(0, 2, 3, 1).flatten(1, 2), 1
    return rows.flatten(2), 2
