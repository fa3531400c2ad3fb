"""Bounds from many trainings: right as often as they say, on scores of known privacy, and close to it."""

from __future__ import annotations

import math
import time
from functools import partial

import numpy as np
import pytest
from scipy import stats

from sfumato.audit import clopper_pearson_bound, epsilon_of_mu, gaussian_scores_bound, gdp_bound
from sfumato.audit.bounds import epsilon_of_errors, mu_of_errors
from sfumato.audit.intervals import lower_rate, rate_interval, upper_rate
from sfumato.audit.thresholds import bounds_at, simultaneous_bounds
from sfumato.errors import ConfigError, DataError
from simulated import CONFIDENCE, REPETITIONS, allowed_misses, gaussian_sides, response_sides

DELTA = 1e-2  # large, so that the bound of ε has a chance to reach the truth, and to miss it
CHOICES = ("split", "bonferroni", 0.5)
METHODS = {
    **{f"clopper-pearson {choice}": partial(clopper_pearson_bound, threshold=choice) for choice in CHOICES},
    **{f"gdp {choice}": partial(gdp_bound, threshold=choice) for choice in CHOICES},
    "gaussian": gaussian_scores_bound,
    "gaussian, known": partial(gaussian_scores_bound, known_stddev=1.0),
}


def misses(
    method, draw, truth: float, repetitions: int = REPETITIONS, confidence: float = CONFIDENCE, **options
) -> int:
    """How often the bound exceeds the truth."""
    random = np.random.default_rng(5)
    return sum(
        method(*draw(random), confidence=confidence, **options).epsilon > truth + 1e-6
        for _ in range(repetitions)
    )


def best_threshold(scores_in, scores_out, *, delta, confidence):
    """What an auditor must not do: the best of all thresholds at the confidence of one."""
    tried = bounds_at(scores_in, scores_out, np.union1d(scores_in, scores_out), 1 - confidence)
    best = tried.thresholds[tried.best(mu_of_errors)]
    return gdp_bound(scores_in, scores_out, delta=delta, confidence=confidence, threshold=best)


@pytest.mark.parametrize(("mu", "number"), [(0.0, 2), (0.0, 60), (1.0, 3), (1.0, 200), (3.0, 40)])
@pytest.mark.parametrize("name", METHODS)
def test_a_bound_exceeds_the_truth_no_more_often_than_it_says(name: str, mu: float, number: int) -> None:
    draw = partial(gaussian_sides, mu=mu, number=number)
    assert misses(METHODS[name], draw, epsilon_of_mu(mu, DELTA), delta=DELTA) <= allowed_misses()


def test_the_best_threshold_without_correction_exceeds_it_too_often() -> None:
    for mu in (0.0, 1.0):
        draw = partial(gaussian_sides, mu=mu, number=200)
        truth = epsilon_of_mu(mu, 1e-5)
        assert misses(best_threshold, draw, truth, delta=1e-5) > allowed_misses() + 100
        for honest in ("split", "bonferroni"):
            method = partial(gdp_bound, threshold=honest)
            assert misses(method, draw, truth, delta=1e-5) <= allowed_misses()


@pytest.mark.parametrize("choice", ["split", "bonferroni", 1.0])
@pytest.mark.parametrize("number", [1, 5, 300])
def test_bounds_hold_on_scores_of_two_values(choice, number: int) -> None:
    if choice == "split" and number == 1:
        pytest.skip("no half to choose on")
    method = partial(clopper_pearson_bound, threshold=choice)
    draw = partial(response_sides, epsilon=1.0, number=number)
    assert misses(method, draw, 1.0, delta=0.0) <= allowed_misses()


@pytest.mark.parametrize("method", [gdp_bound, partial(gdp_bound, threshold="split")])
def test_gdp_shows_nothing_on_scores_that_are_alike_or_the_wrong_way_round(method) -> None:
    draw = partial(gaussian_sides, mu=0.0, number=500)
    for confidence in (CONFIDENCE, 0.95):
        found = misses(method, draw, 0.0, confidence=confidence, delta=1e-5)
        assert found <= allowed_misses(miss=1 - confidence)
    random = np.random.default_rng(0)
    scores_in, scores_out = gaussian_sides(random, -3.0, 500)
    assert method(scores_in, scores_out, delta=1e-5).epsilon == 0
    assert method(scores_out, scores_in, delta=1e-5).epsilon > 5  # the same scores, the right way round


def test_delta_is_taken_off_before_anything_is_claimed() -> None:
    def named(random):  # with probability 0.3 the canary is named outright, else nothing: exactly (0, 0.3)-DP
        scores_in, scores_out = gaussian_sides(random, 0.0, 200)
        return np.where(random.random(200) < 0.3, 10.0, scores_in), scores_out

    for choice in ("split", "bonferroni", 5.0):
        method = partial(clopper_pearson_bound, threshold=choice)
        assert misses(method, named, 0.0, 300, delta=0.3) <= allowed_misses(300)
        assert misses(method, named, 0.0, 300, delta=0.0) > 250


def test_bounds_at_all_candidates_hold_together_with_ties_too() -> None:
    random = np.random.default_rng(8)
    for levels, limit in ((math.inf, 64), (math.inf, None), (4, None)):
        failed = 0
        for _ in range(REPETITIONS):
            scores = random.random((2, 80))
            scores = scores if levels == math.inf else np.floor(scores * levels)
            bounds = simultaneous_bounds(*scores, 1 - CONFIDENCE, limit)
            # The share of uniform (or of `levels` equally likely) scores that is at least t, and below it.
            below = bounds.thresholds if levels == math.inf else np.ceil(bounds.thresholds) / levels
            failed += bool(np.any(1 - below > bounds.fpr_upper) or np.any(below > bounds.fnr_upper))
        assert failed <= allowed_misses()


@pytest.mark.parametrize("number", [2, 6, 100])
def test_the_bound_for_gaussian_scores_is_exact(number: int) -> None:
    draw = partial(gaussian_sides, mu=2.0, number=number)
    for name in ("gaussian", "gaussian, known"):
        missed = misses(METHODS[name], draw, epsilon_of_mu(2.0, DELTA), delta=DELTA)
        assert stats.binomtest(missed, REPETITIONS, 1 - CONFIDENCE).pvalue > 1e-5  # neither more nor fewer


def test_a_known_stddev_that_is_wrong_falsifies_the_bound() -> None:
    method = partial(gaussian_scores_bound, known_stddev=0.5)
    draw = partial(gaussian_sides, mu=1.0, number=50)
    assert misses(method, draw, epsilon_of_mu(1.0, DELTA), 200, delta=DELTA) > 150


def test_with_many_scores_the_bounds_come_close_to_the_truth_within_a_second() -> None:
    random = np.random.default_rng(1)
    scores = gaussian_sides(random, 1.0, 100_000)
    truth = epsilon_of_mu(1.0, 1e-5)
    for choice in ("split", "bonferroni"):
        begin = time.perf_counter()
        assert 0.93 * truth < gdp_bound(*scores, delta=1e-5, threshold=choice).epsilon <= truth
        found = clopper_pearson_bound(*scores, delta=1e-5, threshold=choice)
        assert time.perf_counter() - begin < 2  # two bounds
        # A count of 100,000 cannot show rates far below 1e-5, where a Gaussian's ε at this δ comes from.
        assert 0.5 * truth < found.epsilon < truth < found.ceiling
        binary = clopper_pearson_bound(*response_sides(random, 2.0, 100_000), delta=0.0, threshold=choice)
        assert 1.94 < binary.epsilon <= 2.0
    assert 0.97 * truth < gaussian_scores_bound(*scores, delta=1e-5).epsilon <= truth
    every = clopper_pearson_bound(*(side[:5000] for side in scores), delta=1e-5,
                                  threshold="bonferroni", max_candidates=None)  # fmt: skip
    few = clopper_pearson_bound(*(side[:5000] for side in scores), delta=1e-5, threshold="bonferroni")
    assert 0 < every.epsilon < few.epsilon  # more candidates than are needed cost more than they find


def test_the_ceiling_is_what_separated_scores_show_and_nothing_shows_more() -> None:
    apart = np.arange(100.0) + 1000, np.arange(100.0)
    for method in (clopper_pearson_bound, gdp_bound):
        for choice in ("split", "bonferroni", 500.0):
            bound = method(*apart, delta=1e-5, threshold=choice)
            assert bound.epsilon == pytest.approx(bound.ceiling)
            assert bound.ceiling > 0
            near = method(apart[0] - 950, apart[1], delta=1e-5, threshold=choice if choice != 500.0 else 75.0)
            assert near.epsilon < near.ceiling == pytest.approx(bound.ceiling)


def test_both_roles_of_the_errors_count() -> None:
    # No false negatives but half of the others taken for members: only 1 - FPR against FNR shows it.
    scores_in, scores_out = np.ones(1000), np.arange(1000) % 2 * 1.0
    bound = clopper_pearson_bound(scores_in, scores_out, delta=0.0, threshold=0.5)
    swapped = clopper_pearson_bound(-scores_out, -scores_in, delta=0.0, threshold=-0.5)
    assert bound.epsilon == pytest.approx(swapped.epsilon)
    assert bound.epsilon > 4


def test_the_result_says_what_it_was_made_of() -> None:
    scores = gaussian_sides(np.random.default_rng(2), 2.0, 101)
    split = partial(clopper_pearson_bound, delta=1e-3, confidence=0.99, threshold="split")
    bound = split(*scores)
    assert bound.num_in == bound.num_out == 51  # the half that judges
    assert bound == split(*scores)  # the same halves again
    written = bound.as_dict()
    assert written["confidence"] == 0.99
    assert written["threshold_choice"] == "split"
    rates = np.array([bound.fpr_upper]), np.array([bound.fnr_upper])
    assert bound.epsilon == epsilon_of_errors(*rates, 1e-3)[0]
    gdp = gdp_bound(*scores, delta=1e-3, threshold=1.0)
    assert gdp.mu == mu_of_errors(np.array([gdp.fpr_upper]), np.array([gdp.fnr_upper]))[0]
    assert gdp.epsilon == epsilon_of_mu(gdp.mu, 1e-3)


def test_the_order_of_the_scores_does_not_matter_for_validity() -> None:
    def ordered(random):
        scores_in, scores_out = gaussian_sides(random, 0.0, 100)
        return np.sort(scores_in), np.sort(scores_out)[::-1]  # halves by position would be far apart

    assert misses(partial(gdp_bound, threshold="split"), ordered, 0.0, delta=1e-5) <= allowed_misses()


def test_rates_are_clopper_and_pearsons() -> None:
    for successes, trials in ((0, 1), (1, 1), (0, 50), (3, 50), (50, 50), (40, 1000)):
        exact = stats.binomtest(successes, trials).proportion_ci(0.98, method="exact")
        assert rate_interval(successes, trials, 0.02) == pytest.approx((exact.low, exact.high), abs=1e-9)
    assert upper_rate(0, 10, 0.05) == pytest.approx(1 - 0.05**0.1)
    assert lower_rate(10, 10, 0.05) == pytest.approx(0.05**0.1)


@pytest.mark.parametrize("method", [clopper_pearson_bound, gdp_bound, gaussian_scores_bound])
def test_scores_and_settings_that_cannot_be_meant_are_refused(method) -> None:
    good = np.arange(4.0)
    for bad in (np.array([1.0, np.nan]), [np.inf, 0.0], np.zeros((2, 2)), ["a", "b"], [[1.0], [1.0, 2.0]]):
        for sides in ((bad, good), (good, bad)):
            with pytest.raises(DataError, match="bad-scores"):
                method(*sides, delta=1e-5)
    with pytest.raises(DataError, match="too-few-scores"):
        method([], good, delta=1e-5)
    for confidence in (0.0, 0.4, 1.0, 95, math.nan):
        with pytest.raises(ConfigError, match="confidence-out-of-range"):
            method(good, good, delta=1e-5, confidence=confidence)
    for delta in (-1e-9, 1.0, math.nan):
        with pytest.raises(ConfigError, match="delta-out-of-range"):
            method(good, good, delta=delta)


def test_thresholds_and_deviations_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(DataError, match="too-few-scores"):
        gdp_bound([1.0], [0.0], delta=1e-5, threshold="split")
    with pytest.raises(DataError, match="too-few-scores"):
        gaussian_scores_bound([1.0], [0.0], delta=1e-5)
    for threshold in ("best", math.nan, math.inf):
        with pytest.raises(ConfigError, match="bad-threshold"):
            gdp_bound([1.0], [0.0], delta=1e-5, threshold=threshold)
    for stddev in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="bad-known-stddev"):
            gaussian_scores_bound([1.0, 2.0], [0.0, 1.0], delta=1e-5, known_stddev=stddev)


@pytest.mark.parametrize("choice", ["bonferroni", 0.5])
def test_a_single_score_a_side_and_constant_scores_show_nothing(choice) -> None:
    for method in (clopper_pearson_bound, gdp_bound):
        assert method([1.0], [0.0], delta=1e-5, threshold=choice).epsilon == 0
        assert method(np.ones(50), np.ones(50), delta=1e-5, threshold=choice).epsilon == 0
        assert method(np.ones(50), np.ones(50), delta=1e-5, threshold="split").epsilon == 0
    assert gaussian_scores_bound(np.ones(5), np.zeros(5), delta=1e-5).epsilon == 0  # no spread, no Gaussian
    assert gaussian_scores_bound([9.0], [0.0], delta=1e-5, known_stddev=1.0).mu > 6


def test_epsilon_of_mu_is_the_accountants() -> None:
    from sfumato.accounting.gaussian import GaussianCurve

    for mu in (0.01, 0.3, 1.0, 5.0, 30.0):
        for delta in (1e-10, 1e-5, 0.01):
            expected = max(0.0, GaussianCurve(mu).epsilon(delta))
            assert epsilon_of_mu(mu, delta) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert epsilon_of_mu(0.0, 1e-5) == 0
