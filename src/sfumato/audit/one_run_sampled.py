"""A lower bound of ε from one training, among plans that differ in noise alone.

A Poisson-sampled training is not μ-GDP for any one μ. So the theorem of Mahloujifar et al. 2024 is read
against the trade-off curve of the plan itself, at every noise multiplier, as ``sampled`` does for many
trainings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sfumato import accounting
from sfumato.accounting import Event
from sfumato.audit.one_run import OneRunBound, count_correct, curve_refuted, guess_numbers, one_run_gdp_bound
from sfumato.audit.sampled import LEAST_NOISE, MOST_NOISE, PRECISION
from sfumato.audit.scores import check_confidence, check_scores
from sfumato.privacy.plan import Plan

_EPSILONS = np.concatenate([[0.0], 0.02 * 1.12 ** np.arange(64)])  # up to 25: points of each curve


def one_run_plan_bound(
    scores_in: ArrayLike, scores_out: ArrayLike, *, plan: Plan, confidence: float = 0.95
) -> OneRunBound:
    """ε from below at the plan's δ, of the plan with the least noise that the guesses refute.

    Guarantee: if each canary was in by an independent fair coin, and the training is the plan's with some
    noise multiplier, the bound exceeds its ε with probability at most 1 − ``confidence``. Full batches are
    Gaussian DP, and the bound is ``one_run_gdp_bound``'s.
    """
    steps = _steps_alone(plan)
    if steps.sampling_rate == 1:
        return one_run_gdp_bound(scores_in, scores_out, delta=steps.delta, confidence=confidence)
    scores_in, scores_out = check_scores(scores_in, scores_out, at_least=0)
    canaries = len(scores_in) + len(scores_out)
    numbers = guess_numbers(None, canaries)
    share = np.array([check_confidence(confidence) / len(numbers)])
    correct = count_correct(scores_in, scores_out, numbers, "both")

    def number_that_refutes(noise_multiplier: float, right: Sequence[int]) -> int | None:
        least_false = _least_false(replace(steps, noise_multiplier=noise_multiplier))
        for number, count in zip(numbers, right, strict=True):
            if count and curve_refuted(canaries, number, count, share, least_false)[0]:
                return number
        return None

    noise, number = _least_refuted(lambda value: number_that_refutes(value, correct), plan.noise_multiplier)
    most, _ = _least_refuted(lambda value: number_that_refutes(value, numbers), plan.noise_multiplier)
    chosen = numbers.index(number) if number is not None else 0
    return OneRunBound(
        method="one-run-plan",
        epsilon=_epsilon(steps, noise),
        delta=steps.delta,
        confidence=confidence,
        ceiling=_epsilon(steps, most),
        mu=None,
        num_canaries=canaries,
        num_guesses=numbers[chosen],
        num_correct=correct[chosen],
    )


def _steps_alone(plan: Plan) -> Plan:
    """What protects a canary: the steps, without other releases or a search, by the tight accountant."""
    return replace(
        plan,
        extra_events=(),
        tuning_runs=None,
        uncounted_search=False,
        search=None,
        accountant="pld",
        neighbouring="add-or-remove",
    )


def _least_false(plan: Plan) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """The least false positive rate of a test with a given true positive rate, never overstated.

    Each (ε, δ) of the curve gives two lines, for either side; the highest of them all is taken.
    """
    deltas = np.array(_deltas(plan.events()))
    growth = np.exp(_EPSILONS)

    def least_false(right: NDArray[np.float64]) -> NDArray[np.float64]:
        right = np.minimum(right, 1.0)
        lines = np.maximum((right - deltas) / growth, 1 - deltas - growth * (1 - right))
        return np.maximum(0.0, lines.max(keepdims=True))

    return least_false


@lru_cache(maxsize=256)
def _deltas(events: tuple[Event, ...]) -> tuple[float, ...]:
    return tuple(accounting.delta(events, epsilon=float(value)) for value in _EPSILONS)


def _least_refuted(refuted: Callable[[float], int | None], start: float) -> tuple[float | None, int | None]:
    """The least noise multiplier that is refuted, to ``PRECISION``, and by which number of guesses."""
    low = high = start
    found = refuted(high)
    while found is None and high < MOST_NOISE:
        low, high = high, 1.5 * high
        found = refuted(high)
    if found is None:
        return None, None
    if low == high:
        while low > LEAST_NOISE and (lower := refuted(low / 1.5)) is not None:
            low, high, found = low / 1.5, low / 1.5, lower
        low = low / 1.5
    while high / low > 1 + PRECISION:
        middle = math.sqrt(low * high)
        at_middle = refuted(middle)
        low, high, found = (low, middle, at_middle) if at_middle is not None else (middle, high, found)
    return high, found


def _epsilon(plan: Plan, noise_multiplier: float | None) -> float:
    return 0.0 if noise_multiplier is None else replace(plan, noise_multiplier=noise_multiplier).epsilon
