"""Per-unit gradients of weight-standardised convolutions, at the cost of ordinary ones.

The filters applied are gain * u with u = z / n, z = w - mean(w), n = sqrt(max(|z|^2, eps)). With G the
gradient for the applied filters, per output channel,

    gradient for gain = <G, u>
    gradient for w    = a * (G - mean(G) - u <G, u>),   a = gain / n,

where the last term is absent for a filter held by eps. Both subtracted parts are orthogonal to the rest, so

    |gradient for w|^2 = a^2 * (|G|^2 - fan_in * mean(G)^2 - <G, u>^2):

no unit's gradient has to be projected; the projection is applied once, to the clipped sum.

Other libraries divide by the standard deviation, sqrt(|z|^2 / fan_in + eps). With n = sqrt(|z|^2 + fan_in *
eps) the filters applied are then gain * sqrt(fan_in) * u, the gradients have the same form, and |u| is below
1: the last term of the norm is (2 - |u|^2) <G, u>^2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from sfumato.gradients.call import Call, Strategy
from sfumato.gradients.columns import ByKernelRow, gradient_buffer, unit_gradients
from sfumato.gradients.convolution import (
    ByUnit,
    InParts,
    bias_piece,
    by_library,
    channels_second,
    direct_gradients,
    memory_order,
    offers_direct,
    rounding_alike,
)
from sfumato.gradients.gram import deferred_sum, gram_multiply_adds, gram_pays, gram_products
from sfumato.gradients.kernels import channel_sums, filter_moments, position_products
from sfumato.gradients.layer_types import VarianceStandardised, Weighted, WeightStandardised
from sfumato.gradients.operands import Convolution, Geometry, geometry_of, operands, pad
from sfumato.gradients.piece import Deferred, Materialised, Piece, working_dtype
from sfumato.gradients.twice import twice_moments, twice_pays, twice_sum

MAX_BIAS_TO_GAIN = 10.0  # beyond it, <G, u> read off the layer's output loses digits to the bias
SMALLEST_GAIN = 1e-6  # below it the output says nothing of u
LOST_TO_BIAS = 64  # roundings of the bias in an output, its product with g, and the sums of both


@dataclass(frozen=True)
class Filters:
    """The standardisation of one layer, per output channel."""

    direction: Tensor  # u, in the weight's shape
    slope: Tensor  # a = gain / n
    free: Tensor  # 1, or 0 where eps holds the filter
    removed: Tensor  # what of <G, u>^2 the squared norm is less
    gain: Tensor  # what u is multiplied by to be applied

    @property
    def fan_in(self) -> int:
        return self.direction[0].numel()

    def squared_norms(self, squares: Tensor, sums: Tensor, along: Tensor) -> Tensor:
        """(units, out) of |G|^2, sum of G and <G, u> -> (units,) squared norms of the weight's gradient.

        Guarantee: rounding never makes the result smaller than the true value: what the subtraction may have
        lost is added back.
        """
        squares, slope = squares.double(), self.slope.double().square()
        removed = self.removed_part(sums, along)
        lost = 16 * torch.finfo(self.direction.dtype).eps * squares
        return (slope * ((squares - removed).clamp(min=0) + lost)).sum(dim=1)

    def removed_part(self, sums: Tensor, along: Tensor) -> Tensor:
        """What the two projections take of |G|^2, in float64."""
        return sums.double().square() / self.fan_in + self.removed.double() * along.double().square()

    def project(self, gradient: Tensor) -> Tensor:
        """From the gradient for the applied filters to the gradient for the weight."""
        values, u = _of_filter(gradient), self.direction
        along = (gradient * u).sum(dim=values, keepdim=True) * _spread(self.free, u)
        return (gradient - gradient.mean(dim=values, keepdim=True) - u * along) * _spread(self.slope, u)


def filters_of(weight: Tensor, gain: Tensor, eps: float) -> Filters:
    """The standardisation as ``WSConv2d`` applies it."""
    centred, squares = _centred(weight)
    norms = squares.clamp(min=eps).sqrt()
    free = (squares >= eps).to(weight.dtype)
    direction, gain = (centred / _spread(norms, weight)).to(weight.dtype), gain.flatten()
    return Filters(direction, (gain / norms).to(weight.dtype), free, removed=free, gain=gain)


def filters_by_variance(weight: Tensor, gain: Tensor, eps: float) -> Filters:
    """The standardisation by a batch norm of the filters over themselves, with this gain."""
    centred, squares = _centred(weight)
    fan_in = weight[0].numel()
    norms = (squares + fan_in * eps).sqrt()
    direction, gain = (centred / _spread(norms, weight)).to(weight.dtype), gain.flatten() * fan_in**0.5
    removed = (2 - squares / norms.square()).to(weight.dtype)
    return Filters(
        direction, (gain / norms).to(weight.dtype), torch.ones_like(gain), removed=removed, gain=gain
    )


def _centred(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Filters less their means, and the sums of their squares; in float64, as means may be large."""
    values, weight = _of_filter(weight), weight.double()
    centred = weight - weight.mean(dim=values, keepdim=True)
    return centred, centred.square().sum(dim=values)


def _of_filter(weight: Tensor) -> tuple[int, ...]:
    """The axes within a filter; all at once, so that no memory format is copied into another."""
    return tuple(range(1, weight.dim()))


def _spread(per_filter: Tensor, weight: Tensor) -> Tensor:
    return per_filter.view(-1, *[1] * (weight.dim() - 1))


def weight_standardised_rule(call: Call) -> list[Strategy]:
    """``WSConv2d``: weight, gain and bias."""
    module = cast(WeightStandardised, call.module)
    left, right, top, bottom = (0,) * 4 if call.padded else module.padding_for(*call.input.shape[-2:])
    kernel, stride, dilation = ((size, size) for size in (module.kernel_size, module.stride, module.dilation))
    geometry = Geometry(kernel, stride, dilation, (top, left), (bottom, right), module.groups)
    conv = operands(call, geometry)
    weight = module.weight.detach().to(working_dtype(conv.weight.dtype))
    filters = filters_of(weight, module.gain.detach().to(weight.dtype), module.eps)
    return _strategies(call, conv, filters, 1.0)


def variance_standardised_rule(call: Call) -> list[Strategy]:
    """A convolution whose filters went through a batch norm over themselves, as timm's ScaledStdConv2d."""
    module = cast(VarianceStandardised, call.module)
    conv = operands(call, geometry_of(module, tuple(call.input.shape[2:])))
    weight = module.weight.detach().to(working_dtype(conv.weight.dtype))
    gain = torch.ones_like(weight[:, 0].flatten(1)[:, 0]) if module.gain is None else module.gain.detach()
    filters = filters_by_variance(weight, gain.to(weight.dtype) * module.factor, module.eps)
    return _strategies(call, conv, filters, module.factor * filters.fan_in**0.5)


def _strategies(call: Call, conv: Convolution, filters: Filters, gain_factor: float) -> list[Strategy]:
    """``gain_factor`` times <G, u> is the gradient of the gain."""

    def kept(form: Callable[[], Found], *, with_bias: bool = True) -> Callable[[], dict[str, Piece]]:
        def pieces() -> dict[str, Piece]:
            found, along = form()
            gain = getattr(call.module, "gain", None)
            if "gain" in call.names and gain is not None:
                each = (along * gain_factor).to(working_dtype(gain.dtype))
                found["gain"] = Materialised(each.view(len(each), *gain.shape))
            if with_bias:
                found |= bias_piece(call)
            return {name: piece for name, piece in found.items() if name in call.names}

        return pieces

    work = conv.multiply_adds
    strategies = [
        Strategy("columns", work * 1.3, kept(lambda: _columns_pieces(conv, filters))),
        Strategy("library", work * 1.4, kept(lambda: _library_pieces(conv, filters))),
    ]
    if offers_direct(conv):
        directly = kept(lambda: _direct_pieces(conv, filters), with_bias=False)
        strategies.append(Strategy("direct", work * 1.1, directly))
        if twice_pays(conv):
            in_two_passes = kept(lambda: _twice_pieces(conv, filters), with_bias=False)
            strategies.append(Strategy("twice", work * 2.2, in_two_passes))
    # the output of a layer in half precision is rounded by more than a norm may be
    exact = call.outputs is not None and call.outputs[0].dtype == conv.gradients.dtype
    if exact and gram_pays(conv) and not _is_steep(cast(Weighted, call.module).bias, filters.gain):
        by_gram = kept(lambda: _gram_pieces(call, conv, filters))
        strategies.append(Strategy("gram", gram_multiply_adds(conv), by_gram))
    return rounding_alike(conv, strategies)


def _is_steep(bias: Tensor | None, gain: Tensor) -> bool:
    """Whether <G, u> cannot be read off the layer's output: a gain near 0, or far below the bias."""
    least = (
        SMALLEST_GAIN if bias is None else (bias.detach().abs() / MAX_BIAS_TO_GAIN).clamp(min=SMALLEST_GAIN)
    )
    return bool((gain.abs() < least).any())


Found = tuple[dict[str, Piece], Tensor]  # pieces of weight and perhaps bias, and <G, u>


def _direct_pieces(conv: Convolution, filters: Filters) -> Found:
    gradients, moments, shifts = direct_gradients(conv, filters.direction)
    weight = InParts(
        gradients, filters.squared_norms(*moments), lambda total: filters.project(channels_second(total))
    )
    return {"weight": weight, "bias": Materialised(shifts)}, moments[2]


def _twice_pieces(conv: Convolution, filters: Filters) -> Found:
    moments, shifts = twice_moments(conv, filters.direction)
    plain_sum = twice_sum(conv)
    weight = Deferred(
        filters.squared_norms(*moments), lambda factors: filters.project(plain_sum(factors)), conv.held_bytes
    )
    return {"weight": weight, "bias": Materialised(shifts)}, moments[2]


def _columns_pieces(conv: Convolution, filters: Filters) -> Found:
    gradients = gradient_buffer(conv)
    moments = torch.empty(3, *gradients.shape[1:3], dtype=torch.float64, device=gradients.device)
    directions = filters.direction.movedim((2, 1), (0, -1)).reshape(len(gradients), *gradients.shape[2:])
    for units in unit_gradients(conv, gradients):  # while they are in cache
        moments[:, units] = filter_moments(gradients[:, units].to(directions.dtype), directions)
    weight = ByKernelRow(gradients, filters.squared_norms(*moments), conv.weight.shape, filters.project)
    return {"weight": weight}, moments[2]


def _library_pieces(conv: Convolution, filters: Filters) -> Found:
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
    return {"weight": weight}, moments[2]


def _gram_pieces(call: Call, conv: Convolution, filters: Filters) -> Found:
    """Norms only. <G, u> comes from the layer's own output, sum(G) from a box filter of the inputs."""
    segments, gradients, bias = call.segments, conv.gradients, cast(Weighted, call.module).bias
    assert call.outputs is not None  # else this strategy is not offered
    shift, outputs = channel_sums(gradients, call.outputs[0].to(gradients.dtype))
    lost_along = torch.zeros_like(shift)
    if bias is not None:
        outputs = outputs - bias.detach() * shift
        # where inputs are small beside the bias, what is left of the output is rounding
        lengths = torch.linalg.vector_norm(gradients, 1, dim=tuple(range(2, gradients.dim())))
        lost_along = lengths * bias.detach().abs()
    along = segments.sum(outputs / filters.gain)
    lost_along = (
        segments.sum(lost_along / filters.gain.abs()) * LOST_TO_BIAS * torch.finfo(gradients.dtype).eps
    )
    sums = segments.sum(position_products(gradients, _box_sums(conv)))
    slope = filters.slope.view(1, -1, *[1] * (gradients.dim() - 2))
    # The Gram norm sees all channels together, so the slopes go into g: norms are then of a * G.
    scaled = gram_products(conv, gradients * slope)
    squared = filters.slope.double().square()
    certain = (along.abs() - lost_along).clamp(min=0)
    removed = squared * filters.removed_part(sums, certain)
    lost = 16 * torch.finfo(gradients.dtype).eps * scaled
    norms = (scaled - removed.sum(dim=1)).clamp(min=0) + lost
    plain_sum = deferred_sum(conv)
    summed = Deferred(norms, lambda factors: filters.project(plain_sum(factors)), conv.held_bytes)
    return {"weight": summed}, along


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
