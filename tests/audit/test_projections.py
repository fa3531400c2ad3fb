"""White-box scores: likelihood ratios of what is left when the real units' courses are taken out."""

from __future__ import annotations

import numpy as np
import pytest

from sfumato.audit import auc, one_run_gdp_bound
from sfumato.audit.mechanism import log_likelihood_ratio
from sfumato.audit.one_run_sampled import one_run_plan_bound
from sfumato.audit.projections import (
    measure,
    measured_noise,
    measured_rate,
    projection_scores,
    repeated_noise,
    without_interference,
)
from sfumato.privacy.plan import Plan

RATE, NOISE, STEPS, CANARIES, MISS = 0.2, 1.5, 60, 1000, 1e-3


def simulated(random, *, rate=RATE, noise=NOISE, interference=0.0):
    """Projections of canaries, in by coins, under real gradients that decay and under noise."""
    coins = random.random(CANARIES) < 0.5
    seen = random.normal(0, noise, (STEPS, CANARIES))
    seen += (random.random((STEPS, CANARIES)) < rate) * coins
    course = np.exp(-np.arange(STEPS) / 15)[:, None]
    return seen + interference * course * random.normal(0, 1, CANARIES), coins


def area(scores, coins):
    return auc(scores[coins], scores[~coins]).value


def test_without_real_units_the_score_is_the_likelihood_ratio():
    seen, _ = simulated(np.random.default_rng(0))
    assert np.array_equal(without_interference(seen, sampling_rate=RATE, noise_multiplier=NOISE), seen)
    scores = projection_scores(seen, sampling_rate=RATE, noise_multiplier=NOISE)
    assert np.array_equal(scores, log_likelihood_ratio(seen.T, sampling_rate=RATE, noise_multiplier=NOISE))


@pytest.mark.parametrize("rate", [RATE, 1.0])
def test_courses_of_real_units_are_taken_out_and_the_canaries_stay(rate):
    random = np.random.default_rng(1)
    loud, coins = simulated(random, rate=rate, interference=10.0)
    clean, clean_coins = simulated(random, rate=rate)
    given = {"sampling_rate": rate, "noise_multiplier": NOISE}
    best = area(projection_scores(clean, **given), clean_coins)
    found = area(projection_scores(loud, **given), coins)
    naive = area(log_likelihood_ratio(loud.T, **given), coins)
    assert found > best - 0.06
    assert naive < best - 0.15  # what is gained


def test_the_noise_is_never_measured_too_small():
    random, below = np.random.default_rng(2), 0
    for _ in range(300):
        sample = random.normal(0, NOISE, (5, 40))
        below += measured_noise(sample, MISS)[1] < NOISE
        measured, upper = measured_noise(sample + 1.0, MISS)  # real units
        assert measured < upper
    assert below <= 4  # 0.3 expected at 99.9 %
    assert measured_noise(random.normal(0, NOISE / 2, (20, 200)), MISS)[1] < NOISE


def test_the_rate_is_not_measured_above_the_plans_and_a_doubled_one_is_seen():
    random, above = np.random.default_rng(5), 0
    for _ in range(100):
        seen, coins = simulated(random, interference=1.0)
        rate, lower = measured_rate(seen, coins, MISS)
        assert lower < rate
        above += lower > RATE
    assert above <= 2  # 0.1 expected at 99.9 %
    seen, coins = simulated(random, rate=2 * RATE, interference=1.0)
    assert measured_rate(seen, coins, MISS)[1] > RATE


def test_noise_that_comes_twice_is_seen_and_noise_that_does_not_is_not():
    random = np.random.default_rng(6)
    seen = random.normal(0, NOISE, (40, 300))
    assert repeated_noise(seen, NOISE, MISS) == 0
    assert repeated_noise(seen + random.normal(0, 3, (40, 1)), NOISE, MISS) == 0  # real units
    again = seen.copy()
    again[[7, 30]] = seen[3] + 0.1
    assert repeated_noise(again, NOISE, MISS) == 2


def test_real_gradients_that_follow_earlier_noise_are_not_taken_for_a_repetition():
    random = np.random.default_rng(7)
    seen = random.normal(0, NOISE, (40, 300))
    seen[9] += seen[3]  # all of an earlier step's noise comes back in the real units' gradients
    assert repeated_noise(seen, NOISE, MISS) == 0
    assert np.square(seen[9] - seen[3]).sum() < 0.7 * 300 * 2 * NOISE**2  # nearer than two draws ever are


def test_the_rate_counts_only_where_no_real_gradient_can_follow_a_canary():
    random = np.random.default_rng(8)
    seen, coins = simulated(random)
    drawn = seen.copy()
    drawn[:, coins] += 0.3  # a ridge of the loss, down which real gradients follow every canary that is in
    given = {"noise_multiplier": NOISE, "failure_probability": MISS}
    assert measure(drawn, coins, silent=True, **given).rate_lower > RATE  # what would be called a violation
    assert measure(drawn, coins, silent=False, **given).rate_lower is None
    assert measure(seen, coins, silent=True, **given).rate_lower < RATE


def test_the_bound_of_a_plan_exceeds_the_truth_no_more_often_than_it_says():
    """Scores of the plan's own mechanism, the best there are, at a confidence that would show a mistake."""
    plan = Plan.calibrate(
        epsilon=2.0, delta=1e-3, num_examples=100, batch_size=20, num_steps=10, sampling="poisson"
    )
    random, above, halved, found = np.random.default_rng(3), 0, 0, []
    for number in range(10):
        for factor in (1.0, 0.4) if number < 2 else (1.0,):
            coins = random.random(500) < 0.5
            seen = random.normal(0, factor * plan.noise_multiplier, (500, 10))
            seen += (random.random((500, 10)) < plan.sampling_rate) * coins[:, None]
            scores = log_likelihood_ratio(
                seen, sampling_rate=plan.sampling_rate, noise_multiplier=plan.noise_multiplier
            )
            bound = one_run_plan_bound(scores[coins], scores[~coins], plan=plan, confidence=0.6)
            if factor == 1.0:
                found.append(bound.epsilon)
                above += bound.epsilon > plan.epsilon
            else:
                halved += bound.epsilon > plan.epsilon
    assert above <= 7  # 40 % of 10 allowed, and 2 standard deviations
    assert np.mean(found) > 0.5
    assert halved == 2  # less than half the noise is always seen


def test_full_batches_are_gaussian_and_null_scores_show_nothing():
    random = np.random.default_rng(4)
    plan = Plan.calibrate(epsilon=2.0, delta=1e-5, num_examples=100, num_steps=5, sampling="full")
    inner, outer = random.normal(1, 1, 300), random.normal(0, 1, 300)
    bound = one_run_plan_bound(inner, outer, plan=plan)
    assert bound == one_run_gdp_bound(inner, outer, delta=1e-5)
    sampled = Plan.calibrate(epsilon=2.0, delta=1e-3, num_examples=100, batch_size=20, num_steps=5)
    for each in (plan, sampled):
        scores = random.normal(0, 1, 600)
        assert one_run_plan_bound(scores[:300], scores[300:], plan=each).epsilon == 0
