"""Per-unit gradients of weight-standardised convolutions, at the cost of ordinary ones.

The filters applied are gain * u with u = z / n, z = w - mean(w), n = sqrt(max(|z|^2, eps)). With G the
gradient for the applied filters, per output channel,

    gradient for gain = <G, u>
    gradient for w    = a * (G - mean(G) - u <G, u>),   a = gain / n,

where the last term is absent for a filter held by eps. Both subtracted parts are orthogonal to the rest, so

    |gradient for w|^2 = a^2 * (|G|^2 - fan_in * mean(G)^2 - <G, u>^2):

no unit's gradient has to be projected; the projection is applied once, to the clipped sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from sfumato.gradients.call import Call, Strategy
from sfumato.gradients.columns import ByKernelRow, gradient_buffer, unit_gradients
from sfumato.gradients.convolution import (
    ByUnit,
    bias_piece,
    by_library,
    channels_second,
    direct_gradients,
    memory_order,
    offers_direct,
)
from sfumato.gradients.gram import deferred_sum, gram_multiply_adds, gram_pays, gram_products
from sfumato.gradients.kernels import channel_sums, filter_moments, position_products
from sfumato.gradients.layer_types import WeightStandardised
from sfumato.gradients.operands import Convolution, Geometry, operands, pad
from sfumato.gradients.piece import Deferred, Materialised, Piece, working_dtype

MAX_BIAS_TO_GAIN = 10.0  # beyond it, <G, u> read off the layer's output loses digits to the bias


@dataclass(frozen=True)
class Filters:
    """The standardisation of one layer, per output channel."""

    direction: Tensor  # u, in the weight's shape
    slope: Tensor  # a = gain / n
    free: Tensor  # 1, or 0 where eps holds the filter

    @property
    def fan_in(self) -> int:
        return self.direction[0].numel()

    def squared_norms(self, squares: Tensor, sums: Tensor, along: Tensor) -> Tensor:
        """(units, out) of |G|^2, sum of G and <G, u> -> (units,) squared norms of the weight's gradient.

        Guarantee: rounding never makes the result smaller than the true value: what the subtraction may have
        lost is added back.
        """
        squares, slope = squares.double(), self.slope.double().square()
        removed = sums.double().square() / self.fan_in + self.free * along.double().square()
        lost = 16 * torch.finfo(self.direction.dtype).eps * squares
        return (slope * ((squares - removed).clamp(min=0) + lost)).sum(dim=1)

    def project(self, gradient: Tensor) -> Tensor:
        """From the gradient for the applied filters to the gradient for the weight."""
        values, u = _of_filter(gradient), self.direction
        along = (gradient * u).sum(dim=values, keepdim=True) * _spread(self.free, u)
        return (gradient - gradient.mean(dim=values, keepdim=True) - u * along) * _spread(self.slope, u)


def filters_of(weight: Tensor, gain: Tensor, eps: float) -> Filters:
    """The standardisation as ``WSConv2d`` applies it."""
    values = _of_filter(weight)
    centred = weight - weight.mean(dim=values, keepdim=True)
    squares = centred.square().sum(dim=values)
    norms = squares.clamp(min=eps).sqrt()
    free = (squares >= eps).to(weight.dtype)
    return Filters(centred / _spread(norms, weight), gain.flatten() / norms, free)


def _of_filter(weight: Tensor) -> tuple[int, ...]:
    """The axes within a filter; all at once, so that no memory format is copied into another."""
    return tuple(range(1, weight.dim()))


def _spread(per_filter: Tensor, weight: Tensor) -> Tensor:
    return per_filter.view(-1, *[1] * (weight.dim() - 1))


def weight_standardised_rule(call: Call) -> list[Strategy]:
    """``WSConv2d``: weight, gain and bias."""
    module = cast(WeightStandardised, call.module)
    left, right, top, bottom = module.padding_for(*call.input.shape[-2:])
    kernel, stride, dilation = ((size, size) for size in (module.kernel_size, module.stride, module.dilation))
    geometry = Geometry(kernel, stride, dilation, (top, left), (bottom, right), module.groups)
    conv = operands(call, geometry)
    weight = module.weight.detach().to(working_dtype(conv.weight.dtype))
    filters = filters_of(weight, module.gain.detach().to(weight.dtype), module.eps)

    def by_columns() -> dict[str, Piece]:
        return _keep(call, {**bias_piece(call), **_columns_pieces(conv, filters)})

    def by_calls() -> dict[str, Piece]:
        return _keep(call, {**bias_piece(call), **_library_pieces(conv, filters)})

    def by_gram() -> dict[str, Piece]:
        return _keep(call, {**bias_piece(call), **_gram_pieces(call, conv, filters)})

    def directly() -> dict[str, Piece]:
        return _keep(call, _direct_pieces(conv, filters))

    strategies = [
        Strategy("columns", conv.multiply_adds * 1.3, by_columns),
        Strategy("library", conv.multiply_adds * 1.4, by_calls),
    ]
    if offers_direct(conv):
        strategies.append(Strategy("direct", conv.multiply_adds * 1.1, directly))
    steep = (module.bias.detach().abs() > MAX_BIAS_TO_GAIN * module.gain.detach().flatten().abs()).any()
    # the output of a layer in half precision is rounded by more than a norm may be
    exact = call.outputs is not None and call.outputs[0].dtype == conv.gradients.dtype
    if exact and gram_pays(conv) and not steep:
        strategies.append(Strategy("gram", gram_multiply_adds(conv), by_gram))
    return strategies


def _keep(call: Call, pieces: dict[str, Piece]) -> dict[str, Piece]:
    return {name: piece for name, piece in pieces.items() if name in call.names}


def _direct_pieces(conv: Convolution, filters: Filters) -> dict[str, Piece]:
    gradients, moments, shifts = direct_gradients(conv, filters.direction)
    weight = Materialised(
        gradients, filters.squared_norms(*moments), lambda total: filters.project(channels_second(total))
    )
    return {"weight": weight, "gain": _gain(moments[2], conv), "bias": Materialised(shifts)}


def _columns_pieces(conv: Convolution, filters: Filters) -> dict[str, Piece]:
    gradients = gradient_buffer(conv)
    moments = torch.empty(3, *gradients.shape[1:3], dtype=torch.float64, device=gradients.device)
    directions = filters.direction.movedim((2, 1), (0, -1)).reshape(len(gradients), *gradients.shape[2:])
    for units in unit_gradients(conv, gradients):  # while they are in cache
        moments[:, units] = filter_moments(gradients[:, units].to(directions.dtype), directions)
    weight = ByKernelRow(gradients, filters.squared_norms(*moments), conv.weight.shape, filters.project)
    return {"weight": weight, "gain": _gain(moments[2], conv)}


def _library_pieces(conv: Convolution, filters: Filters) -> dict[str, Piece]:
    gradients = list(by_library(conv))
    order = memory_order(gradients[0])
    directions = filters.direction.permute(order).flatten(1)
    moments = torch.cat(
        [
            filter_moments(each.permute(order).flatten(1)[None, None].to(directions.dtype), directions[None])
            for each in gradients
        ],
        dim=1,
    )
    weight = ByUnit(gradients, filters.squared_norms(*moments), filters.project)
    return {"weight": weight, "gain": _gain(moments[2], conv)}


def _gram_pieces(call: Call, conv: Convolution, filters: Filters) -> dict[str, Piece]:
    """Norms only. <G, u> comes from the layer's own output, sum(G) from a box filter of the inputs."""
    module, segments, gradients = cast(WeightStandardised, call.module), call.segments, conv.gradients
    assert call.outputs is not None  # else this strategy is not offered
    gain, bias = module.gain.detach().flatten(), module.bias.detach()
    shift, outputs = channel_sums(gradients, call.outputs[0].to(gradients.dtype))
    along = segments.sum((outputs - bias * shift) / gain)
    sums = segments.sum(position_products(gradients, _box_sums(conv)))
    slope = filters.slope.view(1, -1, *[1] * (gradients.dim() - 2))
    # The Gram norm sees all channels together, so the slopes go into g: norms are then of a * G.
    scaled = gram_products(conv, gradients * slope)
    squared = filters.slope.double().square()
    removed = squared * (sums.double().square() / filters.fan_in + filters.free * along.double().square())
    lost = 16 * torch.finfo(gradients.dtype).eps * scaled
    norms = (scaled - removed.sum(dim=1)).clamp(min=0) + lost
    plain_sum = deferred_sum(conv)
    return {
        "weight": Deferred(norms, lambda factors: filters.project(plain_sum(factors))),
        "gain": _gain(along, conv),
    }


def _box_sums(conv: Convolution) -> Tensor:
    """Sum over each patch, per output position and channel: (rows, out_channels or 1, *out_space)."""
    geometry, groups = conv.geometry, conv.geometry.groups
    summed = pad(conv.inputs, geometry).unflatten(1, (groups, -1)).sum(dim=2)
    for axis, outputs in enumerate(conv.gradients.shape[2:], start=2):
        kernel, stride = geometry.kernel[axis - 2], geometry.stride[axis - 2]
        starts = [tap * geometry.dilation[axis - 2] for tap in range(kernel)]
        window = (outputs - 1) * stride + 1
        step = tuple(slice(None, None, stride if i == axis else 1) for i in range(summed.dim()))
        summed = sum(summed.narrow(axis, start, window)[step] for start in starts)
    return summed.repeat_interleave(conv.gradients.shape[1] // groups, dim=1) if groups > 1 else summed


def _gain(along: Tensor, conv: Convolution) -> Materialised:
    return Materialised(along.to(working_dtype(conv.weight.dtype))[:, :, None, None, None])
