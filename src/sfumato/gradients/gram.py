"""Norms of units' weight gradients without the gradients: the Gram (ghost) norm, without unfolding."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sfumato.gradients.operands import Convolution, Geometry, pad, weight_gradient
from sfumato.gradients.piece import gram_norms, summed_by_parts

GRAM_VALUES = 1_000_000


def gram_products(conv: Convolution, gradients: Tensor) -> Tensor:
    """Each unit's squared norm of its weight gradient, float64, without forming the gradient."""
    result = torch.zeros(conv.segments.num_units, dtype=torch.float64, device=gradients.device)
    for group in conv.segments.groups:
        inputs, g = group.split(conv.inputs), group.split(gradients)
        positions = max(math.prod(inputs.shape[3:]), math.prod(g.shape[3:])) * group.size
        units = max(1, GRAM_VALUES // positions**2)
        for first in range(0, len(inputs), units):
            part = slice(first, first + units)
            # float64: terms may cancel to nothing, which an image can be made for
            patches = _patch_gram(inputs[part].double(), conv.geometry, tuple(g.shape[3:]))
            flat = g[part].double().transpose(1, 2).flatten(2)  # (units, out_channels, rows * positions)
            outputs = torch.bmm(flat.transpose(1, 2), flat)
            start = group.units.start + first
            result[start : start + len(outputs)] = gram_norms(patches, outputs, gradients.dtype)
    return result


def _patch_gram(inputs: Tensor, geometry: Geometry, out_space: tuple[int, ...]) -> Tensor:
    """Inner products of all pairs of a unit's patches: (units, rows * positions, rows * positions).

    At stride 1 they are sums along the diagonals of the pixels' Gram matrix, one dimension after another;
    the patches themselves are never laid out.
    """
    units, rows = inputs.shape[:2]
    if any(stride != 1 for stride in geometry.stride):
        patches = unfold(inputs.flatten(0, 1), geometry, out_space)
        patches = patches.view(units, rows * math.prod(out_space), -1)
        return torch.bmm(patches, patches.transpose(1, 2))
    flat = inputs.transpose(1, 2).flatten(2)
    space = tuple(inputs.shape[3:])
    gram = torch.bmm(flat.transpose(1, 2), flat).view(units, rows, *space, rows, *space)
    for axis in reversed(range(len(space))):
        gram = _diagonal_sums(gram, 2 + axis, 3 + len(space) + axis, axis, geometry, out_space[axis])
    return gram.reshape(units, rows * math.prod(out_space), -1)


def _diagonal_sums(
    gram: Tensor, first: int, second: int, axis: int, geometry: Geometry, outputs: int
) -> Tensor:
    """Sum of ``gram`` over the kernel's offsets along one spatial axis, which both sides share."""
    inputs = gram.shape[first]
    if geometry.kernel[axis] == 1 and inputs == outputs:
        return gram
    shape = list(gram.shape)
    shape[first] = shape[second] = outputs
    total = gram.new_zeros(shape)
    for tap in range(geometry.kernel[axis]):
        shift = tap * geometry.dilation[axis] - geometry.before[axis]
        low, high = max(0, -shift), min(outputs, inputs - shift)
        if low < high:
            target = total.narrow(first, low, high - low).narrow(second, low, high - low)
            target += gram.narrow(first, low + shift, high - low).narrow(second, low + shift, high - low)
    return total


def unfold(inputs: Tensor, geometry: Geometry, out_space: tuple[int, ...]) -> Tensor:
    """All patches written out: (rows, *out_space, *kernel, channels)."""
    padded = pad(inputs, geometry).movedim(1, -1).contiguous()
    steps = padded.stride()[1:-1]
    moves = [step * stride for step, stride in zip(steps, geometry.stride, strict=True)]
    offsets = [step * dilation for step, dilation in zip(steps, geometry.dilation, strict=True)]
    shape = (len(padded), *out_space, *geometry.kernel, padded.shape[-1])
    return padded.as_strided(shape, (padded.stride(0), *moves, *offsets, 1)).contiguous()


def gram_multiply_adds(conv: Convolution) -> float:
    """Cost of ``gram_products``, the weighted sum that follows it included."""
    in_space, out_space = math.prod(conv.inputs.shape[2:]), math.prod(conv.gradients.shape[2:])
    strided = any(stride != 1 for stride in conv.geometry.stride)
    wide = out_space**2 * conv.weight[0].numel() if strided else in_space**2 * conv.inputs.shape[1]
    pairs = sum(group.size**2 * (group.units.stop - group.units.start) for group in conv.segments.groups)
    return conv.multiply_adds + pairs * (wide + out_space**2 * conv.gradients.shape[1])


def gram_pays(conv: Convolution) -> bool:
    """Whether the Gram norm could be the cheaper way; it is never worth trying far beyond.

    Its sum over all units would be rounded as a whole, which no clip covers in low precision.
    """
    if conv.is_low:
        return False
    return conv.geometry.groups == 1 and gram_multiply_adds(conv) < 2.5 * conv.multiply_adds


def deferred_sum(conv: Convolution) -> Callable[[Tensor], Tensor]:
    """The clipped sum as ordinary weight gradients, rows scaled by their units' factors."""

    def product(inputs: Tensor, scaled: Tensor) -> Tensor:
        return weight_gradient(inputs, scaled, conv.weight.to(scaled.dtype), conv.geometry)

    def form_sum(factors: Tensor) -> Tensor:
        return summed_by_parts(product, conv.inputs, conv.gradients, conv.segments, factors)

    return form_sum
