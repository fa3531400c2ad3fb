"""The discrete Gaussian: its exact probabilities, its rounding, and its refusal of bad sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gaussianity import is_gaussian
from sfumato.discrete_gaussian import ROUNDING, add_discrete_noise, discrete_gaussian
from sfumato.errors import ConfigError, PrivacyError
from sfumato.randomness import SecureSource, SeededSource


def chi_square(sample: np.ndarray, stddev: float) -> float:
    """Distance from exp(-k²/2σ²), in standard deviations of the statistic."""
    values = np.arange(-60, 61)
    weights = np.exp(-(values**2) / (2 * stddev**2))
    expected = weights / weights.sum() * len(sample)
    common = expected > 10
    counts = np.array([(sample == value).sum() for value in values])
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    return float((statistic - common.sum()) / math.sqrt(2 * common.sum()))


@pytest.mark.parametrize("stddev", [1, 2, 7])
def test_every_whole_number_has_its_exact_probability(stddev):
    sample = discrete_gaussian(400_000, stddev=stddev, source=SecureSource(), step=0).numpy()
    assert chi_square(sample, stddev) < 6
    assert chi_square(sample, 1.02 * stddev) > 6
    rounded = np.rint(np.random.default_rng(0).normal(0, stddev, 400_000)).astype(int)
    assert stddev > 2 or chi_square(rounded, stddev) > 6  # a rounded Gaussian is another law


def test_a_wide_discrete_gaussian_is_gaussian():
    sample = discrete_gaussian(300_000, stddev=2**24, source=SecureSource(), step=0).double().numpy()
    assert is_gaussian(sample, stddev=2**24)
    assert not is_gaussian(sample, stddev=1.02 * 2**24)


def test_rounding_moves_neighbouring_sums_apart_by_no_more_than_is_paid_for():
    random = torch.Generator().manual_seed(0)
    for size in (1, 17, 50_000):
        spacing = 2.0 ** math.floor(math.log2(1.0 * ROUNDING / math.sqrt(size)))
        for _ in range(20):
            first = torch.randn(size, generator=random, dtype=torch.float64)
            change = torch.randn(size, generator=random, dtype=torch.float64)
            second = first + change / change.norm()
            apart = (torch.round(first / spacing) - torch.round(second / spacing)) * spacing
            assert apart.norm() <= 1.0 + ROUNDING
    # the worst case, each coordinate just across a boundary, keeps the bound, but not on a coarser lattice
    for coarser, breaks in ((1, False), (64, True)):
        lattice = coarser * spacing
        first = torch.full((size,), (0.5 - 1e-9) * lattice, dtype=torch.float64)
        second = torch.full((size,), (0.5 + 1e-9) * lattice, dtype=torch.float64)
        second[0] += 1.0
        apart = (torch.round(second / lattice) - torch.round(first / lattice)) * lattice
        assert (apart.norm() > 1.0 + ROUNDING) == breaks


def test_the_result_is_the_rounded_sum_plus_noise_of_the_stated_scale():
    gradients = {"w": torch.randn(200, 300), "b": torch.full((3,), 5.0)}
    noisy = add_discrete_noise(gradients, stddev=2.0, sensitivity=1.0, source=SecureSource(), step=0)
    assert is_gaussian((noisy["w"] - gradients["w"]).double().numpy(), stddev=2.0)
    assert noisy["b"].shape == (3,)


def test_a_seeded_source_repeats_the_noise_and_uses_fresh_coins_within_a_call():
    first, second = (discrete_gaussian(5000, stddev=3, source=SeededSource(2), step=1) for _ in range(2))
    assert torch.equal(first, second)
    assert chi_square(first.numpy(), 3) < 6
    assert not torch.equal(first, discrete_gaussian(5000, stddev=3, source=SeededSource(2), step=2))


def test_sums_that_noise_cannot_hide_are_refused():
    for value in (math.nan, math.inf, 1e300):
        with pytest.raises(PrivacyError, match="non-finite-sum"):
            add_discrete_noise(
                {"w": torch.tensor([value], dtype=torch.float64)},
                stddev=1.0,
                sensitivity=1.0,
                source=SecureSource(),
                step=0,
            )
    with pytest.raises(ConfigError, match="noise-out-of-range"):
        discrete_gaussian(3, stddev=0, source=SecureSource(), step=0)
