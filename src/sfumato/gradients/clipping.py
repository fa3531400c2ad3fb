"""Clip functions: from the norms of the units' gradients to the factors they are multiplied with.

Each states its sensitivity: by how much one unit can move the sum, in Euclidean norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sfumato.errors import ConfigError
from sfumato.gradients.shapes import Float, Float64

SMALLEST = torch.finfo(torch.float32).tiny  # below it float32 has no full precision

SquaredNorms = Mapping[str, Float64[Tensor, "units"]]  # by the parameter's name
Factors = dict[str, Float64[Tensor, "units"]]  # by the parameter's name


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
        return dict.fromkeys(squared_norms, torch.where(norms.isfinite(), factors, 0.0))


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


CLIPPINGS: Mapping[str, Clipping] = {
    "flat": FlatClipping(),
    "automatic": AutomaticClipping(),
    "per-layer": PerLayerClipping(),
}  # by the names that recipes use
