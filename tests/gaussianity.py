"""Tests of whether a sample is Gaussian: moments, cells, tails and independence, with exact expectations."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

LIMIT = 6.0  # standard errors: a false alarm once in 5e8


def deviations(sample: np.ndarray, stddev: float) -> dict[str, float]:
    """Each test's distance from what N(0, stddev²) gives, in standard errors."""
    z = sample.ravel() / stddev
    n = len(z)
    squared = z * z
    return {
        "mean": abs(z.mean()) * math.sqrt(n),
        "variance": abs(squared.mean() - 1) * math.sqrt(n / 2),
        "skewness": abs((squared * z).mean()) * math.sqrt(n / 15),
        "kurtosis": abs((squared * squared).mean() - 3) * math.sqrt(n / 96),
        "cells": _cells(z),
        "tail 3": _tail(z, 3.0),
        "tail 4": _tail(z, 4.0),
        "tail 4.75": _tail(z, 4.75),
        **{f"lag {lag}": _correlation(z, lag) for lag in (1, 2, 3)},
        **{f"squares, lag {lag}": _correlation(squared - 1, lag, scale=2.0) for lag in (1, 2, 3)},
        "halves": _correlation(z, n // 2),
        "squared halves": _correlation(squared - 1, n // 2, scale=2.0),
    }


def is_gaussian(sample: np.ndarray, stddev: float) -> bool:
    return max(deviations(sample, stddev).values()) < LIMIT


def _cells(z: np.ndarray, num_cells: int = 400) -> float:
    edges = stats.norm.ppf(np.arange(1, num_cells) / num_cells)
    counts = np.bincount(np.searchsorted(edges, z), minlength=num_cells)
    expected = len(z) / num_cells
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return abs(chi_square - (num_cells - 1)) / math.sqrt(2 * (num_cells - 1))


def _tail(z: np.ndarray, beyond: float) -> float:
    probability = stats.norm.sf(beyond)
    expected = len(z) * probability
    return max(
        abs(int(count) - expected) / math.sqrt(expected + 1)
        for count in ((z > beyond).sum(), (z < -beyond).sum())
    )


def _correlation(values: np.ndarray, lag: int, scale: float = 1.0) -> float:
    product = float(np.dot(values[:-lag], values[lag:])) / scale
    return abs(product) / math.sqrt(len(values) - lag)
