"""Bounds from one training: the theorems against exact games, and the confidence kept on scores."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from scipy import stats

from sfumato.accounting.gaussian import gaussian_delta
from sfumato.audit import (
    epsilon_of_mu,
    guess_grid,
    one_run_bound,
    one_run_epsilon,
    one_run_gdp_bound,
    one_run_mu,
)
from sfumato.audit.one_run import _gdp_refuted, one_run_p_value
from sfumato.errors import ConfigError, DataError
from simulated import CONFIDENCE, REPETITIONS, allowed_misses, coin_sides

DELTA = 1e-3
METHODS = {
    f"{method.__name__} {name}": partial(method, **options)
    for method in (one_run_bound, one_run_gdp_bound)
    for name, options in {
        "grid": {},
        "in": {"sides": "in"},
        "out": {"sides": "out"},
        "fixed": {"num_guesses": 4},
    }.items()
}


def misses(method, draw, truth: float, *, delta: float = DELTA, repetitions: int = REPETITIONS) -> int:
    random = np.random.default_rng(3)
    return sum(
        method(*draw(random), delta=delta, confidence=CONFIDENCE).epsilon > truth + 1e-5
        for _ in range(repetitions)
    )


@pytest.mark.parametrize(("mu", "canaries"), [(0.0, 4), (0.0, 100), (1.0, 10), (1.0, 100), (3.0, 40)])
@pytest.mark.parametrize("name", METHODS)
def test_a_bound_exceeds_the_truth_no_more_often_than_it_says(name: str, mu: float, canaries: int) -> None:
    draw = partial(coin_sides, mu=mu, canaries=canaries)
    assert misses(METHODS[name], draw, epsilon_of_mu(mu, DELTA)) <= allowed_misses()


@pytest.mark.parametrize("name", METHODS)
def test_tied_scores_do_not_tell_who_is_a_member(name: str) -> None:
    method = METHODS[name]
    tied = partial(coin_sides, mu=0.0, canaries=60, decimals=0)
    assert misses(method, tied, 0.0) <= allowed_misses()

    def constant(random):
        return tuple(np.ones(len(side)) for side in coin_sides(random, 0.0, 60))

    assert misses(method, constant, 0.0) <= allowed_misses()
    scores_in, scores_out = coin_sides(np.random.default_rng(0), 1.0, 600, decimals=0)
    shuffled = method(scores_in[::-1], np.sort(scores_out), delta=DELTA)
    assert shuffled == method(scores_in, scores_out, delta=DELTA)  # nor does the order that they are given in


def test_the_best_number_of_guesses_without_correction_exceeds_the_truth_too_often() -> None:
    def best(scores_in, scores_out, *, delta, confidence):
        tried = [
            one_run_bound(scores_in, scores_out, delta=delta, confidence=confidence, num_guesses=number)
            for number in guess_grid(len(scores_in) + len(scores_out))
        ]
        return max(tried, key=lambda bound: bound.epsilon)

    draw = partial(coin_sides, mu=0.0, canaries=800)
    assert misses(best, draw, 0.0, delta=0.0) > allowed_misses() + 100
    assert misses(one_run_bound, draw, 0.0, delta=0.0) <= allowed_misses()


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_without_delta_the_count_of_randomised_response_is_bounded_exactly(epsilon: float) -> None:
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    for correct in range(31):
        exact = stats.binom.sf(correct - 1, 30, truth)
        assert one_run_p_value(50, 30, correct, epsilon, 0.0) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("canaries", [1, 7, 60])
def test_both_theorems_allow_what_independent_gaussians_do(mu: float, canaries: int) -> None:
    # Every canary guessed by its own Gaussian: right with probability Φ(μ/2), independently.
    chance = stats.norm.cdf(mu / 2)
    for correct in range(1, canaries + 1):
        tail = stats.binom.sf(correct - 1, canaries, chance)
        for epsilon in (0.0, 0.5, 1.0, 2.0, 4.0):
            delta = gaussian_delta(epsilon, mu)
            assert one_run_p_value(canaries, canaries, correct, epsilon, delta) >= tail * (1 - 1e-9)
        assert not _gdp_refuted(canaries, canaries, correct, np.array([mu]), tail * (1 - 1e-9))[0]


def test_one_guess_on_one_canary_is_bounded_exactly_under_gdp() -> None:
    # At best it is right with probability Φ(μ/2): 0.9 is refuted below μ = 2 Φ⁻¹(0.9), and not above.
    edge = 2 * stats.norm.ppf(0.9)
    assert _gdp_refuted(1, 1, 1, np.array([edge - 1e-6, edge + 1e-6]), 0.9).tolist() == [True, False]


def test_an_output_that_names_everybody_with_probability_delta_is_allowed() -> None:
    # Exactly (0, δ)-DP, and then every guess is right.
    for canaries in (1, 10, 200):
        for delta in (0.01, 0.2):
            right = delta + (1 - delta) * 0.5**canaries
            assert one_run_p_value(canaries, canaries, canaries, 0.0, delta) >= right * (1 - 1e-9)
    assert one_run_p_value(200, 200, 200, 0.0, 0.0) < 0.01  # without δ it would be refuted


def test_refuted_values_have_no_gap_so_that_the_search_finds_their_end() -> None:
    epsilons = np.linspace(0, 8, 400)
    for canaries, guesses, delta in ((100, 100, 1e-5), (1000, 200, 1e-3), (1000, 1000, 1e-2), (50, 20, 0.05)):
        for correct in (guesses, int(0.95 * guesses), int(0.7 * guesses), int(0.6 * guesses)):
            values = np.array([one_run_p_value(canaries, guesses, correct, e, delta) for e in epsilons])
            for miss in (0.001, 0.05, 0.4):
                refuted = values <= miss
                assert not np.any(np.diff(refuted.astype(int)) > 0)


def test_the_bound_solves_its_own_equation_and_the_ceiling_is_every_guess_right() -> None:
    epsilon = one_run_epsilon(1000, 200, 180, delta=1e-5, confidence=0.95)
    assert one_run_p_value(1000, 200, 180, epsilon, 1e-5) == pytest.approx(0.05, rel=1e-4)
    mu = one_run_mu(1000, 200, 180, confidence=0.95)
    assert _gdp_refuted(1000, 200, 180, np.array([mu, mu + 1e-5]), 0.05).tolist() == [True, False]
    apart = np.arange(64.0) + 100, np.arange(64.0)
    for method in (one_run_bound, one_run_gdp_bound):
        bound = method(*apart, delta=1e-5)
        assert bound.num_correct == bound.num_guesses == 128
        assert bound.epsilon == bound.ceiling
        fixed = method(*apart, delta=1e-5, num_guesses=100)
        assert fixed.num_guesses == 100
        assert fixed.as_dict()["ceiling"] == fixed.epsilon
    assert one_run_bound(*apart, delta=0.0, num_guesses=100).ceiling == one_run_epsilon(
        128, 100, 100, delta=0.0
    )


def test_the_ceiling_has_its_closed_form_and_only_delta_charges_for_more_canaries() -> None:
    # Pure ε with every one of r guesses right: q^r = 0.05, so ε = log(q / (1 - q)).
    chance = 0.05 ** (1 / 1000)
    assert one_run_epsilon(1000, 1000, 1000, delta=0.0) == pytest.approx(math.log(chance / (1 - chance)))
    # More canaries than guesses cost nothing without δ, and only δ's term with it.
    assert one_run_epsilon(10_000, 1000, 1000, delta=0.0) == one_run_epsilon(1000, 1000, 1000, delta=0.0)
    assert one_run_epsilon(10_000, 1000, 1000, delta=1e-5) < one_run_epsilon(1000, 1000, 1000, delta=1e-5)


def test_with_many_canaries_the_bounds_come_near_and_the_gaussian_one_nearer() -> None:
    random = np.random.default_rng(4)
    members = random.random(100_000) < 0.5
    told = np.where(random.random(100_000) < math.e / (1 + math.e), members, ~members).astype(float)
    bound = one_run_bound(told[members], told[~members], delta=0.0, num_guesses=100_000)
    assert 0.95 < bound.epsilon <= 1.0
    sides = coin_sides(random, 2.0, 10_000)
    truth = epsilon_of_mu(2.0, 1e-5)
    general, gaussian = (method(*sides, delta=1e-5).epsilon for method in (one_run_bound, one_run_gdp_bound))
    assert 0.3 * truth < general < gaussian < truth
    assert gaussian > 0.5 * truth


def test_counts_and_settings_that_cannot_be_meant_are_refused() -> None:
    good = np.arange(10.0)
    for counts in ((10, 11, 5), (10, 5, 6), (10, 0, 0), (10, 5, -1)):
        with pytest.raises(ConfigError, match="bad-guesses"):
            one_run_epsilon(*counts, delta=1e-5)
        with pytest.raises(ConfigError, match="bad-guesses"):
            one_run_mu(*counts)
    for options in (
        {"num_guesses": 21},
        {"num_guesses": 0},
        {"num_guesses": []},
        {"sides": "x"},
    ):
        with pytest.raises(ConfigError, match="bad-guesses"):
            one_run_bound(good, good, delta=1e-5, **options)
    with pytest.raises(DataError, match="too-few-scores"):
        one_run_bound([], [], delta=1e-5)
    with pytest.raises(DataError, match="bad-scores"):
        one_run_gdp_bound([np.nan], good, delta=1e-5)
    with pytest.raises(ConfigError, match="delta-out-of-range"):
        one_run_gdp_bound(good, good, delta=0.0)
    with pytest.raises(ConfigError, match="confidence-out-of-range"):
        one_run_bound(good, good, delta=1e-5, confidence=1.0)


def test_a_single_canary_and_an_empty_side_are_ordinary() -> None:
    for method in (one_run_bound, one_run_gdp_bound):
        assert method([1.0], [], delta=1e-5).epsilon == 0
        assert method([], [1.0, 2.0, 3.0], delta=1e-5).epsilon == 0
        assert method([], np.arange(40.0), delta=1e-5, sides="out").epsilon > 1  # by chance: 2^-40
