"""What covers what: runs that never cost more than others, and the best of a random number of runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from sfumato import accounting
from sfumato.accounting import SampledGaussian, Selection, covered_noise, is_covered, share_used
from sfumato.tune.stopping import parameter_of_mean

DELTA = 1e-5


def run(noise: float, rate: float = 1.0, steps: int = 1) -> SampledGaussian:
    return SampledGaussian(noise_multiplier=noise, sampling_rate=rate, num_steps=steps)


@pytest.mark.parametrize(
    ("done", "allowed"),
    [
        (run(10.0, steps=100), run(5.0, steps=25)),  # the same Σ T/σ²
        (run(3.0, 0.1, 40), run(3.0, 0.1, 50)),  # fewer steps of the same
        (run(0.9, 0.02, 0), run(50.0, 1.0, 1)),  # nothing at all
    ],
)
def test_what_is_covered_costs_no_more_in_any_composition(
    done: SampledGaussian, allowed: SampledGaussian
) -> None:
    assert is_covered([done], [allowed], in_renyi=False)
    for others in ([], [run(1.0, 0.05, 20)], [run(2.0)]):
        ours, theirs = (accounting.epsilon([one, *others], delta=DELTA) for one in (done, allowed))
        assert ours <= theirs * (1 + 1e-6)


@pytest.mark.parametrize(
    ("done", "allowed"),
    [
        (run(9.9, steps=100), run(5.0, steps=25)),
        (run(3.0, 0.1, 51), run(3.0, 0.1, 50)),
        (run(2.99, 0.1, 50), run(3.0, 0.1, 50)),
        (run(4.0, 0.1, 50), run(3.0, 0.1, 50)),  # it costs less, but no loss distribution says so of all
        (run(1e6), run(1.0, 0.5, 10)),
    ],
)
def test_what_is_not_known_to_be_covered_is_not(done: SampledGaussian, allowed: SampledGaussian) -> None:
    assert not is_covered([done], [allowed], in_renyi=False)


def test_unlike_runs_of_one_epsilon_do_not_cover_each_other_but_with_covered_noise_they_do() -> None:
    """Two plans can have one ε at one δ, and one still cost more under a search."""
    reference = [run(1.2, 0.02, 200)]
    epsilon = accounting.epsilon(reference, delta=DELTA, accountant="rdp")
    alike = accounting.solve_noise_multiplier(
        lambda noise: accounting.epsilon([run(noise, 0.2, 50)], delta=DELTA, accountant="rdp"), epsilon
    )
    assert share_used([run(alike, 0.2, 50)], reference, in_renyi=True) > 1 + 1e-3
    noise = covered_noise(lambda value: [run(value, 0.2, 50)], reference, in_renyi=True)
    assert noise > alike
    assert is_covered([run(noise, 0.2, 50)], reference, in_renyi=True)
    assert not is_covered([run(noise * 0.999, 0.2, 50)], reference, in_renyi=True)
    for mean in (3.0, 30.0):
        ours, theirs = (
            accounting.epsilon([Selection(events=(one,), mean_runs=mean)], delta=DELTA, accountant="rdp")
            for one in (run(noise, 0.2, 50), reference[0])
        )
        assert ours <= theirs * (1 + 1e-9)


def best_of_many(mu: float, mean: float, shape: float, grid: np.ndarray) -> np.ndarray:
    """Density of the largest of K draws of N(mu, 1): the attack in which the output is its own score.

    With G the generating function of K it is G'(Φ(x - mu)) φ(x - mu), exactly.
    """
    below, gamma = norm.cdf(grid - mu), parameter_of_mean(mean, shape)
    inside = 1 - (1 - gamma) * below
    if shape == 0:
        slope = (1 - gamma) / inside / math.log(1 / gamma)
    else:
        slope = shape * (1 - gamma) * inside ** (-shape - 1) / (gamma**-shape - 1)
    return slope * norm.pdf(grid - mu)


def exact_delta(epsilon: float, sigma: float, mean: float, shape: float) -> float:
    """δ of that attack, by integration, for a unit added or removed, whichever is worse."""
    grid = np.linspace(-12, 14, 200_001)
    without, with_unit = (best_of_many(mu, mean, shape, grid) for mu in (0.0, 1 / sigma))
    assert abs(np.trapezoid(without, grid) - 1) < 1e-6  # the oracle is a density
    gaps = [np.maximum(a - math.exp(epsilon) * b, 0) for a, b in ((without, with_unit), (with_unit, without))]
    return max(float(np.trapezoid(gap, grid)) for gap in gaps)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("sigma", "mean"), [(1.0, 5.0), (3.0, 20.0), (0.7, 50.0)])
def test_the_bound_of_random_stopping_holds_against_the_exact_attack(
    sigma: float, mean: float, shape: float
) -> None:
    one = run(sigma)
    stated = accounting.epsilon(
        [Selection(events=(one,), mean_runs=mean, shape=shape)], delta=DELTA, accountant="rdp"
    )
    assert exact_delta(stated, sigma, mean, shape) <= DELTA
    # and not by leaving out the search: what one run costs does not bound the best of many
    alone = accounting.epsilon([one], delta=DELTA)
    assert exact_delta(alone, sigma, mean, shape) > 1.5 * DELTA


def test_more_runs_or_a_heavier_tail_cost_more() -> None:
    def cost(mean: float, shape: float) -> float:
        event = Selection(events=(run(2.0),), mean_runs=mean, shape=shape)
        return accounting.epsilon([event], delta=DELTA, accountant="rdp")

    assert cost(5, 1.0) < cost(50, 1.0)
    assert cost(20, 0.0) < cost(20, 1.0)
