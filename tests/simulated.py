"""Mechanisms whose privacy is known exactly, and how often a bound may miss it."""

from __future__ import annotations

import numpy as np
from scipy.stats import binom

CONFIDENCE = 0.6  # low: bounds from counts are cautious, and only here a missing correction stands out
REPETITIONS = 1000


def allowed_misses(repetitions: int = REPETITIONS, miss: float = 1 - CONFIDENCE) -> int:
    """More misses than this happen to an honest bound once in 100,000 times."""
    return int(binom.isf(1e-5, repetitions, miss))


def gaussian_sides(random: np.random.Generator, mu: float, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of a full-batch Gaussian sum with the canary in and out: exactly μ-GDP."""
    return random.normal(mu, 1, number), random.normal(0, 1, number)


def coin_sides(
    random: np.random.Generator, mu: float, canaries: int, *, decimals: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """One run: each canary in by a fair coin, its score μ-GDP; rounded on request, for ties."""
    members = random.random(canaries) < 0.5
    scores = random.normal(0, 1, canaries) + mu * members
    scores = scores if decimals is None else scores.round(decimals)
    return scores[members], scores[~members]


def response_sides(random: np.random.Generator, epsilon: float, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Randomised response, scores 0 and 1 only: exactly (ε, 0)-DP."""
    truth = np.exp(epsilon) / (1 + np.exp(epsilon))
    return (random.random(number) < truth).astype(float), (random.random(number) >= truth).astype(float)
