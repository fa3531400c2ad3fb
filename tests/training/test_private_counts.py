"""Noisy counts: what a unit can move, how large the noise is, and that no release goes uncounted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gaussianity import is_gaussian
from sfumato.accounting import SampledGaussian
from sfumato.data import ImageSet
from sfumato.errors import PrivacyError
from sfumato.privacy.plan import Plan
from sfumato.randomness import SeededSource
from sfumato.training.inputs import Units
from sfumato.training.private_counts import (
    NUM_BINS,
    PrivateRelease,
    check_counted,
    exact_counts,
    finding_shares,
    finding_thresholds,
    noisy_counts,
    prior_of_counts,
    score_cells,
    threshold_of_histogram,
)


def units_of(labels, patients):
    images = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()
    data = ImageSet(images, torch.tensor(labels), ("a", "b", "c"), torch.tensor(patients), "cells")
    return Units.patients(data, max_images=4)


def test_a_patient_moves_the_counts_by_at_most_one_however_many_images_they_have():
    others, number = [0, 1, 2, 0], [0, 1, 2, 3]
    random = np.random.default_rng(0)
    without = exact_counts(torch.tensor(others), 3, units_of(others, number))
    for size in (1, 2, 30, 100):
        labels = [*others, *random.integers(0, 3, size).tolist()]
        units = units_of(labels, number + [9] * size)
        moved = exact_counts(torch.tensor(labels), 3, units) - without
        assert 0 < moved.norm() <= 1 + 1e-9
        assert moved.sum() == pytest.approx(1)
        images = Units.images(units.data)  # the control: counted by image, the same patient moves it further
        assert size == 1 or (exact_counts(torch.tensor(labels), 3, images) - without).norm() > 1


def test_what_a_patient_moves_is_exact_whoever_else_is_counted():
    random = np.random.default_rng(0)
    patients = [number for number in range(300) for _ in range(number % 7 + 1)]
    labels = random.integers(0, 3, len(patients)).tolist()
    for size in (3, 7, 10, 49):
        seen = random.integers(0, 3, size).tolist()
        alone = exact_counts(torch.tensor(seen), 3, units_of(seen, [0] * size))
        without = exact_counts(torch.tensor(labels), 3, units_of(labels, patients))
        together = units_of([*seen, *labels], [-1] * size + patients)  # counted before all others
        moved = exact_counts(torch.tensor([*seen, *labels]), 3, together) - without
        assert torch.equal(moved, alone)
        assert float(moved.sum()) <= 1


def test_the_noise_of_the_counts_has_the_stated_scale():
    units = units_of([0, 1, 2], [0, 1, 2])
    cells = torch.tensor([0, 1, 2])
    release = PrivateRelease(what="class counts", noise_multiplier=20.0)
    found = torch.stack(
        [
            noisy_counts(cells, 1000, units, release, source=SeededSource(seed))
            - exact_counts(cells, 1000, units)
            for seed in range(20)
        ]
    )
    assert is_gaussian(found.flatten().numpy(), stddev=20.0)
    assert not is_gaussian(found.flatten().numpy(), stddev=21.0)


def test_findings_are_counted_each_by_itself_and_the_noise_grows_with_the_root_of_their_number():
    patients, random = [0, 1, 2, 3, *[9] * 6], np.random.default_rng(1)
    owners = units_of([0] * 10, patients)
    cells = torch.tensor(random.integers(0, 2, (10, 4)))
    without = exact_counts(cells[:4], 2, units_of([0] * 4, patients[:4]))
    moved = exact_counts(cells, 2, owners) - without
    assert all(part.sum() == pytest.approx(1) for part in moved.split(2))  # the patient, once per finding
    assert moved.norm() <= 2
    assert moved.norm() > 1  # the control: noise for one finding would be too little
    release = PrivateRelease(what="class counts", noise_multiplier=5.0)
    wide = torch.zeros(10, 4, dtype=torch.int64)
    exact = exact_counts(wide, 1000, owners)
    found = [noisy_counts(wide, 1000, owners, release, source=SeededSource(s)) - exact for s in range(5)]
    assert is_gaussian(torch.cat(found).numpy(), stddev=10.0)
    assert not is_gaussian(torch.cat(found).numpy(), stddev=5.0)


def test_thresholds_of_findings_follow_their_own_histograms():
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(6000, 2, generator=generator) < torch.tensor([0.5, 0.1])
    log_odds = torch.randn(6000, 2, generator=generator) + 2 * truth - torch.tensor([1.0, 3.0])
    data = ImageSet(torch.zeros(6000, 1, 2, 2, dtype=torch.uint8), torch.zeros(6000).long(), ("a",), None, "")
    release = PrivateRelease(what="score histogram", noise_multiplier=3.0)
    cells = score_cells(log_odds, truth)
    noisy = noisy_counts(cells, 2 * NUM_BINS, Units.images(data), release, source=SeededSource(0)).tolist()
    first, second = np.log(finding_thresholds(noisy, 3.0)) - np.log1p(
        -np.array(finding_thresholds(noisy, 3.0))
    )
    assert first == pytest.approx(0.0, abs=0.6)
    assert second == pytest.approx(-2.0, abs=0.6)  # half way between those without it at -3, with it at -1
    counts = noisy_counts(truth.long(), 2, Units.images(data), release, source=SeededSource(0)).tolist()
    assert finding_shares(counts, 3.0) == pytest.approx((0.5, 0.1), abs=0.02)


def test_a_release_that_the_plan_does_not_count_is_refused():
    counts = PrivateRelease(what="class counts", noise_multiplier=20.0)
    scores = PrivateRelease(what="score histogram", noise_multiplier=20.0)
    settings = {
        "num_examples": 1000,
        "batch_size": 100,
        "num_steps": 10,
        "noise_multiplier": 2.0,
        "delta": 1e-4,
    }
    one = Plan(**settings, extra_events=(SampledGaussian(noise_multiplier=20.0),))
    check_counted(one, [counts])
    for plan, releases in ((Plan(**settings), [counts]), (one, [counts, scores])):
        with pytest.raises(PrivacyError, match="uncounted-release"):
            check_counted(plan, releases)
    assert one.epsilon > Plan(**settings).epsilon


def test_shares_from_noisy_counts_are_shares_even_where_noise_hides_a_class():
    assert prior_of_counts([300.0, 100.0], 20.0) == pytest.approx((0.75, 0.25))
    assert prior_of_counts([300.0, -15.0], 20.0) == pytest.approx((300 / 320, 20 / 320))
    assert prior_of_counts([0.0, 0.0], 0.0) == pytest.approx((0.5, 0.5))


def test_a_threshold_from_a_noisy_histogram_is_near_the_best_one():
    random = np.random.default_rng(3)
    positive = torch.from_numpy(random.random(3000) < 0.3)
    log_odds = torch.from_numpy(random.normal(size=3000)) + torch.where(positive, 2.2, -0.2)
    units = units_of([0] * 3000, list(range(3000)))
    cells = score_cells(log_odds, positive)
    assert int(cells.min()) >= 0
    assert int(cells.max()) < 2 * NUM_BINS

    def balanced(threshold):
        called = log_odds.sigmoid() >= threshold
        return (
            (called & positive).sum() / positive.sum() + (~called & ~positive).sum() / (~positive).sum()
        ) / 2

    best = max(balanced(t) for t in np.linspace(0.05, 0.95, 181))
    release = PrivateRelease(what="score histogram", noise_multiplier=8.0)
    for seed in range(10):
        noisy = noisy_counts(cells, 2 * NUM_BINS, units, release, source=SeededSource(seed))
        assert balanced(threshold_of_histogram(noisy.tolist(), 8.0)) > best - 0.02
    assert balanced(0.5) < best - 0.02  # doing nothing is worse


def test_scores_beyond_all_bounds_are_counted_at_the_ends_of_the_histogram():
    scores = torch.tensor(
        [float("nan"), -float("inf"), -1e300, 5.99, 1e300, float("inf")], dtype=torch.float64
    )
    cells = score_cells(scores, torch.tensor([0, 0, 0, 0, 1, 1]))
    last = NUM_BINS - 1
    assert cells.tolist() == [0, 0, 0, last, NUM_BINS + last, NUM_BINS + last]
