"""Per-unit gradients of convolutions: three equal strategies.

columns   the unit's weight gradient as a matrix product over its patches, laid out in a buffer that stays in
          cache; the clipped sum is then one weighted sum over memory.
library   the unit's weight gradient by one call of the library's convolution backward.
gram      only the norm, |G|^2 = sum over positions s, t of <patch_s, patch_t> <g_s, g_t>; the clipped sum
          is one ordinary weight gradient with the rows of g scaled by their factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfumato.gradients.call import Call, Strategy
from sfumato.gradients.piece import Deferred, Materialised, Piece, squared_norms, zero_where_dropped
from sfumato.gradients.segments import Segments

CACHE_VALUES = 1_500_000  # values of a work buffer that stay in the last-level cache beside its product
GRAM_VALUES = 1_000_000


@dataclass(frozen=True)
class Geometry:
    """Where a convolution looks: one entry per spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]  # zeros put before and after the input
    after: tuple[int, ...]
    groups: int

    @property
    def even(self) -> bool:
        """The same padding on both sides, as the library's calls take it."""
        return self.before == self.after

    def unpadded(self) -> Geometry:
        nothing = (0,) * len(self.kernel)
        return Geometry(self.kernel, self.stride, self.dilation, nothing, nothing, self.groups)


@dataclass(frozen=True)
class Convolution:
    """The operands of one convolution: rows of inputs, output gradients, and the weight's shape."""

    inputs: Tensor  # (rows, in_channels, *space)
    gradients: Tensor  # (rows, out_channels, *out_space)
    weight: Tensor
    geometry: Geometry
    segments: Segments

    @property
    def multiply_adds(self) -> float:
        """Of one weight gradient over all rows."""
        return self.gradients.numel() * self.weight[0].numel()


def geometry_of(module: nn.Module, space: tuple[int, ...]) -> Geometry:
    """Geometry of an ``nn.Conv*d`` for an input of this size."""
    if module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        before = tuple(value // 2 for value in total)
        after = tuple(value - value // 2 for value in total)
    else:
        before = after = (0,) * len(space) if module.padding == "valid" else tuple(module.padding)
    return Geometry(module.kernel_size, module.stride, module.dilation, before, after, module.groups)


def pad(inputs: Tensor, geometry: Geometry, mode: str = "constant") -> Tensor:
    """The inputs with their borders, for what cannot pad by itself."""
    if not any(geometry.before) and not any(geometry.after):
        return inputs
    pairs = zip(reversed(geometry.before), reversed(geometry.after), strict=True)
    return F.pad(inputs, [value for pair in pairs for value in pair], mode=mode)


def weight_gradient(inputs: Tensor, gradients: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The library's weight gradient, summed over all rows."""
    if not geometry.even:
        inputs, geometry = pad(inputs, geometry), geometry.unpadded()
    no_shift = [0] * len(geometry.kernel)
    return torch.ops.aten.convolution_backward(
        gradients,
        inputs,
        weight,
        None,
        geometry.stride,
        geometry.before,
        geometry.dilation,
        False,
        no_shift,
        geometry.groups,
        [False, True, False],
    )[1]


def by_library(conv: Convolution) -> Tensor:
    """Each unit's weight gradient, (units, *weight shape), by one library call per unit."""
    result = conv.weight.new_empty(conv.segments.num_units, *conv.weight.shape)
    for group in conv.segments.groups:
        inputs, gradients = group.split(conv.inputs), group.split(conv.gradients)
        for i, unit in enumerate(range(group.units.start, group.units.stop)):
            result[unit] = weight_gradient(inputs[i], gradients[i], conv.weight, conv.geometry)
    return result


def channels_last(rows: Tensor) -> Tensor:
    """(rows, channels, *space) -> (rows, *space, channels), a view."""
    return rows.movedim(1, -1)


def columns(inputs: Tensor, geometry: Geometry, out_space: tuple[int, ...]) -> Tensor:
    """Patches of ``inputs``: (rows, *out_space, *kernel, channels), contiguous."""
    pointwise = all(k == 1 for k in geometry.kernel) and all(s == 1 for s in geometry.stride)
    padded = channels_last(pad(inputs, geometry)).contiguous()
    if pointwise:
        return padded.view(len(padded), *out_space, *geometry.kernel, padded.shape[-1])
    steps = padded.stride()[1:-1]
    moves = [step * stride for step, stride in zip(steps, geometry.stride, strict=True)]
    offsets = [step * dilation for step, dilation in zip(steps, geometry.dilation, strict=True)]
    shape = (len(padded), *out_space, *geometry.kernel, padded.shape[-1])
    return padded.as_strided(shape, (padded.stride(0), *moves, *offsets, 1)).contiguous()


def unit_gradients(conv: Convolution) -> Iterator[tuple[slice, Tensor]]:
    """Weight gradients of a few units at a time, as (units, (units, out, kernel positions * in_channels)).

    A unit's patches are laid out as one matrix of (rows * positions) x (kernel * channels): the product
    with the output gradients sums over the unit's rows by itself.
    """
    out_space = tuple(conv.gradients.shape[2:])
    per_row = math.prod(out_space) * conv.weight[0].numel() * conv.geometry.groups
    for group in conv.segments.groups:
        inputs, gradients = group.split(conv.inputs), group.split(conv.gradients)
        units = max(2, CACHE_VALUES // (per_row * group.size))
        views = max(1, min(group.size, CACHE_VALUES // (2 * per_row)))
        for first in range(0, len(inputs), units):
            chosen = slice(first, min(first + units, len(inputs)))
            total = sum(
                _product(inputs[chosen, v : v + views], gradients[chosen, v : v + views], conv.geometry)
                for v in range(0, group.size, views)
            )
            yield slice(group.units.start + first, group.units.start + chosen.stop), total


def _product(inputs: Tensor, gradients: Tensor, geometry: Geometry) -> Tensor:
    """(units, rows, ...) operands -> (units, out_channels, kernel positions * in_channels per group)."""
    units, out_space = len(inputs), tuple(gradients.shape[3:])
    patches = columns(inputs.flatten(0, 1), geometry, out_space)
    g = channels_last(gradients.flatten(0, 1)).reshape(units, -1, gradients.shape[2])
    if geometry.groups == 1:
        return torch.bmm(g.transpose(1, 2), patches.view(units, g.shape[1], -1))
    g = g.unflatten(2, (geometry.groups, -1))
    patches = patches.view(units, g.shape[1], math.prod(geometry.kernel), geometry.groups, -1)
    return torch.einsum("utgo,utkgc->ugokc", g, patches).flatten(3).flatten(1, 2)


def to_weight_shape(summed: Tensor, weight: Tensor) -> Tensor:
    """(out, kernel positions * in) as ``unit_gradients`` gives it -> the weight's own order of axes."""
    return summed.view(len(weight), *weight.shape[2:], weight.shape[1]).movedim(-1, 1).contiguous()


def gram_products(conv: Convolution, gradients: Tensor) -> Tensor:
    """Each unit's squared norm of its weight gradient, float64, without forming the gradient."""
    result = torch.zeros(conv.segments.num_units, dtype=torch.float64, device=gradients.device)
    for group in conv.segments.groups:
        inputs, g = group.split(conv.inputs), group.split(gradients)
        positions = max(math.prod(inputs.shape[3:]), math.prod(g.shape[3:])) * group.size
        units = max(1, GRAM_VALUES // positions**2)
        for first in range(0, len(inputs), units):
            part = slice(first, first + units)
            patches = _patch_gram(inputs[part], conv.geometry, tuple(g.shape[3:]))
            flat = g[part].transpose(1, 2).flatten(2)  # (units, out_channels, rows * positions)
            outputs = torch.bmm(flat.transpose(1, 2), flat)
            start = group.units.start + first
            result[start : start + len(outputs)] = (patches * outputs).sum(dim=2).double().sum(dim=1)
    return result


def _patch_gram(inputs: Tensor, geometry: Geometry, out_space: tuple[int, ...]) -> Tensor:
    """Inner products of all pairs of a unit's patches: (units, rows * positions, rows * positions).

    At stride 1 they are sums along the diagonals of the pixels' Gram matrix, one dimension after another;
    the patches themselves are never laid out.
    """
    units, rows = inputs.shape[:2]
    if any(stride != 1 for stride in geometry.stride):
        patches = columns(inputs.flatten(0, 1), geometry, out_space).reshape(
            units, rows * math.prod(out_space), -1
        )
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


def gram_multiply_adds(conv: Convolution) -> float:
    """Cost of ``gram_products``, the weighted sum that follows it included."""
    in_space, out_space = math.prod(conv.inputs.shape[2:]), math.prod(conv.gradients.shape[2:])
    strided = any(stride != 1 for stride in conv.geometry.stride)
    wide = out_space**2 * conv.weight[0].numel() if strided else in_space**2 * conv.inputs.shape[1]
    pairs = sum(group.size**2 * (group.units.stop - group.units.start) for group in conv.segments.groups)
    return conv.multiply_adds + pairs * (wide + out_space**2 * conv.gradients.shape[1])


def deferred_sum(conv: Convolution) -> Callable[[Tensor], Tensor]:
    """The clipped sum as one ordinary weight gradient, rows scaled by their units' factors."""

    def form_sum(factors: Tensor) -> Tensor:
        per_row = conv.segments.per_row(factors)
        weights = per_row.to(conv.gradients.dtype).view(-1, *[1] * (conv.gradients.dim() - 1))
        scaled = zero_where_dropped(conv.gradients * weights, per_row)
        return weight_gradient(zero_where_dropped(conv.inputs, per_row), scaled, conv.weight, conv.geometry)

    return form_sum


def position_sums(rows: Tensor) -> Tensor:
    """(rows, channels, *space) -> (rows, channels): the sum over all positions."""
    return rows.flatten(2).sum(dim=2)


def bias_piece(call: Call) -> dict[str, Piece]:
    """The bias sees the plain sum of the output gradients."""
    if "bias" not in call.names:
        return {}
    return {"bias": Materialised(call.segments.sum(position_sums(call.gradient)))}


def operands(call: Call, geometry: Geometry, padding_mode: str = "zeros") -> Convolution:
    """The call as a convolution over rows; borders that are not zeros are made part of the input."""
    inputs, gradients = call.input, call.gradient
    if padding_mode != "zeros":
        inputs, geometry = pad(inputs, geometry, padding_mode), geometry.unpadded()
    dtype = torch.promote_types(call.module.weight.dtype, gradients.dtype)
    return Convolution(
        inputs.to(dtype), gradients.to(dtype), call.module.weight.detach().to(dtype), geometry, call.segments
    )


def convolution_rule(call: Call) -> list[Strategy]:
    """nn.Conv1d, Conv2d, Conv3d with any stride, padding, dilation and groups."""
    module = call.module
    geometry = geometry_of(module, tuple(call.input.shape[2:]))
    conv = operands(call, geometry, module.padding_mode)

    def by_columns() -> dict[str, Piece]:
        pieces = bias_piece(call)
        if "weight" in call.names:
            pieces["weight"] = columns_piece(conv)
        return pieces

    def by_calls() -> dict[str, Piece]:
        pieces = bias_piece(call)
        if "weight" in call.names:
            pieces["weight"] = Materialised(by_library(conv))
        return pieces

    def by_gram() -> dict[str, Piece]:
        norms = gram_products(conv, conv.gradients)
        return {**bias_piece(call), "weight": Deferred(norms, deferred_sum(conv))}

    strategies = [
        Strategy("columns", conv.multiply_adds * 1.3, by_columns),
        Strategy("library", conv.multiply_adds * 1.4, by_calls),
    ]
    if gram_pays(conv) and "weight" in call.names:
        strategies.append(Strategy("gram", gram_multiply_adds(conv), by_gram))
    return strategies


def gram_pays(conv: Convolution) -> bool:
    """Whether the Gram norm could be the cheaper way; it is never worth trying far beyond."""
    return conv.geometry.groups == 1 and gram_multiply_adds(conv) < 2.5 * conv.multiply_adds


def columns_piece(conv: Convolution) -> Materialised:
    """The units' gradients by products over their patches, squared norms taken while still in cache."""
    fan_in = conv.weight[0].numel()
    gradients = conv.weight.new_empty(conv.segments.num_units, len(conv.weight), fan_in)
    norms = torch.empty(conv.segments.num_units, dtype=torch.float64, device=gradients.device)
    for units, part in unit_gradients(conv):
        gradients[units] = part
        norms[units] = squared_norms(part)
    return Materialised(gradients, norms, lambda summed: to_weight_shape(summed, conv.weight))
