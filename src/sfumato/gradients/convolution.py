"""Per-unit gradients of convolutions: four equal strategies.

direct    the unit's weight gradient by compiled sums over its positions, where vectors are wide.
columns   the unit's weight gradient as matrix products over its patches, laid out in a buffer that stays
          in cache; the clipped sum is then one weighted sum over memory.
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
from sfumato.gradients.fused import offers_unit_filters, position_sums, unit_filters
from sfumato.gradients.piece import (
    Deferred,
    Materialised,
    Piece,
    gram_norms,
    squared_norms,
    weighted_sum,
    zero_where_dropped,
)
from sfumato.gradients.segments import Segments

CACHE_VALUES = 1_600_000  # values of a work buffer that stay in the last-level cache beside its product
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


@dataclass
class ByUnit:
    """Units' weight gradients as the library returns them, one tensor each."""

    gradients: list[Tensor]
    squared_norms: Tensor
    finish: Callable[[Tensor], Tensor] | None = None

    @property
    def held_bytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        total = torch.zeros_like(self.gradients[0])
        for gradient, factor in zip(self.gradients, factors.tolist(), strict=True):
            if factor:  # a dropped unit may hold values that are not finite
                total.add_(gradient, alpha=factor)
        return total if self.finish is None else self.finish(total)

    def per_unit(self) -> Tensor:
        finish = self.finish or (lambda gradient: gradient)
        return torch.stack([finish(gradient) for gradient in self.gradients])


def by_library(conv: Convolution) -> Iterator[Tensor]:
    """Each unit's weight gradient by one library call per unit, in the order of the units."""
    for group in conv.segments.groups:
        for inputs, gradients in zip(group.split(conv.inputs), group.split(conv.gradients), strict=True):
            yield weight_gradient(inputs, gradients, conv.weight, conv.geometry)


def memory_order(weight: Tensor) -> tuple[int, ...]:
    """The axes of a weight, filters first, in the order in which its values lie in memory."""
    rest = sorted(range(1, weight.dim()), key=weight.stride, reverse=True)
    return (0, *rest)


def library_piece(conv: Convolution) -> ByUnit:
    gradients = list(by_library(conv))
    order = memory_order(gradients[0])
    norms = torch.cat([squared_norms(gradient.permute(order).reshape(1, -1)) for gradient in gradients])
    return ByUnit(gradients, norms)


class Patches:
    """Lays out inputs so that each row of the kernel meets them as one matrix, in buffers used again.

    The kernel's offsets along all spatial axes but the first are written out, the first is met by shifting:
    [residue, line, view, *rest, offsets * channels], where input line = line * stride + residue. Kernel row
    k then begins at residue (k * dilation) % stride, line (k * dilation) // stride, and its patches are
    neighbours in memory. That copies the inputs k times instead of k * k times.
    """

    def __init__(self, conv: Convolution, units: int, views: int) -> None:
        geometry, x = conv.geometry, conv.inputs
        self.stride, self.dilation = geometry.stride[0], geometry.dilation[0]
        self.out_space = tuple(conv.gradients.shape[2:])
        channels, space = x.shape[1], x.shape[2:]
        reach = self.dilation * (geometry.kernel[0] - 1) + self.stride * (self.out_space[0] - 1) + 1
        lines = -(-max(reach, geometry.before[0] + space[0] + geometry.after[0]) // self.stride)
        sides = zip(geometry.before[1:], space[1:], geometry.after[1:], strict=True)
        padded = [lines * self.stride, *(before + size + after for before, size, after in sides)]
        self.padded = x.new_zeros(units, views, *padded, channels)
        inner = [slice(before, before + size) for before, size in zip(geometry.before, space, strict=True)]
        self.interior = self.padded[(slice(None), slice(None), *inner)]
        unit, view, line, *rest, _ = self.padded.stride()
        shape = (units, self.stride, lines, views, *self.out_space[1:], *geometry.kernel[1:], channels)
        moves = [step * stride for step, stride in zip(rest, geometry.stride[1:], strict=True)]
        offsets = [step * dilation for step, dilation in zip(rest, geometry.dilation[1:], strict=True)]
        strides = (unit, line, line * self.stride, view, *moves, *offsets, 1)
        self.windows = self.padded.as_strided(shape, strides)
        self.buffer = x.new_empty(shape)

    def lay_out(self, inputs: Tensor) -> None:
        """Take in (units, views, channels, *space)."""
        units, views = inputs.shape[:2]
        self.interior[:units, :views].copy_(inputs.movedim(2, -1))
        self.buffer[:units, :, :, :views].copy_(self.windows[:units, :, :, :views])

    def row(self, tap: int, units: int, views: int) -> Tensor:
        """Patches under kernel row ``tap``: (units, lines * views * positions, offsets * channels)."""
        start, residue = divmod(tap * self.dilation, self.stride)
        patches = self.buffer[:units, residue, start : start + self.out_space[0], :views]
        positions = self.out_space[0] * views * math.prod(self.out_space[1:])
        return patches.reshape(units, positions, -1)


def unit_gradients(conv: Convolution, result: Tensor) -> Iterator[slice]:
    """Fill ``result``, (kernel rows, units, out, offsets * in_channels), yielding the units just filled.

    A unit's patches are one matrix of (lines * views * positions) x (offsets * channels): the product with
    the output gradients sums over the unit's rows by itself.
    """
    kernel = conv.geometry.kernel
    per_row = conv.gradients[0, 0].numel() * conv.inputs.shape[1] * math.prod(kernel[1:])
    for group in conv.segments.groups:
        inputs, gradients = group.split(conv.inputs), group.split(conv.gradients)
        units = min(len(inputs), _shared_evenly(CACHE_VALUES // (per_row * group.size)))
        views = max(1, min(group.size, CACHE_VALUES // (units * per_row)))
        patches = Patches(conv, units, views)
        for first in range(0, len(inputs), units):
            some = slice(first, min(first + units, len(inputs)))
            part = slice(group.units.start + first, group.units.start + some.stop)
            for view in range(0, group.size, views):
                x, g = inputs[some, view : view + views], gradients[some, view : view + views]
                patches.lay_out(x)
                g = g.movedim(2, -1).transpose(1, 2).reshape(len(x), -1, g.shape[2])
                for tap in range(kernel[0]):
                    row = patches.row(tap, *x.shape[:2])
                    _add_product(result[tap, part], g, row, conv.geometry, fresh=view == 0)
            yield part


def _shared_evenly(units: int) -> int:
    """At most so many units, but as many for every thread: the products of a pass are divided by units."""
    threads = torch.get_num_threads()
    return max(1, units // threads) * threads


def _add_product(result: Tensor, g: Tensor, patches: Tensor, geometry: Geometry, *, fresh: bool) -> None:
    """Add g^T patches of each unit to ``result``, or overwrite it where it is ``fresh``."""
    if geometry.groups == 1:
        torch.baddbmm(result, g.transpose(1, 2), patches, beta=0 if fresh else 1, out=result)
        return
    by_group = patches.unflatten(2, (math.prod(geometry.kernel[1:]), geometry.groups, -1))
    g = g.unflatten(2, (geometry.groups, -1))
    value = torch.einsum("utgo,utkgc->ugokc", g, by_group).flatten(3).flatten(1, 2)
    result.copy_(value if fresh else result + value)


@dataclass
class ByKernelRow:
    """Units' weight gradients as ``unit_gradients`` lays them out, and the way back to the weight's shape."""

    gradients: Tensor  # (kernel rows, units, out, offsets * in_channels)
    squared_norms: Tensor
    shape: torch.Size
    finish: Callable[[Tensor], Tensor] | None = None

    @property
    def held_bytes(self) -> int:
        return self.gradients.nbytes

    def weighted_sum(self, factors: Tensor) -> Tensor:
        total = self._in_shape(torch.stack([weighted_sum(part, factors) for part in self.gradients]))
        return total if self.finish is None else self.finish(total)

    def per_unit(self) -> Tensor:
        each = [self._in_shape(gradient) for gradient in self.gradients.unbind(dim=1)]
        return torch.stack(each if self.finish is None else [self.finish(gradient) for gradient in each])

    def _in_shape(self, gradient: Tensor) -> Tensor:
        """(kernel rows, out, offsets * in) -> the weight's own order of axes."""
        out, channels, first, *rest = self.shape
        return gradient.view(first, out, *rest, channels).movedim((1, -1), (0, 1)).contiguous()


def unfold(inputs: Tensor, geometry: Geometry, out_space: tuple[int, ...]) -> Tensor:
    """All patches written out: (rows, *out_space, *kernel, channels)."""
    padded = pad(inputs, geometry).movedim(1, -1).contiguous()
    steps = padded.stride()[1:-1]
    moves = [step * stride for step, stride in zip(steps, geometry.stride, strict=True)]
    offsets = [step * dilation for step, dilation in zip(steps, geometry.dilation, strict=True)]
    shape = (len(padded), *out_space, *geometry.kernel, padded.shape[-1])
    return padded.as_strided(shape, (padded.stride(0), *moves, *offsets, 1)).contiguous()


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
            result[start : start + len(outputs)] = gram_norms(patches, outputs)
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
            pieces["weight"] = library_piece(conv)
        return pieces

    def by_gram() -> dict[str, Piece]:
        norms = gram_products(conv, conv.gradients)
        return {**bias_piece(call), "weight": Deferred(norms, deferred_sum(conv))}

    def directly() -> dict[str, Piece]:
        return {name: piece for name, piece in direct_pieces(conv).items() if name in call.names}

    strategies = [
        Strategy("columns", conv.multiply_adds * 1.3, by_columns),
        Strategy("library", conv.multiply_adds * 1.4, by_calls),
    ]
    if offers_direct(conv) and "weight" in call.names:
        strategies.append(Strategy("direct", conv.multiply_adds * 1.1, directly))
    if gram_pays(conv) and "weight" in call.names:
        strategies.append(Strategy("gram", gram_multiply_adds(conv), by_gram))
    return strategies


def gram_pays(conv: Convolution) -> bool:
    """Whether the Gram norm could be the cheaper way; it is never worth trying far beyond."""
    return conv.geometry.groups == 1 and gram_multiply_adds(conv) < 2.5 * conv.multiply_adds


def gradient_buffer(conv: Convolution) -> Tensor:
    """Room for what ``unit_gradients`` fills in."""
    out, channels, first, *rest = conv.weight.shape
    return conv.weight.new_empty(first, conv.segments.num_units, out, math.prod(rest) * channels)


def direct_gradients(conv: Convolution, directions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(units, out, *kernel, in) by compiled sums over positions; their moments; the bias's (units, out)."""
    shape, found = conv.geometry, []
    geometry = (*shape.kernel, *shape.stride, *shape.dilation, *shape.before)
    directions = directions.movedim(1, -1)
    for group in conv.segments.groups:
        rows = conv.inputs[group.rows], conv.gradients[group.rows]
        found.append(unit_filters(*rows, directions, group.units.stop - group.units.start, geometry))
    if len(found) == 1:
        return found[0]
    gradients, moments, shifts = zip(*found, strict=True)
    return torch.cat(gradients), torch.cat(moments, dim=1), torch.cat(shifts)


def offers_direct(conv: Convolution) -> bool:
    return conv.geometry.groups == 1 and offers_unit_filters(conv.inputs, conv.gradients)


def channels_second(gradient: Tensor) -> Tensor:
    """(out, *kernel, in) -> (out, in, *kernel), as weights are."""
    return gradient.movedim(-1, 1)


def direct_pieces(conv: Convolution) -> dict[str, Piece]:
    gradients, moments, shifts = direct_gradients(conv, conv.weight)
    weight = Materialised(gradients, moments[0].sum(dim=1), channels_second)
    return {"weight": weight, "bias": Materialised(shifts)}


def columns_piece(conv: Convolution) -> ByKernelRow:
    """The units' gradients by products over their patches, squared norms taken while still in cache."""
    gradients = gradient_buffer(conv)
    norms = torch.empty(conv.segments.num_units, dtype=torch.float64, device=gradients.device)
    for units in unit_gradients(conv, gradients):
        norms[units] = sum(squared_norms(part[units]) for part in gradients)
    return ByKernelRow(gradients, norms, conv.weight.shape)
