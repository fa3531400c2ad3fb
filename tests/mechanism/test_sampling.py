"""Batches are Poisson samples: independent units, the exact rate, sizes that vary and may be zero."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from sfumato.errors import ConfigError
from sfumato.randomness import SecureSource, SeededSource
from sfumato.sampling import FullBatch, PoissonSampling


def membership(sampling_rate: float, num_units: int, num_steps: int) -> np.ndarray:
    """(steps, units) table of who was in which batch."""
    sampler = PoissonSampling(sampling_rate=sampling_rate, num_steps=num_steps)
    table = np.zeros((num_steps, num_units), dtype=bool)
    for step, batch in enumerate(sampler.batches(num_units, SecureSource())):
        table[step, batch] = True
    return table


def looks_poisson(table: np.ndarray, rate: float) -> bool:
    """Rate, spread of the batch sizes, and independence of units and of steps, within 6 standard errors."""
    steps, units = table.shape
    sizes = table.sum(axis=1)
    variance = units * rate * (1 - rate)
    centred = table - rate
    pairs = (centred[:, ::2][:, : units // 2] * centred[:, 1::2][:, : units // 2]).sum()
    following = (centred[1:] * centred[:-1]).sum()
    scale = rate * (1 - rate)
    return bool(
        abs(table.mean() - rate) < 6 * math.sqrt(scale / table.size)
        and abs(sizes.var() / variance - 1) < 6 * math.sqrt(2 / steps)
        and abs(pairs) < 6 * scale * math.sqrt(steps * (units // 2))
        and abs(following) < 6 * scale * math.sqrt((steps - 1) * units)
    )


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
def test_each_unit_is_drawn_independently_with_the_stated_rate(rate):
    table = membership(rate, num_units=400, num_steps=2000)
    assert looks_poisson(table, rate)
    assert not looks_poisson(table, rate * 1.02 + 0.002)


def test_batches_of_fixed_size_would_be_noticed():
    random = np.random.default_rng(0)
    shuffled = np.zeros((2000, 400), dtype=bool)
    for step in range(2000):
        shuffled[step, random.permutation(400)[:120]] = True
    assert not looks_poisson(shuffled, 0.3)


def test_an_epoch_that_visits_every_unit_once_would_be_noticed():
    random = np.random.default_rng(0)
    table = np.zeros((2000, 400), dtype=bool)
    for epoch in range(500):  # random sizes, but no unit twice in an epoch
        for unit, part in enumerate(random.integers(0, 4, 400)):
            table[4 * epoch + part, unit] = True
    assert not looks_poisson(table, 0.25)


def test_batch_sizes_are_binomial():
    sizes = membership(0.05, num_units=200, num_steps=4000).sum(axis=1)
    expected = stats.binom.pmf(np.arange(40), 200, 0.05) * 4000
    counts = np.bincount(sizes, minlength=40)[:40]
    common = expected > 5
    chi_square = ((counts - expected) ** 2 / expected)[common].sum()
    assert chi_square < common.sum() + 6 * math.sqrt(2 * common.sum())


def test_an_empty_batch_is_a_step_like_any_other():
    sampler = PoissonSampling(sampling_rate=0.001, num_steps=50)
    batches = list(sampler.batches(10, SecureSource()))
    assert len(batches) == 50
    assert sum(len(batch) == 0 for batch in batches) > 30


def test_the_threshold_never_exceeds_the_rate():
    class Word(SeededSource):
        def __init__(self, word: int) -> None:
            super().__init__(0)
            self.word = word

        def random_bytes(self, count, *, purpose, step):
            return np.full(count // 8, self.word, dtype=np.uint64).view(np.uint8)

    for rate in (0.1, 1 / 3, 0.08192, 1e-9):
        boundary = int(rate * 2.0**64)
        sampler = PoissonSampling(sampling_rate=rate, num_steps=1)
        assert len(sampler.batch(5, Word(boundary - 1), 0)) == 5
        assert len(sampler.batch(5, Word(boundary), 0)) == 0


def test_a_rate_of_one_takes_everyone():
    batch = next(PoissonSampling(sampling_rate=1.0, num_steps=1).batches(7, SecureSource()))
    assert torch.equal(batch, torch.arange(7))
    assert [len(batch) for batch in FullBatch(num_steps=3).batches(7, SecureSource())] == [7, 7, 7]


def test_a_seeded_run_goes_on_where_it_stopped_and_a_secure_one_draws_anew():
    sampler = PoissonSampling(sampling_rate=0.5, num_steps=6)
    whole = list(sampler.batches(100, SeededSource(4)))
    rest = list(sampler.batches(100, SeededSource(4), start_step=4))
    assert len(rest) == 2
    assert all(torch.equal(*pair) for pair in zip(whole[4:], rest, strict=True))
    source = SecureSource()
    assert not torch.equal(sampler.batch(100, source, 4), sampler.batch(100, source, 4))


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_a_rate_that_is_no_probability_is_refused(rate):
    with pytest.raises(ConfigError, match="sampling-rate-out-of-range"):
        PoissonSampling(sampling_rate=rate, num_steps=1)


def test_a_negative_number_of_steps_is_refused():
    with pytest.raises(ConfigError, match="num-steps-out-of-range"):
        FullBatch(num_steps=-1)
    with pytest.raises(ConfigError, match="sampling-rate-out-of-range"):
        FullBatch(num_steps=1, sampling_rate=0.5)
