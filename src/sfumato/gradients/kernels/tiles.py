"""What is summed in register tiles, where the path has them: units' filters, and a linear head.

Neither has a PyTorch form of its own here: where ``offers_…`` says no, callers take another strategy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.gradients.kernels.library import Convolution, Kernels, kernels_for

MAX_CLASSES = 128  # of the compiled head


def offers_unit_filters(inputs: Tensor, gradients: Tensor) -> bool:
    """Whether ``unit_filters`` can take these images on this machine: channels must fill a vector."""
    kernels = kernels_for(inputs, gradients)
    return kernels is not None and inputs.dim() == 4 and 0 < kernels.lanes <= inputs.shape[1]


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
    shape = Convolution(num_units, rows // num_units, *space, *in_space, filters, channels, *geometry)
    result = inputs.new_empty(num_units, filters, *geometry[:2], channels)
    moments = torch.empty(3, num_units, filters, dtype=torch.float64, device="cpu")
    shifts = inputs.new_empty(num_units, filters)
    results = (result, moments, shifts)
    _tiles(inputs, gradients).call(
        "unit_filters", shape, gradients, inputs, directions.contiguous(), *results
    )
    return results


def offers_head_sums(rows: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether ``head_sums`` can take these; with many classes the library's matrix products are as fast."""
    kernels = kernels_for(rows, weight, bias)
    suitable = len(weight) <= MAX_CLASSES and rows.is_contiguous()
    return kernels is not None and suitable and kernels.lanes > 0


def head_sums(
    rows: Tensor,
    chosen: Tensor | None,
    targets: Tensor,
    squares: Tensor,
    weight: Tensor,
    bias: Tensor,
    bound: float,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """The clipped sum of a softmax regression over the ``chosen`` rows, or over all, in the caller's thread.

    ``chosen`` and ``targets`` are int64; ``squares`` are those of the rows' norms with the bias, float64.
    ``results`` is filled: norms and losses of the rows; and added to: the gradients of weight and bias in
    float64, clipped to ``bound``; of 128 rows at a time in float32.
    """
    norms, losses, weights, biases = results
    sizes = (len(targets), rows.shape[1], len(weight))
    numbers = targets.new_empty(0) if chosen is None else chosen.contiguous()
    inputs = (
        rows,
        numbers,
        targets.contiguous(),
        squares.contiguous(),
        weight.contiguous(),
        bias.contiguous(),
    )
    _tiles(rows, weight, bias).call("head_sums", *inputs, bound, *sizes, weights, biases, norms, losses)


def _tiles(*tensors: Tensor) -> Kernels:
    kernels = kernels_for(*tensors)
    if kernels is None:
        raise RuntimeError("no compiled kernels can take these tensors: check offers_… first")
    return kernels
