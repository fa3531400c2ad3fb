"""What is added to a sum: each mechanism adds its noise, counts it, and says it in words.

To add one: a class here and its row in ``MECHANISMS``, from which recipes and commands take their choices.
An object of your own goes into ``Plan(mechanism=…)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sfumato.accounting import SampledGaussian
from sfumato.errors import ConfigError, PrivacyError

if TYPE_CHECKING:
    from torch import Tensor

    from sfumato.gradients import ClippedSum
    from sfumato.randomness import RandomSource


@runtime_checkable
class NoiseMechanism(Protocol):
    """Noise of a stated scale on a sum of stated sensitivity."""

    @property
    def name(self) -> str:
        """As recipes and files write it."""

    @property
    def words(self) -> str:
        """The kind of noise in a sentence."""

    @property
    def assumption(self) -> str | None:
        """What the statement has to assume for it, if anything."""

    def event(self, noise_multiplier: float) -> SampledGaussian:
        """One noisy sum over all units, for the accountant."""

    def add(
        self, total: ClippedSum, *, noise_multiplier: float, source: RandomSource, step: int
    ) -> dict[str, Tensor]:
        """The sum with noise of ``noise_multiplier`` times its sensitivity."""


@dataclass(frozen=True)
class Gaussian:
    """Continuous noise, rounded to a lattice (``sfumato.noise``)."""

    name = "gaussian"
    words = "Gaussian"
    assumption = (
        "Sums are computed in floating point; noisy sums are rounded to a lattice so that their low "
        "bits reveal nothing."
    )

    def event(self, noise_multiplier: float) -> SampledGaussian:
        return SampledGaussian(noise_multiplier=noise_multiplier)

    def add(
        self, total: ClippedSum, *, noise_multiplier: float, source: RandomSource, step: int
    ) -> dict[str, Tensor]:
        from sfumato.noise import add_noise

        return add_noise(
            total.gradients, stddev=noise_multiplier * total.sensitivity, source=source, step=step
        )


@dataclass(frozen=True)
class DiscreteGaussian:
    """Exact whole-number noise on the rounded sum (``sfumato.discrete_gaussian``)."""

    name = "discrete-gaussian"
    words = "discrete Gaussian"
    assumption = None

    def event(self, noise_multiplier: float) -> SampledGaussian:
        from sfumato.discrete_gaussian import ROUNDING

        # rounding the sum before the noise enlarges its sensitivity
        return SampledGaussian(noise_multiplier=noise_multiplier / (1.0 + ROUNDING), discrete=True)

    def add(
        self, total: ClippedSum, *, noise_multiplier: float, source: RandomSource, step: int
    ) -> dict[str, Tensor]:
        from sfumato.discrete_gaussian import add_discrete_noise

        stddev = noise_multiplier * total.sensitivity
        return add_discrete_noise(
            total.gradients, stddev=stddev, sensitivity=total.sensitivity, source=source, step=step
        )


def check_sensitivity(sensitivity: float, clip_norm: float) -> None:
    """Refuse a sum that one unit can move further than the plan's ``clip_norm``."""
    if not 0 < sensitivity <= clip_norm:
        raise PrivacyError(
            "sensitivity-above-plan",
            f"one unit can move this sum by {sensitivity}, but the plan allows {clip_norm}.",
            why="The noise would be too small for what it has to hide.",
            fix="Clip with the plan's clip_norm.",
        )


MECHANISMS: Mapping[str, NoiseMechanism] = {each.name: each for each in (Gaussian(), DiscreteGaussian())}


def find_mechanism(mechanism: str | NoiseMechanism) -> NoiseMechanism:
    """The mechanism of this name, or the object itself."""
    if isinstance(mechanism, NoiseMechanism):
        return mechanism
    if mechanism not in MECHANISMS:
        raise ConfigError(
            "unknown-choice", f"mechanism is {mechanism!r}.", fix=f"Use one of: {', '.join(MECHANISMS)}."
        )
    return MECHANISMS[mechanism]
