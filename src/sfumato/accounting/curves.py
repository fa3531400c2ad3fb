"""The privacy curve of events: ε at a δ, δ at an ε, the trade-off between test errors, and μ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from sfumato.accounting.accountants import default_accountant, find_accountant, is_noiseless
from sfumato.accounting.events import (
    Accountant,
    Event,
    Neighbouring,
    SampledGaussian,
    check_delta,
    check_epsilon,
    merge,
)
from sfumato.accounting.gaussian import exact_mu, gaussian_delta


def epsilon(
    events: Sequence[Event],
    *,
    delta: float,
    accountant: Accountant = "pld",
    neighbouring: Neighbouring = "add-or-remove",
) -> float:
    """The smallest ε the accountant can show for all events together at this δ; infinite without noise.

    Guarantee: never below the true ε, up to the arithmetic of dp-accounting.
    """
    check_delta(delta)
    return _epsilon(merge(events), delta, accountant, neighbouring)


@lru_cache(maxsize=4096)
def _epsilon(
    events: tuple[Event, ...], delta: float, accountant: Accountant, neighbouring: Neighbouring
) -> float:
    counted_by = find_accountant(events, accountant, neighbouring)
    if not events:
        return 0.0
    if is_noiseless(events):
        return math.inf
    return counted_by.curve(events, neighbouring).epsilon(delta)


def delta(
    events: Sequence[Event],
    *,
    epsilon: float,
    accountant: Accountant = "pld",
    neighbouring: Neighbouring = "add-or-remove",
) -> float:
    """The smallest δ the accountant can show at this ε; 1 without noise."""
    check_epsilon(epsilon)
    return _delta_curve(merge(events), accountant, neighbouring)(epsilon)


def _delta_curve(
    events: tuple[Event, ...], accountant: Accountant, neighbouring: Neighbouring
) -> Callable[[float], float]:
    """δ as a function of ε."""
    counted_by = find_accountant(events, accountant, neighbouring)
    if not events:
        return lambda epsilon: 0.0
    if is_noiseless(events):
        return lambda epsilon: 1.0
    return counted_by.curve(events, neighbouring).delta


def mu_gdp(
    events: Sequence[Event], *, delta: float, neighbouring: Neighbouring = "add-or-remove"
) -> tuple[float, str]:
    """μ of Gaussian differential privacy, and how it was found: "exact" or "fitted".
    Full-batch Gaussian sums are exactly μ-GDP with μ² = Σ (sensitivity/stddev)². Sampled ones are not
    μ-GDP for any one μ; then this is the smallest μ whose curve bounds the mechanism's for every δ(ε)
    from ``delta`` up ("fitted"): a summary to read beside (ε, δ), which must not be composed further.
    """
    check_delta(delta)
    spent = merge(events)
    if not spent:
        return 0.0, "exact"
    if is_noiseless(spent):
        return math.inf, "exact"
    mu = exact_mu(spent, neighbouring)
    if mu is not None:
        return mu, "exact"
    accountant = default_accountant(spent)
    curve = _delta_curve(spent, accountant, neighbouring)
    largest = _epsilon(spent, delta, accountant, neighbouring)
    grid = [largest * i / 24 for i in range(25)]
    return max(_mu_through(point, curve(point)) for point in grid), "fitted"


def mu_clt(event: SampledGaussian) -> float:
    """The central-limit μ of Poisson-sampled steps (Bu, Dong, Long and Su 2020): q·sqrt(T·(e^(1/σ²) − 1)).

    An approximation, not a bound: for comparison with papers, never for a guarantee.
    """
    return event.sampling_rate * math.sqrt(event.num_steps * math.expm1(event.noise_multiplier**-2))


def trade_off(
    events: Sequence[Event],
    false_positive_rates: Sequence[float],
    *,
    accountant: Accountant = "pld",
    neighbouring: Neighbouring = "add-or-remove",
) -> list[float]:
    """The smallest false negative rate of any membership test with each false positive rate.
    Guarantee: a lower bound on what every attack must accept (Dong, Roth and Su 2022, proposition
    2.12): the upper envelope of the two lines that each (ε, δ) of the curve gives.
    """
    curve = _delta_curve(merge(events), accountant, neighbouring)
    points = [(point, curve(point)) for point in [0.0, *(0.001 * 1.2**i for i in range(64))]]
    return [
        max(0.0, *(max(1 - d - math.exp(e) * rate, math.exp(-e) * (1 - d - rate)) for e, d in points))
        for rate in false_positive_rates
    ]


def _mu_through(epsilon: float, delta: float) -> float:
    """The μ whose curve passes through (ε, δ)."""
    from scipy.optimize import brentq

    if delta <= 0:
        return 0.0
    low, high = -14.0, 7.0  # ln μ: beyond these no plan is of use
    if gaussian_delta(epsilon, math.exp(low)) >= delta:
        return math.exp(low)
    if gaussian_delta(epsilon, math.exp(high)) <= delta:
        return math.inf
    return math.exp(brentq(lambda log_mu: gaussian_delta(epsilon, math.exp(log_mu)) - delta, low, high))
