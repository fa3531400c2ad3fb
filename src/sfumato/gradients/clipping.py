"""Clip functions: from the norms of the units' gradients to the factors they are multiplied with.

Each states its sensitivity: by how much one unit can move the sum, in Euclidean norm.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sfumato.errors import ConfigError, PrivacyError
from sfumato.gradients.shapes import Float, Float64

SMALLEST = torch.finfo(torch.float32).tiny  # below it float32 has no full precision

SquaredNorms = Mapping[str, Float64[Tensor, "units"]]  # by the parameter's name
Factors = dict[str, Float64[Tensor, "units"]]  # by the parameter's name


@runtime_checkable
class Clipping(Protocol):
    """How a unit's gradient is bounded."""

    def sensitivity(self, clip_norm: float) -> float:
        """The most that one unit can move the sum."""
        ...

    def factors(self, squared_norms: SquaredNorms, clip_norm: float, margin: float) -> Factors:
        """For each parameter, the factor of each unit."""
        ...


def total_norms(squared_norms: SquaredNorms) -> Float64[Tensor, "units"]:
    """Each unit's norm over all parameters together, float64."""
    return torch.stack(list(squared_norms.values())).sum(dim=0).sqrt()


def clip_factors(
    norms: Float[Tensor, "units"], clip_norm: float, margin: float = 0.0
) -> Float[Tensor, "units"]:
    """Factor that brings each unit's gradient to norm at most ``clip_norm``.

    Guarantee: factor * norm <= clip_norm * (1 - margin), where the margin covers the rounding of
    everything that follows. A norm that is not finite, or so large that the factor would lose its digits,
    gets factor 0.
    """
    factors = (clip_norm * (1 - margin) / norms).clamp(max=1.0)
    return torch.where(norms.isfinite() & (factors > SMALLEST), factors, 0.0)


@dataclass(frozen=True)
class FlatClipping:
    """One norm over all parameters: g * min(1, C / |g|) (Abadi et al. 2016).

    Guarantee: one unit moves the sum by at most C.
    """

    def sensitivity(self, clip_norm: float) -> float:
        return clip_norm

    def factors(self, squared_norms: SquaredNorms, clip_norm: float, margin: float) -> Factors:
        factors = clip_factors(total_norms(squared_norms), clip_norm, margin)
        return dict.fromkeys(squared_norms, factors)


@dataclass(frozen=True)
class AutomaticClipping:
    """Normalise instead of clip: C * g / (|g| + stability) (Bu et al. 2022).

    Guarantee: one unit moves the sum by less than C.
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        if not self.stability > 0:
            raise ConfigError(
                "bad-stability",
                f"stability is {self.stability}.",
                why="The bound C * |g| / (|g| + stability) < C needs a positive number.",
                fix="Take the usual 0.01.",
            )

    def sensitivity(self, clip_norm: float) -> float:
        return clip_norm

    def factors(self, squared_norms: SquaredNorms, clip_norm: float, margin: float) -> Factors:
        norms = total_norms(squared_norms)
        factors = clip_norm * (1 - margin) / (norms + self.stability)
        usable = norms.isfinite() & (factors > SMALLEST)
        return dict.fromkeys(squared_norms, torch.where(usable, factors, 0.0))


@dataclass(frozen=True)
class PerLayerClipping:
    """Each layer is clipped on its own to its share of the budget, C_l with sum of C_l^2 = C^2.

    ``weights`` gives a layer's share by its name ("layer1.0.conv1"); all layers share alike without it.
    Guarantee: one unit moves layer l by at most C_l, hence the whole by at most C. A unit whose gradient
    is not finite in any layer counts as zero in all of them.
    """

    weights: Callable[[str], float] | None = None

    def sensitivity(self, clip_norm: float) -> float:
        return clip_norm

    def factors(self, squared_norms: SquaredNorms, clip_norm: float, margin: float) -> Factors:
        layers: dict[str, list[str]] = {}
        for name in squared_norms:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        share = {layer: self.weights(layer) if self.weights else 1.0 for layer in layers}
        whole = math.sqrt(sum(value**2 for value in share.values()))
        finite = total_norms(squared_norms).isfinite()
        result: Factors = {}
        for layer, names in layers.items():
            norms = total_norms({name: squared_norms[name] for name in names})
            factors = clip_factors(norms, clip_norm * share[layer] / whole, margin)
            result |= dict.fromkeys(names, torch.where(finite, factors, 0.0))
        return result


OURS = (FlatClipping, AutomaticClipping, PerLayerClipping)
_ROUNDING = 1e-9  # of the products below, in float64


def bounded_factors(
    clipping: Clipping, squared_norms: SquaredNorms, clip_norm: float, margin: float
) -> dict[str, Tensor]:
    """The factors of any clipping function, checked against the sensitivity that it states.

    Guarantee: no unit's factor times its norm exceeds the sensitivity, less the margin for rounding. What is
    not ours is asked for one unit at a time, by a copy each time, so that no factor depends on other units.
    """
    if type(clipping) in OURS:
        factors = clipping.factors(squared_norms, clip_norm, margin)
    else:
        factors = _one_by_one(clipping, squared_norms, clip_norm, margin)
    return _checked(clipping, factors, squared_norms, clipping.sensitivity(clip_norm), margin)


def _one_by_one(
    clipping: Clipping, squared_norms: SquaredNorms, clip_norm: float, margin: float
) -> dict[str, Tensor]:
    units = len(next(iter(squared_norms.values())))
    result = {name: torch.zeros_like(squares) for name, squares in squared_norms.items()}
    for unit in range(units):
        alone = {name: squares[unit : unit + 1].clone() for name, squares in squared_norms.items()}
        factors = copy.deepcopy(clipping).factors(alone, clip_norm, margin)
        for name, value in result.items():
            value[unit : unit + 1] = factors[name].to(value)
    return result


def _checked(
    clipping: Clipping,
    factors: Mapping[str, Tensor],
    squared_norms: SquaredNorms,
    sensitivity: float,
    margin: float,
) -> dict[str, Tensor]:
    usable = sensitivity > 0
    moved = torch.zeros_like(next(iter(squared_norms.values())))
    for name, squares in squared_norms.items():
        factor = factors[name].double()
        usable = usable and bool((factor.isfinite() & (factor >= 0)).all())
        # a unit of factor 0 adds nothing, finite or not
        moved += torch.where(factor == 0, 0.0, factor.square() * squares)
    moved = moved.sqrt()
    if not usable or not (moved <= sensitivity * (1 + _ROUNDING)).all():
        raise PrivacyError(
            "clipping-exceeds-sensitivity",
            f"{type(clipping).__name__} states the sensitivity {sensitivity:.6g}, and its factors let a unit "
            f"move the sum by {moved.max().item():.6g}, or are not finite numbers of 0 or more.",
            why="The noise is measured by the sensitivity that the clipping function states.",
            fix="Let factors() bound each unit's factor times its norm by sensitivity(clip_norm), over all "
            "parameters together.",
        )
    tight = moved > sensitivity * (1 - margin) * (1 + _ROUNDING)  # nothing left for rounding
    return {
        name: torch.where(tight, value * (1 - margin), value) if tight.any() else value
        for name, value in factors.items()
    }


CLIPPINGS: Mapping[str, Clipping] = {
    "flat": FlatClipping(),
    "automatic": AutomaticClipping(),
    "per-layer": PerLayerClipping(),
}  # by the names that recipes use
