"""How many trials a search by random stopping has: drawn once, beforehand, and told to nobody."""

from __future__ import annotations

import math

from scipy.optimize import brentq

from sfumato.errors import ConfigError
from sfumato.randomness import RandomSource

_WORD = 2**53


def parameter_of_mean(mean: float, shape: float) -> float:
    """γ of the truncated negative binomial distribution of this mean (Papernot and Steinke 2022, lemma 15).

    Its weights on k = 1, 2, … are C(k + η - 1, k) (1 - γ)^k / (γ^-η - 1) for a shape η above 0, and
    (1 - γ)^k / (k log(1/γ)) for η = 0.
    """
    if not (1 < mean < 1e6 and 0 <= shape < 1e3):
        raise ConfigError(
            "search-out-of-range",
            f"a mean of {mean:g} trials with shape {shape:g} cannot be drawn.",
            fix="Give more than 1 trial on average, and a shape from 0 (logarithmic) to 1 (geometric).",
        )
    if shape == 1:
        return 1 / mean
    lowest = 1e-15
    return float(brentq(lambda gamma: mean_of(gamma, shape) - mean, lowest, 1 - 1e-12, xtol=1e-16))


def mean_of(gamma: float, shape: float) -> float:
    """The mean number of trials."""
    if shape == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))


def draw_trials(mean: float, shape: float, source: RandomSource) -> int:
    """A number of trials from 1 on, from the source of the search, by inversion.

    Guarantee: its probabilities are those of the distribution to 2⁻⁵³.
    """
    gamma = parameter_of_mean(mean, shape)
    raw = source.random_bytes(8, purpose="number of trials", step=0)
    uniform = (int.from_bytes(bytes(raw), "little") % _WORD) / _WORD
    count, weight, reached = 1, first_weight(gamma, shape), 0.0
    while True:
        reached += weight
        if uniform < reached or weight < 1e-300:
            return count
        weight *= (1 - gamma) * (count + shape) / (count + 1)
        count += 1


def first_weight(gamma: float, shape: float) -> float:
    """The probability of a single trial."""
    if shape == 0:
        return (1 - gamma) / math.log(1 / gamma)
    return shape * (1 - gamma) / math.expm1(-shape * math.log(gamma))
