"""Exact confidence bounds: of a probability by Clopper-Pearson, of a mean by betting."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import betainccinv, betaincinv


def upper_rate(successes: ArrayLike, trials: int, failure_probability: float) -> NDArray[np.float64]:
    """The one-sided upper bound, below the true rate with probability at most ``failure_probability``."""
    successes = np.asarray(successes, dtype=np.float64)
    inside = np.minimum(successes, trials - 1)  # the bound of "always" is 1, where the formula has no value
    return np.where(successes >= trials, 1.0, betainccinv(inside + 1, trials - inside, failure_probability))


def lower_rate(successes: ArrayLike, trials: int, failure_probability: float) -> NDArray[np.float64]:
    """The one-sided lower bound, above the true rate with probability at most ``failure_probability``."""
    successes = np.asarray(successes, dtype=np.float64)
    inside = np.maximum(successes, 1)
    return np.where(successes <= 0, 0.0, betaincinv(inside, trials - inside + 1, failure_probability))


def rate_interval(successes: int, trials: int, failure_probability: float) -> tuple[float, float]:
    """The two-sided interval: ``failure_probability / 2`` on each side."""
    each = failure_probability / 2
    return float(lower_rate(successes, trials, each)), float(upper_rate(successes, trials, each))


def upper_mean(values: ArrayLike, failure_probability: float, *, bet: float) -> float:
    """The one-sided upper bound of the mean of independent values from 0 to 1, whatever their distribution.

    Guarantee: below the true mean with probability at most ``failure_probability``, if ``bet``, above 0 and
    at most 1, was fixed before the values were seen. Whoever bets against a mean of m or more holds the
    product of 1 + bet·(m − value), which is 1 or less on average, so that it reaches
    1 / ``failure_probability`` no more often than that (Markov; Waudby-Smith and Ramdas 2024). The bound is
    the least m that loses so much.
    """
    values, goal = np.asarray(values, dtype=np.float64), math.log(1 / failure_probability)

    def short(mean: float) -> float:
        return float(np.log1p(bet * (mean - values)).sum()) - goal

    # from just above 0, where whoever bet all on a value of 1 has nothing left
    return 1.0 if short(1.0) <= 0 else float(brentq(short, 1e-12, 1.0))


def best_bet(variance: float, number: int, failure_probability: float) -> float:
    """The bet that makes ``upper_mean`` sharp for so many values of this variance."""
    return min(1.0, math.sqrt(2 * math.log(1 / failure_probability) / (number * variance)))
