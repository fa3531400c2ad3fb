"""Calibration: the noise, the number of steps or the batch size that a budget allows."""

from __future__ import annotations

import math
from collections.abc import Callable

from sfumato.accounting.events import check_budget
from sfumato.errors import ConfigError

EpsilonOf = Callable[[float], float]
EpsilonAt = Callable[[int], float]  # where only whole numbers are tried

_SMALLEST_NOISE, _LARGEST_NOISE = 0.01, 1e7
_MOST_STEPS = 100_000_000


def solve_noise_multiplier(
    epsilon_of: EpsilonOf, target: float, *, tolerance: float = 1e-4, guess: float = 1.0
) -> float:
    """The smallest noise multiplier, to ``tolerance``, with ``epsilon_of(noise_multiplier) <= target``.

    Guarantee: the target is kept, never merely approached: the result is taken from the safe side.
    """
    check_budget(target)
    high = guess
    while epsilon_of(high) > target:
        high *= 2
        if high > _LARGEST_NOISE:
            raise _impossible(f"no noise multiplier up to {_LARGEST_NOISE:g} reaches epsilon {target:g}")
    low = high / 2
    while epsilon_of(low) <= target:
        low, high = low / 2, low
        if low < _SMALLEST_NOISE:
            return high
    return _bisect(epsilon_of, target, safe=high, unsafe=low, tolerance=tolerance)


def solve_num_steps(epsilon_of: EpsilonAt, target: float) -> int:
    """The largest number of steps with ``epsilon_of(num_steps) <= target``."""
    return _largest(epsilon_of, target, most=_MOST_STEPS, what="not even one step")


def solve_batch_size(epsilon_of: EpsilonAt, target: float, *, num_examples: int) -> int:
    """The largest expected batch size with ``epsilon_of(batch_size) <= target``."""
    return _largest(epsilon_of, target, most=num_examples, what="not even a batch size of 1")


def _largest(epsilon_of: EpsilonAt, target: float, *, most: int, what: str) -> int:
    check_budget(target)
    if epsilon_of(1) > target:
        raise _impossible(f"{what} is allowed by epsilon {target:g}")
    low, high = 1, 2
    while high < most and epsilon_of(high) <= target:
        low, high = high, 2 * high
    if high >= most:
        if epsilon_of(most) <= target:
            return most
        high = most
    while high - low > 1:
        middle = _between(low, epsilon_of(low), high, epsilon_of(high), target)
        low, high = (middle, high) if epsilon_of(middle) <= target else (low, middle)
    return low


def _between(low: int, at_low: float, high: int, at_high: float, target: float) -> int:
    """A whole number between: interpolated in logarithms, but never so near an end that the search crawls."""
    middle = (low + high) / 2
    if high / low < 4 and 0 < at_low < at_high < math.inf:
        share = math.log(target / at_low) / math.log(at_high / at_low)
        middle = low * (high / low) ** min(max(share, 0.02), 0.98)
    return min(max(round(middle), low + 1), high - 1)


def _bisect(epsilon_of: EpsilonOf, target: float, *, safe: float, unsafe: float, tolerance: float) -> float:
    """Regula falsi in logarithms (ε falls nearly as a power of the noise); every third step halves."""
    turn = 0
    while safe / unsafe - 1 > tolerance:
        turn += 1
        at_safe, at_unsafe = epsilon_of(safe), epsilon_of(unsafe)
        share = 0.5
        if turn % 3 and 0 < at_safe < at_unsafe < math.inf:
            share = math.log(at_unsafe / target) / math.log(at_unsafe / at_safe)
            share += (
                tolerance / 3 / math.log(safe / unsafe)
            )  # a little to the safe side, so that both ends close in
        middle = unsafe * (safe / unsafe) ** min(max(share, 0.01), 0.99)
        safe, unsafe = (middle, unsafe) if epsilon_of(middle) <= target else (safe, middle)
    return safe


def _impossible(what: str) -> ConfigError:
    return ConfigError(
        "impossible-budget",
        f"{what}.",
        why="The other values given already spend more than that.",
        fix="Allow a larger epsilon or delta, or give more noise, fewer steps, a smaller batch or more data.",
    )
