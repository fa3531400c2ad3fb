"""Canaries: units of their own beside the real ones, each in the training or out of it by a fair coin.

They enter through the seam of the loop, so that nothing else knows of them. Real units keep their numbers,
and every canary has one behind them. It is drawn at the plan's rate whatever its coin says; if it is out,
nothing is added. Noise, rate and divisor stay those that were planned for the real units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.gradients import ClippedSum
from sfumato.randomness import SeededSource
from sfumato.training.finetuning import last_layer
from sfumato.training.gradient_sums import GradientSum

COORDINATES = (
    256  # of one canary at most: enough that no single one decides how loud the real units are there
)
ROUNDING = 2.0**-40  # relative room for the rounding of a direction's norm


def toss_coins(key: int, count: int) -> Tensor:
    """Who is in: (count,) bool.

    Guarantee: each coin is fair, and independent of all others and of whatever else follows from the key.
    """
    drawn = SeededSource(key).random_bytes(count, purpose="canary coins", step=0)
    return torch.from_numpy(drawn < 128)


@dataclass(frozen=True, kw_only=True)
class Directions:
    """A unit vector for each canary: ±1/√b on b coordinates of the trained parameters, and 0 elsewhere.

    Guarantee: no coordinate belongs to two canaries, so that none is seen in another's direction.
    """

    shapes: Mapping[str, torch.Size]  # of the trained parameters, in the order of their coordinates
    places: Tensor  # (M, b) int64
    signs: Tensor  # (M, b), 1 or -1
    silent: bool = False  # the same for every class: no softmax with cross-entropy has a gradient there

    @classmethod
    def draw(cls, key: int, count: int, model: nn.Module, *, softmax: bool = True) -> Directions:
        """The directions of this key.

        A last layer with at least ``count`` inputs gets them all, and each direction is the same for every
        class: the residuals of a ``softmax`` add up to zero, so no image has a gradient there, and no
        prediction changes. Otherwise, and with a sigmoid for each finding, coordinates are drawn from the
        weights of all layers before the last (it, gains and biases have the largest gradients), and what
        images do there is noise to the audit.
        """
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        shapes = {name: value.shape for name, value in trained.items()}
        silent = f"{last_layer(model)}.weight" if any(True for _ in model.children()) else "weight"
        source = SeededSource(key)
        if softmax and silent in shapes and len(shapes[silent]) == 2 and shapes[silent][1] >= count:
            num_classes, num_inputs = shapes[silent]
            start = _starts(shapes)[silent]
            size = max(1, min(COORDINATES // num_classes, num_inputs // count))
            inputs = torch.from_numpy(_permutation(source, num_inputs)[: count * size]).view(count, 1, size)
            places = start + inputs + num_inputs * torch.arange(num_classes).view(1, -1, 1)
            signs = _signs(source, count * size).view(count, 1, size).expand_as(places)
            return cls(
                shapes=shapes,
                places=places.reshape(count, -1),
                signs=signs.reshape(count, -1),
                silent=True,
            )
        offered = _offered(shapes, count, besides=silent)
        size = min(COORDINATES, len(offered) // count)
        chosen = offered[_permutation(source, len(offered))[: count * size]]
        return cls(
            shapes=shapes,
            places=torch.from_numpy(chosen).view(count, size),
            signs=_signs(source, count * size).view(count, size),
        )

    def added(self, gradients: Mapping[str, Tensor], chosen: Tensor, *, length: float) -> dict[str, Tensor]:
        """``gradients`` and the vectors of the ``chosen`` canaries, each of a norm of at most ``length``."""
        flat = self._flat(gradients)
        scale = length * (1 - ROUNDING) / math.sqrt(self.places.shape[1])
        places, signs = (values[chosen].flatten().to(flat.device) for values in (self.places, self.signs))
        flat[places] += scale * signs.to(flat.dtype)  # every place is there once
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def projections(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """(M,) float64: the part of ``gradients`` along each canary's vector."""
        values = self._flat(gradients).cpu()[self.places].double()
        return (values * self.signs).sum(1) / math.sqrt(self.places.shape[1])

    def _flat(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([gradients[name].reshape(-1) for name in self.shapes])


@dataclass(frozen=True, kw_only=True)
class WithGradientCanaries:
    """Sums of ``others`` and of the canaries that are in, whose clipped gradients are their directions.

    Guarantee: a canary moves the sum by at most the sensitivity, as every other unit.
    """

    others: GradientSum
    directions: Directions
    members: Tensor  # (M,) bool: what the coins said

    @property
    def num_units(self) -> int:
        return self.others.num_units + len(self.members)

    def __call__(self, indices: Tensor, step: int) -> ClippedSum:
        real, canaries = divide(indices, self.others.num_units, self.members)
        total = self.others(real, step)
        if not len(canaries):
            return total
        gradients = self.directions.added(total.gradients, canaries, length=total.sensitivity)
        return replace(total, gradients=gradients)


@dataclass(frozen=True, kw_only=True)
class WithInputCanaries:
    """Sums of ``others`` and of the canaries that are in, which have images of their own.

    Norms and losses are those of the real units alone.
    """

    others: GradientSum
    canaries: GradientSum  # over all of them, in or out
    members: Tensor  # (M,) bool: what the coins said

    @property
    def num_units(self) -> int:
        return self.others.num_units + len(self.members)

    def __call__(self, indices: Tensor, step: int) -> ClippedSum:
        real, canaries = divide(indices, self.others.num_units, self.members)
        total = self.others(real, step)
        if not len(canaries):
            return total
        return replace(total + self.canaries(canaries, step), norms=total.norms, losses=total.losses)


def divide(indices: Tensor, num_real: int, members: Tensor) -> tuple[Tensor, Tensor]:
    """The real units of a step, and the canaries of it that are in, counted from 0."""
    is_real = indices < num_real
    canaries = indices[~is_real] - num_real
    return indices[is_real], canaries[members[canaries]]


def _starts(shapes: Mapping[str, torch.Size]) -> dict[str, int]:
    """The first coordinate of each parameter."""
    ends = np.cumsum([shape.numel() for shape in shapes.values()]).tolist()
    return dict(zip(shapes, [0, *ends[:-1]], strict=True))


def _offered(shapes: Mapping[str, torch.Size], count: int, *, besides: str) -> np.ndarray:
    """Coordinates to draw from: those of weights but one, or all if they are too few."""
    starts = _starts(shapes)
    every = {name: np.arange(start, start + shapes[name].numel()) for name, start in starts.items()}
    weights = [values for name, values in every.items() if len(shapes[name]) > 1 and name != besides]
    offered = np.concatenate(weights or [np.empty(0, dtype=np.int64)])
    if len(offered) < count:
        offered = np.concatenate(list(every.values()))
    if len(offered) < count:
        raise ConfigError(
            "too-many-canaries",
            f"{count:,} canaries are wanted, but the model has {len(offered):,} trained parameters.",
            why="Each canary needs a coordinate of its own.",
            fix="Use fewer canaries, or canaries with images: --audit-kind mislabelled.",
        )
    return offered


def _permutation(source: SeededSource, size: int) -> np.ndarray:
    words = source.random_bytes(8 * size, purpose="canary coordinates", step=0).view(np.uint64)
    return np.argsort(words, kind="stable")


def _signs(source: SeededSource, count: int) -> Tensor:
    drawn = source.random_bytes(count, purpose="canary signs", step=0)
    return torch.from_numpy(np.where(drawn < 128, 1.0, -1.0))
