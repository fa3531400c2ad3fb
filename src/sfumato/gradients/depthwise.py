"""Per-unit gradients of depthwise convolutions: each filter sees one channel, so that nothing is multiplied
as matrices.

shifted   for each tap of the kernel the sum over positions of g times the input shifted there.
folded    one call of the library's backward pass, the rows as channels of one image.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from sfumato.gradients.operands import Convolution, weight_gradient
from sfumato.gradients.piece import Materialised

CACHED_VALUES = 131_072  # values of a product that stay in the core's own cache until they are summed


def is_depthwise(conv: Convolution) -> bool:
    """Whether each channel of an image has one filter of its own."""
    channels = conv.inputs.shape[1]
    if conv.is_low:
        return False
    return conv.inputs.dim() == 4 and conv.geometry.groups == channels == conv.gradients.shape[1] > 1


def shifted_piece(conv: Convolution) -> Materialised:
    """By sums over positions, channels last; of each tap only over positions that do not meet the border."""
    geometry = conv.geometry
    inputs, gradients = (value.movedim(1, -1).contiguous() for value in (conv.inputs, conv.gradients))
    rows, channels = len(gradients), gradients.shape[-1]
    result = gradients.new_zeros(rows, *geometry.kernel, channels)
    at_once = _rows_at_once(gradients[0].numel(), rows)
    product = gradients.new_empty(at_once * gradients[0].numel())
    places = [[_meeting(conv, axis, tap) for tap in range(geometry.kernel[axis])] for axis in range(2)]
    for start in range(0, rows, at_once):
        part = slice(start, min(start + at_once, rows))
        for y, x in itertools.product(*map(range, geometry.kernel)):
            (read_y, met_y), (read_x, met_x) = places[0][y], places[1][x]
            met = gradients[part, met_y, met_x]
            if met.numel():
                room = product[: met.numel()].view(met.shape)
                torch.mul(inputs[part, read_y, read_x], met, out=room)
                torch.sum(room, dim=(1, 2), out=result[part, y, x])
    return Materialised(conv.segments.sum(result), finish=_channels_first)


def _rows_at_once(values: int, rows: int) -> int:
    return min(rows, max(1, CACHED_VALUES // max(1, values)))


def _meeting(conv: Convolution, axis: int, tap: int) -> tuple[slice, slice]:
    """Input positions that a tap of the kernel reads along an axis, and the output positions it does so for;
    both empty where it reads nothing but the border."""
    geometry, inputs, outputs = conv.geometry, conv.inputs.shape[2 + axis], conv.gradients.shape[2 + axis]
    stride, shift = geometry.stride[axis], tap * geometry.dilation[axis] - geometry.before[axis]
    first = max(0, -(shift // stride))
    last = min(outputs - 1, (inputs - 1 - shift) // stride)
    if first > last:
        return slice(0, 0), slice(0, 0)
    return slice(first * stride + shift, last * stride + shift + 1, stride), slice(first, last + 1)


def _channels_first(gradient: Tensor) -> Tensor:
    """(*kernel, channels) -> (channels, 1, *kernel), as weights are."""
    return gradient.movedim(-1, 0).unsqueeze(1)


def folded_piece(conv: Convolution) -> Materialised:
    """By the library: (rows, channels, ...) as one image of rows * channels channels."""
    rows, channels = conv.inputs.shape[:2]

    def folded(values: Tensor) -> Tensor:
        return values.reshape(1, rows * channels, *values.shape[2:])

    weight = conv.weight.repeat(rows, *[1] * (conv.weight.dim() - 1))
    found = weight_gradient(
        folded(conv.inputs), folded(conv.gradients), weight, conv.geometry.with_groups(rows * channels)
    )
    return Materialised(conv.segments.sum(found.unflatten(0, (rows, channels)).contiguous()))
