"""What the errors of a test refute about a plan: ε from below, among plans that differ in noise alone.

A Poisson-sampled mechanism is not μ-GDP for any one μ. So the bound is read off its own family, the same
sampling rate and number of steps at every noise multiplier, as Nasr et al. 2023 do. With full batches the
family is Gaussian differential privacy.
"""

from __future__ import annotations

import math
from dataclasses import replace

from scipy.special import ndtr, ndtri

from sfumato import accounting
from sfumato.audit.bounds import epsilon_of_mu
from sfumato.privacy.plan import Plan

MOST_NOISE, LEAST_NOISE = 1e4, 1e-2
PRECISION = 1e-3  # relative, of the noise multiplier


def total_error(plan: Plan) -> float:
    """The least that false positive rate and false negative rate of a membership test can add up to."""
    if plan.sampling_rate == 1:
        return 2 * float(ndtr(-plan.mu_gdp / 2))
    return 1 - accounting.delta(plan.events(), epsilon=0.0, accountant=plan.accountant)


def refuted_epsilon(plan: Plan, total: float) -> float:
    """The largest ε at the plan's δ that a test with this sum of error rates refutes; 0 if none.

    Guarantee: if the true sum is at most ``total`` and the mechanism is the plan's with some noise
    multiplier, its ε is at least this.
    """
    if total >= 1:  # no better than a coin
        return 0.0
    if plan.sampling_rate == 1:
        return epsilon_of_mu(-2 * float(ndtri(total / 2)), plan.delta)

    def refuted(noise_multiplier: float) -> bool:
        return total < total_error(replace(plan, noise_multiplier=noise_multiplier))

    low = high = plan.noise_multiplier
    while high < MOST_NOISE and not refuted(high):
        low, high = high, 1.5 * high
    while low > LEAST_NOISE and refuted(low):
        low, high = low / 1.5, low
    if high >= MOST_NOISE:
        return 0.0
    while high / low > 1 + PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return replace(plan, noise_multiplier=high).epsilon  # the least noise that is refuted
