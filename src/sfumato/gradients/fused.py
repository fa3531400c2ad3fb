"""Sums over memory that are worth one pass: compiled where a compiler was at hand, in PyTorch elsewhere.

A performance question only: both ways agree up to rounding, and the tests hold them to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

VERSION = 2  # of fused.c: an older library would be called with arguments it does not know
MAX_CHANNELS = 16_384
MAX_CLASSES = 128  # of the compiled head
CHUNK_VALUES = 524_288  # values whose product stays in cache until it is summed


def position_sums(rows: Tensor) -> Tensor:
    """(rows, channels, *space) -> (rows, channels): the sum over all positions."""
    flat, axis = _positions(rows)
    return flat.sum(dim=axis)


def channel_sums(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, channels, *space) twice -> (rows, channels) twice: the sums of first, and of first * second."""
    library = _library(first, second)
    if library is None or not _channels_last(first, second):
        return position_sums(first), position_products(first, second)
    rows, channels = first.shape[:2]
    sums, products = first.new_empty(rows, channels), first.new_empty(rows, channels)
    _call(library.channel_sums, first, second, rows, first[0, 0].numel(), channels, sums, products)
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
        some = torch.mul(a[part], b[part], out=product[: part.stop - start])
        torch.sum(some, dim=axis, out=result[part])
    return result


def group_norm_backward(
    gradient: Tensor, inputs: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a group norm's input, and of its scale and shift for each row on its own.

    ``mean`` and ``inverse`` are (rows, groups), as the forward pass has computed them.
    """
    rows, channels = inputs.shape[:2]
    positions, groups = inputs[0, 0].numel(), mean.shape[1]
    last = _channels_last(inputs)
    layout = torch.channels_last if last else torch.contiguous_format
    gradient, inputs = gradient.contiguous(memory_format=layout), inputs.contiguous(memory_format=layout)
    library = _library(gradient, inputs, mean, inverse, weight)
    if library is None or not last:
        result = torch.ops.aten.native_group_norm_backward(
            gradient, inputs, mean, inverse, weight, rows, channels, positions, groups, [True, False, False]
        )[0]
        sums, products = channel_sums(gradient, inputs)
        centre, spread = (value.repeat_interleave(channels // groups, dim=1) for value in (mean, inverse))
        return result, (products - centre * sums) * spread, sums
    result = torch.empty_like(inputs)
    scale, shift = inputs.new_empty(rows, channels), inputs.new_empty(rows, channels)
    _call(
        library.group_norm_backward,
        *(gradient, inputs, mean.contiguous(), inverse.contiguous(), weight.contiguous()),
        *(rows, positions, channels, groups),
        *(result, scale, shift),
    )
    return result, scale, shift


def filter_moments(filters: Tensor, directions: Tensor) -> Tensor:
    """(parts, units, filters, length) and (parts, filters, length) -> (3, units, filters), float64.

    Of each unit's filter, over all its parts: sum of squares, sum, and product with its direction.
    """
    parts, units, count, length = filters.shape
    library = _library(filters, directions)
    if library is None or not filters[0].is_contiguous():
        squares = torch.linalg.vector_norm(filters, dim=3).double().square().sum(dim=0)
        sums = filters.sum(dim=3).double().sum(dim=0)
        along = (filters * directions[:, None]).sum(dim=3).double().sum(dim=0)
        return torch.stack([squares, sums, along])
    result = torch.empty(3, units, count, dtype=torch.float64, device="cpu")
    sizes = (parts, filters.stride(0), units, count, length)
    _call(library.filter_moments, filters, directions.contiguous(), *sizes, result)
    return result


def offers_unit_filters(inputs: Tensor, gradients: Tensor) -> bool:
    """Whether ``unit_filters`` can take these images on this machine."""
    library = _library(inputs, gradients)
    if library is None or inputs.dim() != 4 or inputs.shape[1] < 16:  # the lanes of a vector
        return False
    return bool(library.has_unit_filters())


def unit_filters(
    inputs: Tensor, gradients: Tensor, directions: Tensor, num_units: int, geometry: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Each unit's gradient of a convolution's filters, its moments as ``filter_moments`` has them, and the
    gradient of the bias.

    Rows of a unit are neighbours, and as many for each. ``geometry`` is the kernel's size, stride, dilation
    and the zeros before the input, (y, x) each. The gradients are (units, filters, y, x, channels), in the
    order of memory; ``directions`` (filters, y, x, channels) too.
    """
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    gradients = gradients.contiguous(memory_format=torch.channels_last)
    rows, channels, *in_space = inputs.shape
    filters, *space = gradients.shape[1:]
    sizes = [num_units, rows // num_units, *space, *in_space, filters, channels, *geometry]
    result = inputs.new_empty(num_units, filters, *geometry[:2], channels)
    moments = torch.empty(3, num_units, filters, dtype=torch.float64, device="cpu")
    shifts = inputs.new_empty(num_units, filters)
    found = (result, moments, shifts)
    shape = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    _call(_compiled().unit_filters, shape, gradients, inputs, directions.contiguous(), *found)
    return found


def offers_head_sums(rows: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether ``head_sums`` can take these; with many classes the library's matrix products are as fast."""
    library = _library(rows, weight, bias)
    few = len(weight) <= MAX_CLASSES and rows.is_contiguous()
    return library is not None and few and bool(library.has_unit_filters())


def head_sums(
    rows: Tensor,
    chosen: Tensor | None,
    targets: Tensor,
    squares: Tensor,
    weight: Tensor,
    bias: Tensor,
    bound: float,
    found: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """The clipped sum of a softmax regression over the ``chosen`` rows, or over all, in the caller's thread.

    ``chosen`` and ``targets`` are int64; ``squares`` are those of the rows' norms with the bias, float64.
    ``found`` is filled: norms and losses of the rows; and added to: the gradients of weight and bias, clipped
    to ``bound``.
    """
    norms, losses, weights, biases = found
    limit = torch.tensor(bound, dtype=torch.float64)
    sizes = (len(targets), rows.shape[1], len(weight))
    start = 0 if chosen is None else chosen.contiguous()
    inputs = (rows, start, targets.contiguous(), squares.contiguous(), weight.contiguous(), bias.contiguous())
    _call(_compiled().head_sums, *inputs, limit, *sizes, weights, biases, norms, losses)


@cache
def _compiled() -> ctypes.CDLL | None:
    """The compiled sums, built with the package where a C compiler was found."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_fused{suffix}")
        if path.is_file():
            try:
                library = ctypes.CDLL(str(path))  # not a Python module: it neither needs nor touches Python
                return library if library.fused_version() == VERSION else None
            except (OSError, AttributeError):  # built elsewhere, or from an older source
                return None
    return None


def _library(*tensors: Tensor) -> ctypes.CDLL | None:
    """The compiled sums, if they can work on these tensors."""
    if all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors):
        return _compiled()
    return None


def _channels_last(*images: Tensor) -> bool:
    """Whether the compiled sums know this layout; they keep a few numbers per channel on the stack."""
    return all(
        image.dim() == 4
        and image.shape[1] <= MAX_CHANNELS
        and image.is_contiguous(memory_format=torch.channels_last)
        for image in images
    )


def _positions(rows: Tensor) -> tuple[Tensor, int]:
    """All positions as one axis, in the order of memory, and which axis that is: (rows, channels, positions)
    or (rows, positions, channels)."""
    if rows.dim() == 4 and rows.stride(1) == 1:  # channels last
        return rows.permute(0, 2, 3, 1).flatten(1, 2), 1
    return rows.flatten(2), 2


def _call(function: Callable[..., None], *arguments: Tensor | int) -> None:
    """Pass tensors as pointers; they live at least as long as the call."""
    function(
        *(
            ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else ctypes.c_size_t(value)
            for value in arguments
        )
    )
