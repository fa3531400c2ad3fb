"""ROC, AUC, TPR at a low FPR, advantage and total variation against slow references; intervals that hold."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from scipy import stats

from sfumato.audit import (
    auc,
    bootstrap,
    gaussian_total_variation,
    largest_advantage,
    membership_advantage,
    roc_curve,
    score_histogram,
    tpr_at_fpr,
)
from sfumato.errors import ConfigError, DataError
from simulated import REPETITIONS, allowed_misses, gaussian_sides

TIED = np.array([3.0, 1.0, 2.0, 2.0]), np.array([2.0, 0.0, 1.0])


def test_auc_is_the_share_of_ordered_pairs_with_ties_half() -> None:
    scores_in, scores_out = TIED
    pairs = [(a > b) + 0.5 * (a == b) for a in scores_in for b in scores_out]
    assert auc(*TIED).value == pytest.approx(np.mean(pairs))
    curve = roc_curve(*TIED)
    area = np.diff(curve.fpr) @ (curve.tpr[1:] + curve.tpr[:-1]) / 2
    assert area == pytest.approx(np.mean(pairs))
    assert auc(scores_out, scores_in).value == pytest.approx(1 - np.mean(pairs))


@pytest.mark.parametrize("decimals", [None, 0])
def test_aucs_interval_holds_the_truth_about_as_often_as_it_says(decimals: int | None) -> None:
    random = np.random.default_rng(0)
    truth = stats.norm.cdf(1 / math.sqrt(2))
    if decimals is not None:  # of rounded scores
        cells = np.arange(-12, 14)
        mass = [np.diff(stats.norm.cdf(np.append(cells, 14) - 0.5 - mean)) for mean in (1, 0)]
        truth = sum(mass[0] * (np.cumsum(mass[1]) - mass[1] / 2))
    missed = {200: 0, 12: 0}
    for number in missed:
        for _ in range(REPETITIONS):
            scores = gaussian_sides(random, 1.0, number)
            scores = scores if decimals is None else tuple(side.round(decimals) for side in scores)
            estimate = auc(*scores, confidence=0.9)
            missed[number] += not estimate.lower <= truth <= estimate.upper
    assert stats.binomtest(missed[200], REPETITIONS, 0.1).pvalue > 1e-4
    assert missed[12] < 200  # asymptotic: up to twice the nominal with a dozen scores


def test_auc_without_a_variance_has_an_interval_that_still_holds() -> None:
    apart = auc(np.arange(10.0) + 50, np.arange(10.0), confidence=0.9)
    assert (apart.value, apart.upper, apart.method) == (1.0, 1.0, "hoeffding")
    assert apart.lower == pytest.approx(1 - math.sqrt(math.log(20) / 20))
    assert auc([1.0], [0.0]).lower == 0
    assert auc(np.ones(5), np.ones(5)).value == 0.5


def test_the_roc_has_every_corner_and_points_for_logarithmic_axes() -> None:
    curve = roc_curve(*TIED)
    assert curve.fpr.tolist() == pytest.approx([0, 0, 1 / 3, 2 / 3, 1])
    assert curve.tpr.tolist() == pytest.approx([0, 0.25, 0.75, 1, 1])
    for threshold, fpr, tpr in zip(curve.thresholds, curve.fpr, curve.tpr, strict=True):
        assert ((TIED[0] >= threshold).mean(), (TIED[1] >= threshold).mean()) == pytest.approx((tpr, fpr))
    points = curve.points(3, lowest=0.25)
    assert np.array(points) == pytest.approx(np.array([(0.25, 0.25), (0.5, 0.75), (1.0, 1.0)]))


def test_tpr_at_fpr_counts_ties_as_reached_together() -> None:
    assert tpr_at_fpr(*TIED, 0.0).tpr == 0.25
    assert tpr_at_fpr(*TIED, 1 / 3).tpr == 0.75
    assert tpr_at_fpr(*TIED, 1.0).tpr == 1.0
    assert tpr_at_fpr(np.ones(4), np.ones(4), 0.5).tpr == 0.0  # a tie cannot be reached by half


@pytest.mark.parametrize("number", [5, 300])
def test_the_interval_of_tpr_and_the_bound_of_fpr_hold_at_the_threshold_used(number: int) -> None:
    random = np.random.default_rng(6)
    missed_tpr = missed_fpr = 0
    for _ in range(REPETITIONS):
        found = tpr_at_fpr(*gaussian_sides(random, 1.0, number), 0.05, confidence=0.6)
        missed_tpr += not found.tpr_lower <= stats.norm.sf(found.threshold - 1) <= found.tpr_upper
        missed_fpr += stats.norm.sf(found.threshold) > found.fpr_upper
    assert missed_tpr <= allowed_misses()
    assert missed_fpr <= allowed_misses()
    assert missed_fpr > 300  # the order statistic's bound is exact, not only cautious


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_the_interval_of_the_advantage_holds_for_the_test_used(threshold: float | None) -> None:
    random = np.random.default_rng(7)
    best = 2 * stats.norm.cdf(0.5) - 1  # of any threshold
    below = missed = 0
    for _ in range(REPETITIONS):
        found = membership_advantage(*gaussian_sides(random, 1.0, 60), confidence=0.6, threshold=threshold)
        below += found.lower > best
        missed += threshold is not None and not found.lower <= best <= found.upper
    assert below <= allowed_misses()
    assert missed <= allowed_misses()


def test_the_largest_advantage_is_reached_by_the_tightest_mechanism() -> None:
    for epsilon, delta in ((0.0, 0.0), (1.0, 0.0), (2.0, 0.1)):
        truth = math.exp(epsilon) / (1 + math.exp(epsilon))
        # With probability δ the answer is named, else it is randomised response.
        assert largest_advantage(epsilon, delta) == pytest.approx(delta + (1 - delta) * (2 * truth - 1))
    assert largest_advantage(5000.0, 0.0) == 1.0


@pytest.mark.parametrize(
    ("shift", "stddev"), [(1, 1), (0.5, 2), (0, 3), (-2, 0.3), (0, 1), (0.1, 1.0001), (1e-3, 1 + 1e-9)]
)
def test_total_variation_of_fitted_gaussians_is_the_integral(shift: float, stddev: float) -> None:
    standard = np.array([-1.0, 0.0, 1.0])  # mean 0, standard deviation 1
    found = gaussian_total_variation(shift + stddev * standard, standard)
    grid = np.linspace(-30, 30, 600_001)
    densities = stats.norm.pdf(grid, shift, stddev) - stats.norm.pdf(grid)
    assert found == pytest.approx(np.abs(densities).sum() * (grid[1] - grid[0]) / 2, abs=1e-6)


def test_total_variation_without_spread() -> None:
    assert gaussian_total_variation([1.0, 1.0], [1.0, 1.0]) == 0
    assert gaussian_total_variation([1.0, 1.0], [2.0, 2.0]) == 1
    assert gaussian_total_variation([1.0, 1.0], [1.0, 2.0]) == 1
    with pytest.raises(DataError, match="too-few-scores"):
        gaussian_total_variation([1.0], [1.0, 2.0])


def test_the_bootstrap_agrees_with_delong_on_many_scores() -> None:
    scores = gaussian_sides(np.random.default_rng(9), 1.0, 300)
    spread = bootstrap(lambda *sides: auc(*sides).value, *scores, num_resamples=400)
    exact = auc(*scores)
    assert spread.value == exact.value
    assert (spread.lower, spread.upper) == pytest.approx((exact.lower, exact.upper), abs=0.01)
    assert spread == bootstrap(lambda *sides: auc(*sides).value, *scores, num_resamples=400)
    with pytest.raises(ConfigError, match="bad-resamples"):
        bootstrap(lambda *sides: 0.0, *scores, num_resamples=0)


def test_histograms_share_their_bins_and_count_everything() -> None:
    counted = score_histogram(*TIED, num_bins=3)
    assert len(counted["edges"]) == 4
    assert sum(counted["num_in"]) == 4
    assert counted["num_out"] == [1, 1, 1]
    assert sum(score_histogram([2.0], [2.0])["num_in"]) == 1


def test_a_hundred_thousand_scores_take_less_than_a_second_each() -> None:
    scores = gaussian_sides(np.random.default_rng(1), 1.0, 100_000)
    for function in (auc, roc_curve, membership_advantage, lambda *sides: tpr_at_fpr(*sides, 1e-3)):
        begin = time.perf_counter()
        function(*scores)
        assert time.perf_counter() - begin < 1


@pytest.mark.parametrize("function", [auc, roc_curve, membership_advantage, score_histogram])
def test_scores_that_cannot_be_meant_are_refused(function) -> None:
    with pytest.raises(DataError, match="bad-scores"):
        function([np.nan], [1.0])
    with pytest.raises(DataError, match="too-few-scores"):
        function([1.0], [])
    for fpr in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match="bad-rate"):
            tpr_at_fpr([1.0], [0.0], fpr)
