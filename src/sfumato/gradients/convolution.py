"""Per-unit gradients of convolutions: four equal strategies, and two more for depthwise ones.

direct    the unit's weight gradient by compiled sums over its positions, where vectors are wide.
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
from sfumato.gradients.kernels import offers_unit_filters, position_sums, unit_filters
from sfumato.gradients.layer_types import Convolving, Weighted
from sfumato.gradients.operands import Convolution, geometry_of, operands, weight_gradient
from sfumato.gradients.piece import UNITS_AT_ONCE, Deferred, Materialised, Piece, squared_norms, working_dtype


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
        return {**bias_piece(call), "weight": Deferred(norms, deferred_sum(conv))}

    def directly() -> dict[str, Piece]:
        return {name: piece for name, piece in direct_pieces(conv).items() if name in call.names}

    strategies = [
        Strategy("columns", conv.multiply_adds * 1.3, by_columns),
        Strategy("library", conv.multiply_adds * 1.4, by_calls),
    ]
    if is_depthwise(conv) and "weight" in call.names:
        for name, form, cost in (("shifted", shifted_piece, 1.0), ("folded", folded_piece, 1.2)):
            strategies.append(
                Strategy(name, conv.multiply_adds * cost, partial(_with_bias, call, conv, form))
            )
    if offers_direct(conv) and "weight" in call.names:
        strategies.append(Strategy("direct", conv.multiply_adds * 1.1, directly))
    if gram_pays(conv) and "weight" in call.names:
        strategies.append(Strategy("gram", gram_multiply_adds(conv), by_gram))
    return strategies


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
    images = replace(conv, inputs=conv.inputs[:0], gradients=conv.gradients[:0]).widened()
    return conv.geometry.groups == 1 and offers_unit_filters(images.inputs, images.gradients)


def direct_pieces(conv: Convolution) -> dict[str, Piece]:
    conv = conv.widened()
    gradients, moments, shifts = direct_gradients(conv, conv.weight)
    weight = Materialised(gradients, moments[0].sum(dim=1), channels_second)
    return {"weight": weight, "bias": Materialised(shifts)}


def direct_gradients(conv: Convolution, directions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(units, out, *kernel, in) by compiled sums over positions; their moments; the bias's (units, out)."""
    conv, by_group = conv.widened(), []
    shape = conv.geometry
    geometry = (*shape.kernel, *shape.stride, *shape.dilation, *shape.before)
    directions = directions.movedim(1, -1)
    for group in conv.segments.groups:
        rows = conv.inputs[group.rows], conv.gradients[group.rows]
        by_group.append(unit_filters(*rows, directions, group.units.stop - group.units.start, geometry))
    if len(by_group) == 1:
        return by_group[0]
    gradients, moments, shifts = zip(*by_group, strict=True)
    return torch.cat(gradients), torch.cat(moments, dim=1), torch.cat(shifts)


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
    for group in conv.segments.groups:
        for inputs, gradients in zip(group.split(conv.inputs), group.split(conv.gradients), strict=True):
            yield weight_gradient(inputs, gradients, conv.weight, conv.geometry)


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
