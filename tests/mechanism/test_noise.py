"""Noise: its law at ten million samples, its scale, its lattice, and the attack that the lattice stops."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats

from gaussianity import deviations, is_gaussian
from sfumato.errors import ConfigError, PrivacyError
from sfumato.noise import add_noise, gaussian, lattice_spacing
from sfumato.randomness import SecureSource, SeededSource

TEN_MILLION = 10_000_000


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Many small parallel pieces wait for one another when other processes hold the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def large_sample(one_thread) -> np.ndarray:
    return gaussian(TEN_MILLION, stddev=2.5, source=SecureSource(), step=0).numpy()


def test_ten_million_samples_pass_tests_of_normality_independence_and_tails(large_sample):
    found = deviations(large_sample, 2.5)
    assert max(found.values()) < 6, found


def test_the_tests_can_tell_other_laws_apart(large_sample):
    part = large_sample[:2_000_000]
    assert not is_gaussian(part, stddev=2.51)  # a scale 0.4 % off
    assert not is_gaussian(part + 0.01 * 2.5, stddev=2.5)  # a mean 1 % of a standard deviation off
    assert not is_gaussian(np.clip(part, -4 * 2.5, 4 * 2.5), stddev=2.5)  # a tail cut at 4
    assert not is_gaussian(np.repeat(part[: len(part) // 2], 2), stddev=2.5)  # every value twice
    assert not is_gaussian(np.concatenate([part, part]), stddev=2.5)  # a stream used again
    degrees = np.random.default_rng(0).standard_t(30, len(part)) / math.sqrt(30 / 28)
    assert not is_gaussian(degrees, stddev=1.0)


def test_the_far_tail_is_exact_where_no_sample_will_ever_reach():
    class Smallest(SeededSource):
        """A source whose words are chosen by the test: the first uniforms that can occur."""

        def __init__(self, word: int) -> None:
            super().__init__(0)
            self.word = word

        def random_bytes(self, count, *, purpose, step):
            words = np.zeros(count // 8, dtype=np.uint64)
            words[: len(words) // 2] = self.word
            return words.view(np.uint8)

    for word in (0, 1, 1000, 2**20, 2**40, 2**62):
        sample = gaussian(2, stddev=1.0, source=Smallest(word), step=0)
        assert sample[0].item() == pytest.approx(math.sqrt(-2 * math.log((word + 0.5) / 2**63)), rel=1e-14)
    assert gaussian(2, stddev=1.0, source=Smallest(0), step=0)[0] > 9.3
    assert torch.isfinite(gaussian(2, stddev=1.0, source=Smallest(2**63 - 1), step=0)).all()


def test_noise_reaches_every_coordinate_of_every_tensor_with_the_same_scale():
    gradients = {"a": torch.zeros(300, 400), "b": torch.zeros(7), "c": torch.zeros(60_000, 3)}
    noisy = add_noise(gradients, stddev=0.37, source=SecureSource(), step=1)
    assert is_gaussian(noisy["a"].double().numpy(), stddev=0.37)
    assert is_gaussian(noisy["c"].double().numpy(), stddev=0.37)
    assert (noisy["b"] != 0).all()
    assert not is_gaussian(noisy["a"].double().numpy(), stddev=0.38)
    joint = torch.cat([noisy["a"].flatten(), noisy["c"].flatten()[:120_000]]).double().numpy()
    assert is_gaussian(joint, stddev=0.37)  # the tensors' noise is independent: see lag "halves"


def test_noise_is_added_to_the_values_and_keeps_shape_and_dtype():
    gradients = {"w": torch.full((4, 5), 1000.0), "h": torch.full((3,), -8.0, dtype=torch.bfloat16)}
    noisy = add_noise(gradients, stddev=0.01, source=SecureSource(), step=0)
    assert noisy["w"].shape == (4, 5)
    assert noisy["h"].dtype == torch.bfloat16
    assert (noisy["w"] - 1000).abs().max() < 0.1
    assert (gradients["w"] == 1000).all()  # the private sum itself is left alone


def test_every_result_lies_on_the_public_lattice():
    value = {"w": torch.randn(100_000, dtype=torch.float64) / 3}
    spacing = lattice_spacing(0.3)
    assert spacing == 2.0**-18  # a power of two, near 0.3 / 65536
    noisy = add_noise(value, stddev=0.3, source=SecureSource(), step=0)["w"]
    assert torch.equal(torch.round(noisy / spacing), noisy / spacing)
    plain = value["w"] + gaussian(100_000, stddev=0.3, source=SecureSource(), step=0)
    assert not torch.equal(torch.round(plain / spacing), plain / spacing)


def reachable(results: torch.Tensor, candidate: float, *, stddev: float, spacing: float | None) -> float:
    """Share of results that noise could have made of ``candidate``: the attack of Mironov and of Jin et al.

    Box-Muller's sample is radius·cos(angle). With the angle's share known (here: zero, its most telling
    case) each radius comes from one 63-bit word, so whoever inverts it sees whether any word fits
    exactly.
    """
    hits = 0
    for result in results.tolist():
        noise = (result - candidate) / stddev
        word = round(math.exp(-noise * noise / 2) * 2**63 - 0.5)
        near = [(word + shift + 0.5) * 2.0**-63 for shift in range(-2, 3)]
        again = [
            candidate + math.copysign(math.sqrt(-2 * math.log(u)), noise) * stddev for u in near if 0 < u < 1
        ]
        if spacing is not None:
            again = [round(value / spacing) * spacing for value in again]
        hits += result in again
    return hits / len(results)


def test_the_floating_point_attack_works_on_bare_sums_and_fails_on_the_lattice():
    stddev, true, neighbour = 1.0, 0.0, 1.0 / 3.0
    # far out few words are left (about 2^26 beyond 7), so most floats there belong to no word at all
    words = SecureSource().random_bytes(8 * 400, purpose="noise", step=0).view(np.uint64) >> np.uint64(38)
    radius = np.sqrt(-2 * np.log((words.astype(np.float64) + 0.5) * 2.0**-63))
    bare = torch.from_numpy(true + radius * stddev)
    told = reachable(bare, true, stddev=stddev, spacing=None)
    not_told = reachable(bare, neighbour, stddev=stddev, spacing=None)
    assert told > 0.9
    assert not_told < 0.5  # the neighbour is ruled out by the low bits alone

    spacing = lattice_spacing(stddev)
    rounded = torch.round(bare / spacing) * spacing
    assert reachable(rounded, true, stddev=stddev, spacing=spacing) > 0.9
    assert reachable(rounded, neighbour, stddev=stddev, spacing=spacing) > 0.9


def test_noise_of_two_steps_and_two_sources_is_different():
    source = SecureSource()
    first, second = (gaussian(100, stddev=1.0, source=source, step=5) for _ in range(2))
    assert not torch.equal(first, second)  # a step that is done again after a crash gets fresh noise
    seeded = [gaussian(100, stddev=1.0, source=SeededSource(1), step=5) for _ in range(2)]
    assert torch.equal(*seeded)


@pytest.mark.parametrize("stddev", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_hides_nothing_is_refused(stddev):
    with pytest.raises(ConfigError, match="noise-out-of-range"):
        add_noise({"w": torch.zeros(3)}, stddev=stddev, source=SecureSource(), step=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sum_that_is_not_finite_is_refused(value):
    gradients = {"w": torch.tensor([1.0, value])}
    with pytest.raises(PrivacyError, match="non-finite-sum"):
        add_noise(gradients, stddev=1.0, source=SecureSource(), step=0)


def test_no_values_need_no_noise():
    assert add_noise({}, stddev=1.0, source=SecureSource(), step=0) == {}
    assert gaussian(0, stddev=1.0, source=SecureSource(), step=0).shape == (0,)
    assert gaussian((2, 3), stddev=1.0, source=SecureSource(), step=0).shape == (2, 3)


def test_noise_for_a_wide_resnet_costs_a_fraction_of_a_second():
    """2.75 million values: about 35 ms on one free core; the bound leaves room for a busy machine."""
    gradients = {"w": torch.zeros(2_753_818)}
    source, seconds = SecureSource(), []
    for step in range(5):
        began = time.perf_counter()
        add_noise(gradients, stddev=1.0, source=source, step=step)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.25, seconds


def test_the_oracle_knows_its_quantiles():
    exact = stats.norm.ppf((np.arange(1_000_000) + 0.5) / 1_000_000)
    sample = np.random.default_rng(3).permutation(exact)
    found = deviations(sample, 1.0)
    assert found["mean"] < 0.01
    assert found["variance"] < 0.1
