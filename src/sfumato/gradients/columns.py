"""Units' weight gradients as matrix products over their patches, laid out in a buffer that stays in cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.gradients.operands import Convolution, Geometry
from sfumato.gradients.piece import squared_norms, weighted_sum

CACHE_VALUES = 1_600_000  # values of a work buffer that stay in the last-level cache beside its product


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
            chunk = slice(first, min(first + units, len(inputs)))
            part = slice(group.units.start + first, group.units.start + chunk.stop)
            for view in range(0, group.size, views):
                x, g = inputs[chunk, view : view + views], gradients[chunk, view : view + views]
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


def gradient_buffer(conv: Convolution) -> Tensor:
    """Room for what ``unit_gradients`` fills in."""
    out, channels, first, *rest = conv.weight.shape
    return conv.weight.new_empty(first, conv.segments.num_units, out, math.prod(rest) * channels)


def columns_piece(conv: Convolution) -> ByKernelRow:
    """The units' gradients by products over their patches, squared norms taken while still in cache."""
    gradients = gradient_buffer(conv)
    norms = torch.empty(conv.segments.num_units, dtype=torch.float64, device=gradients.device)
    for units in unit_gradients(conv, gradients):
        norms[units] = sum(squared_norms(part[units]) for part in gradients)
    return ByKernelRow(gradients, norms, conv.weight.shape)


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
