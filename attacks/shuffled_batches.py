"""Batches by shuffling, accounted as Poisson samples: the promised ε is broken.

With shuffling each unit is in exactly one batch of an epoch, and all batches have one size. If all
other units pull one way and the target the other, its batch stands out (Chua et al. 2024; Annamalai et
al. 2024). Poisson batches of random size hide it. Safeguard: batches are drawn as they are accounted.
"""

from __future__ import annotations

import numpy as np
from membership import proven_epsilon, report
from scipy import stats

from sfumato import accounting

NUM_UNITS = NUM_STEPS = 10_000  # expected batch size 1, one epoch
SIGMA, DELTA, TRIALS, THRESHOLD = 0.5, 1e-6, 2_000_000, 2.9


def promised() -> float:
    event = accounting.SampledGaussian(
        noise_multiplier=SIGMA, sampling_rate=1 / NUM_STEPS, num_steps=NUM_STEPS
    )
    return accounting.epsilon([event], delta=DELTA)


def largest_of(count: int, random: np.random.Generator) -> np.ndarray:
    """The largest of ``count`` standard normal values, drawn in one go."""
    return stats.norm.isf(-np.expm1(np.log(random.random(TRIALS)) / count))


def shuffled(*, member: bool, random: np.random.Generator) -> np.ndarray:
    """Largest noisy batch sum, counted from a batch of others (-1 each); the target adds +1."""
    others = SIGMA * largest_of(NUM_STEPS - 1, random)
    own = (2.0 if member else 1.0) + SIGMA * random.standard_normal(TRIALS)
    return np.maximum(others, own)


def poisson(*, member: bool, random: np.random.Generator) -> np.ndarray:
    """The same statistic when every unit, the target too, is in each batch with probability 1/steps."""
    grid = np.linspace(-4.0, 5.0, 20_001)
    sizes = np.arange(12)
    weights = stats.binom.pmf(sizes, NUM_UNITS, 1 / NUM_STEPS)
    # a batch of k others has the sum -k; measured from -1, as above, that is 1 - k
    below = (weights[:, None] * stats.norm.cdf((grid - (1 - sizes[:, None])) / SIGMA)).sum(axis=0)
    times = random.binomial(NUM_STEPS, 1 / NUM_STEPS, TRIALS) if member else np.zeros(TRIALS, dtype=int)
    others = np.interp(random.random(TRIALS) ** (1 / NUM_STEPS), below / below[-1], grid)
    best = others
    for turn in range(int(times.max(initial=0))):
        here = times > turn
        own = 2.0 - random.poisson(1.0, TRIALS) + SIGMA * random.standard_normal(TRIALS)
        best = np.where(here, np.maximum(best, own), best)
    return best


def attack(statistic) -> tuple[bool, str]:
    random = np.random.default_rng()
    members, others = statistic(member=True, random=random), statistic(member=False, random=random)
    proven = proven_epsilon(members, others, delta=DELTA, threshold=THRESHOLD)
    return proven > promised(), f"ε of at least {proven:.2f} is proven, {promised():.2f} is promised"


def without_safeguard() -> tuple[bool, str]:
    return attack(shuffled)


def with_safeguard() -> tuple[bool, str]:
    return attack(poisson)


if __name__ == "__main__":
    report("Shuffled batches accounted as Poisson", without_safeguard, with_safeguard)
