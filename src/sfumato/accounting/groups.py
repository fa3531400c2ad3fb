"""Groups: what several units that belong to one person are guaranteed together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from sfumato.accounting.accountants import is_noiseless
from sfumato.accounting.curves import delta as delta_at
from sfumato.accounting.events import Accountant, Event, Neighbouring, SampledGaussian, check_delta, merge
from sfumato.accounting.gaussian import exact_mu
from sfumato.accounting.loss_distributions import discretisation, is_hopeless
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


def group_epsilon(
    events: Sequence[Event],
    *,
    delta: float,
    group_size: int,
    accountant: Accountant = "pld",
    neighbouring: Neighbouring = "add-or-remove",
) -> tuple[float, str]:
    """ε for ``group_size`` units that belong together (one person's images), and how it was found.
    "exact": full batches, the group moves the sum ``group_size`` times as far. "mixture": sampled,
    add-or-remove; the number of the group's units in a step is binomial, a mixture of Gaussians
    (Ganesh 2024), tight. "two mixtures": sampled, replace-one; the group is removed, then another
    added. "generic": the group bound of (ε, δ)-DP, valid for every mechanism and loose; infinite where
    it says nothing.
    """
    check_delta(delta)
    if group_size < 1:
        raise ConfigError("group-out-of-range", f"a group of {group_size} units.", fix="Give 1 or more.")
    spent = merge(events)
    exact = exact_mu(spent, neighbouring)
    if exact is not None:
        import dp_accounting

        return float(dp_accounting.get_epsilon_gaussian(1.0 / (exact * group_size), delta)), "exact"
    steps = [event for event in spent if isinstance(event, SampledGaussian) and not event.discrete]
    plain = len(steps) == len(spent)
    if is_noiseless(spent) or (plain and is_hopeless(steps, "add-or-remove", group_size=group_size)):
        return math.inf, "none"
    if plain:
        mixture = _group_distribution(tuple(steps), group_size)
        if neighbouring == "add-or-remove":
            return float(mixture.get_epsilon_for_delta(delta)), "mixture"
        return _chain_epsilon(mixture.get_delta_for_epsilon, delta, 2), "two mixtures"

    def unit_delta(epsilon: float) -> float:
        return delta_at(spent, epsilon=epsilon, accountant=accountant, neighbouring=neighbouring)

    return _chain_epsilon(unit_delta, delta, group_size), "generic"


@lru_cache(maxsize=16)  # two seconds each; runs that differ in their seed ask for the same
def _group_distribution(events: tuple[SampledGaussian, ...], group_size: int) -> PrivacyLossDistribution:
    from dp_accounting.pld import privacy_loss_distribution as pld
    from scipy.stats import binom

    # the group moves the sum up to group_size times as far, so losses are about that much larger
    interval, total = discretisation(events, "add-or-remove") * group_size, None
    for event in events:
        if event.sampling_rate == 1:
            part = pld.from_gaussian_mechanism(
                standard_deviation=event.noise_multiplier / math.sqrt(event.num_steps) / group_size,
                value_discretization_interval=interval,
            )
        else:
            part = pld.from_mixture_gaussian_mechanism(
                standard_deviation=event.noise_multiplier,
                sensitivities=list(range(group_size + 1)),
                sampling_probs=binom.pmf(range(group_size + 1), group_size, event.sampling_rate).tolist(),
                value_discretization_interval=interval,
            ).self_compose(event.num_steps)
        total = part if total is None else total.compose(part)
    return total


def _chain_epsilon(delta_of: Callable[[float], float], delta: float, length: int) -> float:
    """Smallest length·ε with δ(ε)·(1 + e^ε + … + e^((length-1)ε)) <= δ: a chain of neighbours."""

    def chain_delta(epsilon: float) -> float:
        return float(delta_of(epsilon)) * sum(math.exp(min(700.0, i * epsilon)) for i in range(length))

    high = 1.0
    while chain_delta(high) > delta:
        high *= 2
        if high > 1000:
            return math.inf
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if chain_delta(middle) <= delta else (middle, high)
    return length * high
