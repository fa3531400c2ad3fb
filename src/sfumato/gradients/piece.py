"""What a layer knows of its units' gradients for one parameter: their norms first, their weighted sum later.

The norms of all layers decide the clip factors, and only then can the sum be formed. In between a piece holds
what its strategy needs: the units' gradients themselves, or the layer's inputs and output gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sfumato.gradients.kernels import weighted_rows
from sfumato.gradients.segments import Segments
from sfumato.gradients.shapes import Float, Float64, Shaped

ROUNDING_GUARD = 256  # how much larger than rounding a Gram norm must be to be taken as it is
UNITS_AT_ONCE = 8  # units whose gradients are added in the working precision; such sums are added in float64
UNITS_PER_CALL = 128  # the same where one library call forms the sum
LARGEST_INPUT = 1e15  # times a step of float32's subnormal numbers, 1e-45: nothing beside any clip norm
BLOCK = 4096  # values whose squares are added in the tensor's own precision; blocks are added in float64


@runtime_checkable
class Piece(Protocol):
    """One parameter's share in the units' gradients."""

    squared_norms: Float64[Tensor, "units"]

    @property
    def held_bytes(self) -> int:
        """Memory that it keeps for its sum, beside what the forward pass keeps anyway."""
        ...

    def weighted_sum(self, factors: Float[Tensor, "units"]) -> Float[Tensor, "*shape"]:
        """Sum over units of factor * gradient, in the parameter's shape and working precision or better."""
        ...


class UnitGradients(Piece, Protocol):
    """A piece that holds its units' gradients: what the first strategy of every rule gives."""

    def per_unit(self) -> Float[Tensor, "units *shape"]:
        """Each unit's gradient of the parameter, (units, *parameter shape)."""
        ...


def squared_norms(gradients: Float[Tensor, "units *rest"]) -> Float64[Tensor, "units"]:
    """Squared Euclidean norms, accumulated in float64."""
    flat = gradients.reshape(len(gradients), -1)
    whole = flat.shape[1] // BLOCK * BLOCK
    parts = [flat[:, :whole].unflatten(1, (-1, BLOCK))] if whole else []
    if whole < flat.shape[1]:
        parts.append(flat[:, None, whole:])
    total = torch.zeros(len(flat), dtype=torch.float64, device=flat.device)
    # half precision would round the norm itself by more than the clip's margin
    dtype = working_dtype(flat.dtype)
    for part in parts:
        total += torch.linalg.vector_norm(part, dim=2, dtype=dtype).double().square().sum(dim=1)
    return total


@dataclass
class Materialised:
    """The units' gradients themselves, (units, ...).

    ``finish`` is the linear map that makes a gradient of the parameter out of them; without it they are
    that gradient already. It is applied once, to the sum.
    """

    gradients: Float[Tensor, "units *shape"]
    norms: Float64[Tensor, "units"] | None = (
        None  # squared, of the finished gradients, where they are known already
    )
    finish: Callable[[Tensor], Tensor] | None = None
    squared_norms: Float64[Tensor, "units"] = field(init=False)

    def __post_init__(self) -> None:
        self.squared_norms = squared_norms(self.gradients) if self.norms is None else self.norms

    def weighted_sum(self, factors: Float[Tensor, "units"]) -> Float[Tensor, "*shape"]:
        total = weighted_sum(self.gradients, factors)
        return total if self.finish is None else self.finish(total)

    @property
    def held_bytes(self) -> int:
        return self.gradients.nbytes

    def per_unit(self) -> Float[Tensor, "units *shape"]:
        """Each unit's gradient of the parameter, (units, *parameter shape)."""
        if self.finish is None:
            return self.gradients
        return torch.stack([self.finish(gradient) for gradient in self.gradients])


@dataclass
class Deferred:
    """Norms that were found without the gradients, and a way to form the weighted sum in one call."""

    squared_norms: Float64[Tensor, "units"]
    form_sum: Callable[[Tensor], Tensor]
    held_bytes: int = 0

    def weighted_sum(self, factors: Float[Tensor, "units"]) -> Float[Tensor, "*shape"]:
        return self.form_sum(factors)


def gram_norms(
    first: Float64[Tensor, "units positions positions"],
    second: Shaped[Tensor, "units positions positions"],
    dtype: torch.dtype,
) -> Float64[Tensor, "units"]:
    """The sum over all pairs of positions.

    Guarantee: a unit's sum, formed in ``dtype`` afterwards, is not longer than its norm says beyond 1e-4 of
    it. Where large terms cancel, that sum is mostly rounding: eps * sqrt(positions) * sum of |x_s| |g_s| is
    what rounding may leave, and it counts as part of the norm as soon as it could matter.
    """
    products = first * second
    lengths = products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().sum(dim=1)
    rounding = torch.finfo(dtype).eps * math.sqrt(products.shape[1]) * lengths
    return products.sum(dim=(1, 2)).clamp(min=0) + (ROUNDING_GUARD * rounding).square()


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a parameter's gradients are computed in: half precision would round them past the bound."""
    return torch.promote_types(dtype, torch.float32)


def weighted_sum(
    gradients: Float[Tensor, "units *shape"], factors: Float[Tensor, "units"]
) -> Float64[Tensor, "*shape"]:
    """Sum over units of factor * gradient, float64. A unit of factor 0 adds nothing, finite or not.

    Few units at a time are added in the working precision: of ``UNITS_AT_ONCE`` vectors of norm C it may lose
    UNITS_AT_ONCE**2 / 2 roundings of C, 2e-6 C in float32, however many units there are.
    """
    flat = gradients.reshape(len(gradients), -1)
    dtype = working_dtype(flat.dtype)
    if (compiled := weighted_rows(flat, factors)) is not None:
        return compiled.view(gradients.shape[1:])
    if flat.dtype != dtype:
        return _weighted_sum_of_halves(flat, factors, dtype).view(gradients.shape[1:])
    flat, weights = zero_where_dropped(flat.to(dtype), factors), factors.to(dtype)
    num_parts, whole = len(flat) // UNITS_AT_ONCE, len(flat) // UNITS_AT_ONCE * UNITS_AT_ONCE
    # all small products in one call: a call each would cost a small layer more than its sums
    parts = weights[:whole].view(num_parts, 1, UNITS_AT_ONCE) @ flat[:whole].view(
        num_parts, UNITS_AT_ONCE, flat.shape[1]
    )
    total = parts.sum(dim=(0, 1), dtype=torch.float64)
    if whole < len(flat):
        total += weights[whole:] @ flat[whole:]
    return total.view(gradients.shape[1:])


def _weighted_sum_of_halves(flat: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """The same for gradients in half precision, which are read as they are and added in ``dtype``."""
    total = torch.zeros(flat.shape[1], dtype=torch.float64, device=flat.device)
    pairs = list(zip(flat, factors.tolist(), strict=True))
    for start in range(0, len(pairs), UNITS_AT_ONCE):
        few = torch.zeros_like(total, dtype=dtype)
        for gradient, factor in pairs[start : start + UNITS_AT_ONCE]:
            if factor:  # a dropped unit may hold values that are not finite
                few.add_(gradient, alpha=factor)
        total += few
    return total


def summed_by_parts(
    product: Callable[[Tensor, Tensor], Tensor], x: Tensor, g: Tensor, segments: Segments, factors: Tensor
) -> Tensor:
    """Sum over units of factor * gradient, where ``product(x, g)`` sums the gradients of rows in one call.

    Guarantee: no call adds more than UNITS_PER_CALL units in the working precision, whatever the microbatch;
    their sums are added in float64. Of n units of norm C all calls together may lose n * UNITS_PER_CALL / 2
    roundings of C.
    """
    inputs, scaled = scaled_operands(x, g, segments.per_row(factors))
    if segments.num_units <= UNITS_PER_CALL:
        return product(inputs, scaled)
    sums = (product(inputs[rows], scaled[rows]).double() for rows in segments.parts(UNITS_PER_CALL))
    return functools.reduce(torch.Tensor.add_, sums)


def scaled_operands(x: Tensor, g: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and scaled output gradients whose product is the weighted sum; ``factors`` are of the rows.

    Guarantee: no row is rounded by more than the clip's margin covers. Beside a huge input the factor times g
    falls among the subnormal numbers, whose steps are too coarse; such a batch is multiplied in float64.
    """
    x = zero_where_dropped(x, factors)
    least, most = torch.aminmax(x) if x.numel() else (x.new_zeros(()), x.new_zeros(()))
    if not (least >= -LARGEST_INPUT and most <= LARGEST_INPUT):
        x, g = x.double(), g.double()
    weights = factors.to(g.dtype).view(-1, *[1] * (g.dim() - 1))
    return x, zero_where_dropped(g * weights, factors)


def zero_where_dropped(
    rows: Float[Tensor, "rows *rest"], factors: Float[Tensor, "rows"]
) -> Float[Tensor, "rows *rest"]:
    """Rows whose factor is 0 become zeros: 0 * inf would not."""
    dropped = factors == 0
    if not dropped.any():
        return rows
    return torch.where(dropped.view(-1, *[1] * (rows.dim() - 1)), 0, rows)
