"""Clopper-Pearson: exact confidence bounds of a probability from successes counted in independent trials."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betainccinv, betaincinv


def upper_rate(successes: ArrayLike, trials: int, miss: float) -> NDArray[np.float64]:
    """The one-sided upper bound: for every true rate, below it with probability at most ``miss``."""
    successes = np.asarray(successes, dtype=np.float64)
    inside = np.minimum(successes, trials - 1)  # the bound of "always" is 1, where the formula has no value
    return np.where(successes >= trials, 1.0, betainccinv(inside + 1, trials - inside, miss))


def lower_rate(successes: ArrayLike, trials: int, miss: float) -> NDArray[np.float64]:
    """The one-sided lower bound: for every true rate, above it with probability at most ``miss``."""
    successes = np.asarray(successes, dtype=np.float64)
    inside = np.maximum(successes, 1)
    return np.where(successes <= 0, 0.0, betaincinv(inside, trials - inside + 1, miss))


def rate_interval(successes: int, trials: int, miss: float) -> tuple[float, float]:
    """The two-sided interval: ``miss / 2`` on each side."""
    return float(lower_rate(successes, trials, miss / 2)), float(upper_rate(successes, trials, miss / 2))
