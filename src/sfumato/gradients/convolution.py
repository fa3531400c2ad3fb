"""Per-unit gradients of convolutions: five equal strategies, and two more for depthwise ones.

direct    the unit's weight gradient by compiled sums over its positions, where vectors are wide.
twice     the same, and nothing kept: for the norms first, and again for the sum.
columns   the unit's weight gradient as matrix products over its patches, laid out in a buffer that stays
          in cache; the clipped sum is then one weighted sum over memory.
library   the unit's weight gradient by one call of the library's convolution backward.
gram      only the norm, |G|^2 = sum over positions s, t of <patch_s, patch_t> <g_s, g_t>; the clipped sum
          is one ordinary weight gradient with the rows of g scaled by their factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from sfumato.gradients.call import Call, Strategy
from sfumato.gradients.columns import columns_piece
from sfumato.gradients.depthwise import folded_piece, is_depthwise, shifted_piece
from sfumato.gradients.gram import deferred_sum, gram_multiply_adds, gram_pays, gram_products
from sfumato.gradients.kernels import (
    low_filters,
    offers_low_filters,
    offers_unit_filters,
    position_sums,
    unit_filters,
    weighted_rows,
)
from sfumato.gradients.layer_types import Convolving, Weighted
from sfumato.gradients.operands import Convolution, geometry_of, operands, weight_gradient
from sfumato.gradients.piece import (
    UNITS_AT_ONCE,
    Deferred,
    Materialised,
    Piece,
    squared_norms,
    weighted_sum,
    working_dtype,
)
from sfumato.gradients.twice import twice_moments, twice_pays, twice_sum

PART_BYTES = 8_000_000  # of units' gradients in one tensor: as large as an activation

DEPTHWISE = (("shifted", shifted_piece, 1.0), ("folded", folded_piece, 1.2))  # with their cost


def convolution_rule(call: Call) -> list[Strategy]:
    """nn.Conv1d, Conv2d, Conv3d with any stride, padding, dilation and groups."""
    module = cast(Convolving, call.module)
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
        return {**bias_piece(call), "weight": Deferred(norms, deferred_sum(conv), conv.held_bytes)}

    def directly() -> dict[str, Piece]:
        return _wanted(call, direct_pieces(conv))

    strategies = [
        Strategy("columns", conv.multiply_adds * 1.3, by_columns),
        Strategy("library", conv.multiply_adds * 1.4, by_calls),
    ]
    if is_depthwise(conv) and "weight" in call.names:
        for name, form, cost in DEPTHWISE:
            strategies.append(
                Strategy(name, conv.multiply_adds * cost, partial(_with_bias, call, conv, form))
            )
    if offers_direct(conv) and "weight" in call.names:
        strategies.append(Strategy("direct", conv.multiply_adds * 1.1, directly))
        if twice_pays(conv):
            strategies.append(
                Strategy("twice", conv.multiply_adds * 2.2, lambda: _wanted(call, _twice_pieces(conv)))
            )
    if gram_pays(conv) and "weight" in call.names:
        strategies.append(Strategy("gram", gram_multiply_adds(conv), by_gram))
    return rounding_alike(conv, strategies)


def rounding_alike(conv: Convolution, strategies: list[Strategy]) -> list[Strategy]:
    """Those among which one may choose by the shape of a microbatch.

    Guarantee: they round a unit's gradient in the same way, whoever is beside it. In bfloat16 ways differ by
    2^-9 of each unit's gradient, and the number or size of units, which one unit changes, must not decide.
    """
    if not conv.is_low:
        return strategies
    alike = [strategy for strategy in strategies if strategy.name in ("direct", "twice")]
    return alike or strategies[:1]


def _wanted(call: Call, pieces: dict[str, Piece]) -> dict[str, Piece]:
    return {name: piece for name, piece in pieces.items() if name in call.names}


def _twice_pieces(conv: Convolution) -> dict[str, Piece]:
    moments, shifts = twice_moments(conv, conv.weight.float())
    weight = Deferred(moments[0].sum(dim=1), twice_sum(conv), conv.held_bytes)
    return {"weight": weight, "bias": Materialised(shifts)}


def _with_bias(call: Call, conv: Convolution, form: Callable[[Convolution], Piece]) -> dict[str, Piece]:
    return {**bias_piece(call), "weight": form(conv)}


def bias_piece(call: Call) -> dict[str, Piece]:
    """The bias sees the plain sum of the output gradients."""
    if "bias" not in call.names:
        return {}
    bias = cast(Weighted, call.module).bias
    assert bias is not None  # it is trained
    gradient = call.gradient.to(working_dtype(bias.dtype))
    return {"bias": Materialised(call.segments.sum(position_sums(gradient)))}


def offers_direct(conv: Convolution) -> bool:
    if conv.geometry.groups == 1 and offers_low_filters(conv.inputs, conv.gradients):
        return True
    images = replace(conv, inputs=conv.inputs[:0], gradients=conv.gradients[:0]).widened()
    return conv.geometry.groups == 1 and offers_unit_filters(images.inputs, images.gradients)


def direct_pieces(conv: Convolution) -> dict[str, Piece]:
    gradients, moments, shifts = direct_gradients(conv, conv.weight.float())
    weight = InParts(gradients, moments[0].sum(dim=1), channels_second)
    return {"weight": weight, "bias": Materialised(shifts)}


def direct_gradients(conv: Convolution, directions: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """(units, out, *kernel, in) by compiled sums over positions; their moments; the bias's (units, out).

    Some units at a time, so that what is kept fits where activations have been. In bfloat16 where the
    processor multiplies such numbers: then the moments are of the rounded gradients.
    """
    low = offers_low_filters(conv.inputs, conv.gradients)
    conv, found, form = (conv, [], low_filters) if low else (conv.widened(), [], unit_filters)
    directions = directions.movedim(1, -1)
    at_once = UNITS_AT_ONCE * max(1, PART_BYTES // (UNITS_AT_ONCE * conv.weight.nbytes))
    for group in conv.segments.groups:
        inputs, gradients = group.split(conv.inputs), group.split(conv.gradients)
        for start in range(0, len(inputs), at_once):
            few = inputs[start : start + at_once], gradients[start : start + at_once]
            rows = few[0].flatten(0, 1), few[1].flatten(0, 1)
            found.append(form(*rows, directions, len(few[0]), conv.geometry.sizes))
    parts, moments, shifts = zip(*found, strict=True)
    return list(parts), torch.cat(moments, dim=1), torch.cat(shifts)


@dataclass
class InParts:
    """Units' weight gradients, (units, …) in several tensors, and what makes one of the parameter of them."""

    parts: list[Tensor]
    squared_norms: Tensor
    finish: Callable[[Tensor], Tensor]

    @property
    def held_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        shape = self.parts[0].shape[1:]
        total = torch.zeros(shape.numel(), dtype=torch.float64, device=factors.device)
        for part, own in zip(self.parts, factors.split([len(part) for part in self.parts]), strict=True):
            if weighted_rows(part.flatten(1), own, total) is None:
                total += weighted_sum(part, own).flatten()
        return self.finish(total.view(shape))

    def per_unit(self) -> Tensor:
        return torch.stack([self.finish(gradient) for part in self.parts for gradient in part])


def channels_second(gradient: Tensor) -> Tensor:
    """(out, *kernel, in) -> (out, in, *kernel), as weights are."""
    return gradient.movedim(-1, 1)


def library_piece(conv: Convolution) -> ByUnit:
    gradients = list(by_library(conv))
    order = memory_order(gradients[0])
    norms = torch.cat([squared_norms(gradient.permute(order).reshape(1, -1)) for gradient in gradients])
    return ByUnit(gradients, norms)


def by_library(conv: Convolution) -> Iterator[Tensor]:
    """Each unit's weight gradient by one library call per unit, in the order of the units."""
    for rows in conv.segments.each():
        # slices, whose strides say how far rows are apart: where an axis of length 1 has another stride, the
        # library's grouped convolution of float64 images in channels last is wrong (torch 2.13)
        yield weight_gradient(conv.inputs[rows], conv.gradients[rows], conv.weight, conv.geometry)


def memory_order(weight: Tensor) -> tuple[int, ...]:
    """The axes of a weight, filters first, in the order in which its values lie in memory."""
    rest = sorted(range(1, weight.dim()), key=weight.stride, reverse=True)
    return (0, *rest)


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
        total = torch.zeros_like(self.gradients[0], dtype=torch.float64)
        pairs = list(zip(self.gradients, factors.tolist(), strict=True))
        for start in range(0, len(pairs), UNITS_AT_ONCE):
            partial_sum = torch.zeros_like(self.gradients[0], dtype=working_dtype(self.gradients[0].dtype))
            for gradient, factor in pairs[start : start + UNITS_AT_ONCE]:
                if factor:  # a dropped unit may hold values that are not finite
                    partial_sum.add_(gradient, alpha=factor)
            total += partial_sum
        return total if self.finish is None else self.finish(total)

    def per_unit(self) -> Tensor:
        finish = self.finish or (lambda gradient: gradient)
        return torch.stack([finish(gradient) for gradient in self.gradients])
