"""The number of trials under random stopping: drawn from the very distribution that is counted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sfumato.errors import ConfigError
from sfumato.randomness import SecureSource, SeededSource
from sfumato.tune.stopping import draw_trials, first_weight, mean_of, parameter_of_mean


def weights(mean: float, shape: float, most: int) -> np.ndarray:
    """Of 1 … most, from the definition of the truncated negative binomial distribution."""
    gamma = parameter_of_mean(mean, shape)
    counts = np.arange(1, most + 1)
    if shape == 0:
        return (1 - gamma) ** counts / counts / math.log(1 / gamma)
    logs = [math.lgamma(k + shape) - math.lgamma(k + 1) - math.lgamma(shape) for k in counts]
    return np.exp(logs) * (1 - gamma) ** counts / (gamma**-shape - 1)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("mean", [1.5, 8.0, 60.0])
def test_the_parameter_gives_the_mean_that_was_asked_for(mean: float, shape: float) -> None:
    table = weights(mean, shape, 20_000)
    assert table.sum() == pytest.approx(1, abs=1e-6)
    assert (table * np.arange(1, len(table) + 1)).sum() == pytest.approx(mean, rel=1e-4)
    gamma = parameter_of_mean(mean, shape)
    assert mean_of(gamma, shape) == pytest.approx(mean)
    assert first_weight(gamma, shape) == pytest.approx(table[0])


@pytest.mark.parametrize("shape", [0.0, 1.0])
def test_draws_follow_the_weights_and_not_those_of_another_mean(shape: float) -> None:
    source = SecureSource()
    draws = np.array([draw_trials(5.0, shape, source) for _ in range(20_000)])

    def distance(mean: float) -> float:
        """Pearson's χ² over the first cells."""
        cells = 8
        expected = weights(mean, shape, cells) * len(draws)
        seen = np.bincount(draws, minlength=cells + 1)[1 : cells + 1]
        return float(((seen - expected) ** 2 / expected).sum())

    assert draws.min() == 1
    assert distance(5.0) < 35  # 8 degrees of freedom: 3e-5 of honest draws are beyond
    assert distance(7.0) > 35


def test_a_seed_repeats_the_number_and_another_does_not_always() -> None:
    drawn = [draw_trials(20.0, 1.0, SeededSource(seed)) for seed in range(12)]
    assert drawn == [draw_trials(20.0, 1.0, SeededSource(seed)) for seed in range(12)]
    assert len(set(drawn)) > 3


@pytest.mark.parametrize(
    ("mean", "shape"), [(1.0, 1.0), (0.5, 1.0), (5.0, -1.0), (5.0, math.inf), (1e9, 0.0)]
)
def test_what_cannot_be_drawn_is_refused(mean: float, shape: float) -> None:
    with pytest.raises(ConfigError, match="search-out-of-range"):
        parameter_of_mean(mean, shape)
