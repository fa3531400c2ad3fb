"""Clopper-Pearson: exact confidence bounds of a probability from successes counted in independent trials."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
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
