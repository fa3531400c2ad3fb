"""Privacy loss distributions: the tight accountant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from sfumato.accounting.events import Event, Neighbouring, SampledGaussian, without_selections
from sfumato.accounting.gaussian import GaussianCurve, exact_mu
from sfumato.accounting.renyi import RenyiCurve, needs_rdp, renyi_curve, rough_epsilon
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_HOPELESS = 300.0
_MOST_COMPOSED_STEPS = 1_000_000


@dataclass(frozen=True)
class LossCurve:
    """The privacy curve of a composed loss distribution."""

    distribution: PrivacyLossDistribution

    def epsilon(self, delta: float) -> float:
        return float(self.distribution.get_epsilon_for_delta(delta))

    def delta(self, epsilon: float) -> float:
        return float(self.distribution.get_delta_for_epsilon(epsilon))


@dataclass(frozen=True)
class PldAccountant:
    """dp-accounting's loss distributions, rounded upwards; exact where a formula is known."""

    name = "pld"
    title = "privacy loss distributions"

    def check(self, events: Sequence[Event]) -> None:
        if needs_rdp(events):
            raise ConfigError(
                "needs-rdp",
                "a counted search, or discrete noise, was to be accounted with pld.",
                why="Both are proven in Rényi differential privacy; no tight loss distribution is known.",
                fix="Use the rdp accountant.",
            )

    def curve(
        self, events: tuple[Event, ...], neighbouring: Neighbouring
    ) -> GaussianCurve | RenyiCurve | LossCurve:
        mu = exact_mu(events, neighbouring)
        if mu is not None:
            return GaussianCurve(mu)
        steps = without_selections(events)
        if is_hopeless(steps, neighbouring):
            return renyi_curve(steps, neighbouring)
        return LossCurve(loss_distribution(steps, neighbouring))


def is_hopeless(
    events: Sequence[SampledGaussian], neighbouring: Neighbouring, *, group_size: int = 1
) -> bool:
    """Whether ε is in the hundreds or the steps in the millions; RDP bounds them then.

    The loss distribution is not worth its memory in the first case, nor minutes of work in the second.
    """
    if sum(event.num_steps for event in events if event.sampling_rate < 1) > _MOST_COMPOSED_STEPS:
        return True
    if group_size > 1:
        events = tuple(
            replace(event, noise_multiplier=event.noise_multiplier / group_size) for event in events
        )
    return rough_epsilon(events, neighbouring=neighbouring) > _HOPELESS


@lru_cache(maxsize=8)
def loss_distribution(
    events: tuple[SampledGaussian, ...], neighbouring: Neighbouring
) -> PrivacyLossDistribution:
    """The composed privacy loss distribution; cached, since plots and bisections need it many times."""
    interval, total = discretisation(events, neighbouring), None
    for event in events:
        if event.sampling_rate == 1:  # full batches compose to one Gaussian, exactly
            part = _one_step(event.noise_multiplier / math.sqrt(event.num_steps), 1.0, neighbouring, interval)
        else:
            part = _one_step(event.noise_multiplier, event.sampling_rate, neighbouring, interval)
            part = part.self_compose(event.num_steps)
        total = part if total is None else total.compose(part)
    return total


@lru_cache(maxsize=8)
def _one_step(
    noise_multiplier: float, sampling_rate: float, neighbouring: Neighbouring, interval: float
) -> PrivacyLossDistribution:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    replace = neighbouring == "replace-one"
    return pld.from_gaussian_mechanism(
        standard_deviation=noise_multiplier,
        value_discretization_interval=interval,
        sampling_prob=sampling_rate,
        neighboring_relation=(
            NeighboringRelation.REPLACE_ONE if replace else NeighboringRelation.ADD_OR_REMOVE_ONE
        ),
    )


def discretisation(events: Sequence[SampledGaussian], neighbouring: Neighbouring) -> float:
    """The interval of privacy losses that overstates ε by about one part in ten thousand.

    The overstatement was measured to be near 1.5·T·interval²/ε² of ε.
    """
    sampled_steps = sum(event.num_steps for event in events if event.sampling_rate < 1)
    wanted = 0.008 * rough_epsilon(events, neighbouring=neighbouring) / math.sqrt(max(sampled_steps, 64))
    return 2.0 ** math.floor(
        math.log2(min(max(wanted, 1e-7), 0.01))
    )  # a power of two: nearby plans share the cached part
