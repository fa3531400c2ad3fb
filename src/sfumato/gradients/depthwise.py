"""Per-unit gradients of depthwise convolutions: each filter sees one channel, so that nothing is multiplied
as matrices.

shifted   for each tap of the kernel the sum over positions of g times the input shifted there.
folded    one call of the library's backward pass, the rows as channels of one image.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from sfumato.gradients.operands import Convolution, pad, weight_gradient
from sfumato.gradients.piece import Materialised

CACHED_VALUES = 131_072  # values of a product that stay in the core's own cache until they are summed


def is_depthwise(conv: Convolution) -> bool:
    """Whether each channel of an image has one filter of its own."""
    channels = conv.inputs.shape[1]
    if conv.is_low:
        return False
    return conv.inputs.dim() == 4 and conv.geometry.groups == channels == conv.gradients.shape[1] > 1


def shifted_piece(conv: Convolution) -> Materialised:
    """By sums over positions, channels last."""
    geometry = conv.geometry
    inputs = pad(conv.inputs, geometry).movedim(1, -1).contiguous()
    gradients = conv.gradients.movedim(1, -1).contiguous()
    rows, height, width, channels = gradients.shape
    result = gradients.new_empty(*geometry.kernel, rows, channels)
    at_once = min(rows, max(1, CACHED_VALUES // max(1, gradients[0].numel())))
    product = gradients.new_empty(at_once, height, width, channels)
    for start in range(0, rows, at_once):
        part = slice(start, min(start + at_once, rows))
        room = product[: part.stop - start]
        for taps in itertools.product(*map(range, geometry.kernel)):
            spans = zip(taps, geometry.dilation, geometry.stride, (height, width), strict=True)
            places = [slice(t * d, t * d + (size - 1) * s + 1, s) for t, d, s, size in spans]
            torch.mul(inputs[(part, *places)], gradients[part], out=room)
            torch.sum(room, dim=(1, 2), out=result[taps][part])
    by_row = result.movedim((2, 3), (0, 1)).unsqueeze(2)  # (rows, channels, 1, *kernel)
    return Materialised(conv.segments.sum(by_row).contiguous())


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
