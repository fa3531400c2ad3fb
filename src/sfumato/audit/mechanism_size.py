"""Errors of a membership test over trainings that hold several canaries, and how many trainings it takes.

Each canary is in its training or not by its own fair coin, and is guessed by its own score. Whatever the
other coins are, the guarantee bounds how often such a guess can be right, so the share of wrong guesses in a
training has a mean of at least half the least sum of both error rates. Trainings are independent. Canaries of
one training are so only if its noise is, which is what an audit is to find out: so the share of a training
counts as **one** value of an unknown distribution (``upper_mean``), and nothing is assumed of its parts.
With one canary a training is right or wrong, and the bound is Clopper-Pearson's.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import binom

from sfumato.audit.intervals import best_bet, upper_mean, upper_rate
from sfumato.audit.sampled import total_error
from sfumato.privacy.plan import Plan

MOST_TRAININGS = 2_000_000
MOST_CANARIES = 128
OVERHEAD = 150  # a step costs as much as so many canaries in it
POWER = 2.326  # normal quantile: with 99 % the trainings are enough


def total_error_above(shares: np.ndarray, plan: Plan, *, canaries: int, failure_probability: float) -> float:
    """An upper bound of the sum of both error rates, from the share of wrong guesses in each training.

    Guarantee: with probability at most ``failure_probability`` the true sum, on average over canaries, is
    larger.
    """
    if canaries == 1:
        return 2 * float(upper_rate(shares.sum(), len(shares), failure_probability))
    return 2 * upper_mean(
        shares,
        failure_probability,
        bet=_bet(total_error(plan) / 2, canaries, len(shares), failure_probability),
    )


def enough_trainings(plan: Plan, *, canaries: int, share: float, failure_probability: float) -> int:
    """How many prove ``share`` of the nominal ε with probability 99 %, if all is as planned."""
    rate, goal = total_error(plan) / 2, total_error(plan.with_epsilon(share * plan.epsilon)) / 2
    return _enough(rate, goal, canaries, failure_probability)


def best_canaries(plan: Plan, *, share: float, failure_probability: float) -> int:
    """With how many in each training that is had at the least cost: a power of two.

    Many in few trainings prove little, since a training is one value however many it holds.
    """
    rate, goal = total_error(plan) / 2, total_error(plan.with_epsilon(share * plan.epsilon)) / 2
    numbers = [2**power for power in range(MOST_CANARIES.bit_length())]
    return min(
        numbers, key=lambda number: _enough(rate, goal, number, failure_probability) * (OVERHEAD + number)
    )


def _enough(rate: float, goal: float, canaries: int, failure_probability: float) -> int:
    trainings = 20
    while trainings < MOST_TRAININGS and not _is_enough(rate, goal, canaries, trainings, failure_probability):
        trainings = math.ceil(1.05 * trainings)
    return trainings


def _is_enough(rate: float, goal: float, canaries: int, trainings: int, failure_probability: float) -> bool:
    """Whether an unlucky 1 % of audits still puts the error rate below ``goal``."""
    if canaries == 1:
        errors = math.ceil(rate * trainings + POWER * math.sqrt(trainings * rate * (1 - rate)))
        return errors < trainings and float(upper_rate(errors, trainings, failure_probability)) < goal
    wrong = np.arange(canaries + 1)
    weights = binom.pmf(wrong, canaries, rate)
    won = np.log1p(_bet(rate, canaries, trainings, failure_probability) * (goal - wrong / canaries))
    mean = float(weights @ won)
    spread = math.sqrt(max(0.0, float(weights @ won**2) - mean**2))
    return trainings * mean - POWER * math.sqrt(trainings) * spread > math.log(1 / failure_probability)


def _bet(rate: float, canaries: int, trainings: int, failure_probability: float) -> float:
    """By the plan, which is known before any score is."""
    return best_bet(rate * (1 - rate) / canaries, trainings, failure_probability)
