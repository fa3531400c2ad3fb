"""Lower bounds of ε from one training: m canaries, each in or out by its own fair coin.

The auditor guesses the highest scores to be in and the lowest to be out, and abstains between. Steinke, Nasr
and Jagielski 2023 bound how many of those guesses can be right under (ε, δ)-DP; Mahloujifar, Melis and
Chaudhuri 2024 bound it under f-DP, here for Gaussian trade-off curves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betainc, expit, gammaln, log_expit, ndtr, ndtri

from sfumato.accounting import check_delta
from sfumato.audit.bounds import epsilon_of_mu
from sfumato.audit.scores import Scores, check_audit_delta, check_confidence, check_scores
from sfumato.errors import ConfigError

Sides = Literal["both", "in", "out"]
# canaries, guesses, correct, failure probability -> ε or μ
CountBound = Callable[[int, int, int, float], float]
TOLERANCE = 1e-7


@dataclass(frozen=True, kw_only=True)
class OneRunBound:
    """A lower bound of ε at δ from one run; ``ceiling`` is what it would be with every guess right."""

    method: str
    epsilon: float
    delta: float
    confidence: float
    ceiling: float
    mu: float | None
    num_canaries: int  # that the bound was computed on
    num_guesses: int
    num_correct: int

    def as_dict(self) -> dict[str, str | float | int | None]:
        return asdict(self)


def one_run_bound(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    num_guesses: int | Sequence[int] | None = None,
    sides: Sides = "both",
) -> OneRunBound:
    """ε from below by Steinke et al. 2023.

    ``num_guesses`` is one number fixed beforehand, or several (None: a grid) that divide the failures,
    so that the best may be taken. ``sides``, fixed beforehand too, says whether inclusions, exclusions or as
    many of both are guessed. Among tied scores the wrong guesses are counted first.

    Guarantee: if each canary was in or out by an independent fair coin, and the training is (ε₀, δ)-DP for
    one canary, the bound exceeds ε₀ with probability at most 1 − ``confidence``.
    """
    check_audit_delta(delta)

    def count_bound(canaries: int, guesses: int, correct: int, failure_probability: float) -> float:
        return one_run_epsilon(canaries, guesses, correct, delta=delta, confidence=1 - failure_probability)

    best = _best_bound(scores_in, scores_out, count_bound, confidence, num_guesses, sides)
    return OneRunBound(
        method="one-run",
        epsilon=best.value,
        delta=delta,
        confidence=confidence,
        ceiling=best.ceiling,
        mu=None,
        num_canaries=best.num_canaries,
        num_guesses=best.num_guesses,
        num_correct=best.num_correct,
    )


def one_run_gdp_bound(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    num_guesses: int | Sequence[int] | None = None,
    sides: Sides = "both",
) -> OneRunBound:
    """μ from below by Mahloujifar et al. 2024 with Gaussian trade-off curves, and its ε at δ.

    Guarantee: as ``one_run_bound``, for a training that is μ₀-GDP for one canary. Sharper, and it does not
    weaken with δ times the number of canaries.
    """
    check_delta(delta)

    def count_bound(canaries: int, guesses: int, correct: int, failure_probability: float) -> float:
        return one_run_mu(canaries, guesses, correct, confidence=1 - failure_probability)

    best = _best_bound(scores_in, scores_out, count_bound, confidence, num_guesses, sides)
    return OneRunBound(
        method="one-run-gdp",
        epsilon=epsilon_of_mu(best.value, delta),
        delta=delta,
        confidence=confidence,
        ceiling=epsilon_of_mu(best.ceiling, delta),
        mu=best.value,
        num_canaries=best.num_canaries,
        num_guesses=best.num_guesses,
        num_correct=best.num_correct,
    )


@lru_cache(maxsize=4096)
def one_run_epsilon(
    num_canaries: int, num_guesses: int, num_correct: int, *, delta: float, confidence: float = 0.95
) -> float:
    """The ε that so many correct guesses refute; 0 if none. The ceiling: ``num_correct=num_guesses``."""
    check_audit_delta(delta)
    failure_probability = check_confidence(confidence)
    _check_counts(num_canaries, num_guesses, num_correct)

    def refuted(epsilon: float) -> bool:
        return one_run_p_value(num_canaries, num_guesses, num_correct, epsilon, delta) <= failure_probability

    return _largest(refuted)


def one_run_p_value(
    num_canaries: int, num_guesses: int, num_correct: int, epsilon: float, delta: float
) -> float:
    """An upper bound of the probability of at least ``num_correct`` right guesses under (ε, δ)-DP.

    Without δ the guesses are at best independent coins that are right with probability e^ε / (1 + e^ε).
    Each of the m canaries may fail with probability δ on either side, and a failure can move the count by i;
    the worst i is taken.
    """
    if num_correct == 0:
        return 1.0
    tail = float(betainc(num_correct, num_guesses - num_correct + 1, expit(epsilon)))
    if delta == 0:
        return tail
    fewer = np.arange(num_correct - 1, -1, -1)
    just_below = np.cumsum(
        np.exp(
            _log_binomials(num_guesses)[fewer]
            + fewer * log_expit(epsilon)
            + (num_guesses - fewer) * log_expit(-epsilon)
        )
    )
    worst = float(np.max(just_below / np.arange(1, num_correct + 1)))
    return min(1.0, tail + 2 * num_canaries * delta * worst)


@lru_cache(maxsize=64)
def _log_binomials(number: int) -> NDArray[np.float64]:
    """Logarithms of the binomial coefficients, ``number`` over 0, 1 and so on."""
    chosen = np.arange(number + 1)
    return gammaln(number + 1) - gammaln(chosen + 1) - gammaln(number - chosen + 1)


@lru_cache(maxsize=4096)
def one_run_mu(num_canaries: int, num_guesses: int, num_correct: int, *, confidence: float = 0.95) -> float:
    """The μ of Gaussian DP that so many correct guesses refute; 0 if none."""
    failure_probability = check_confidence(confidence)
    _check_counts(num_canaries, num_guesses, num_correct)
    if num_correct == 0:
        return 0.0
    low, high = 0.0, 8.0
    while _gdp_refuted(num_canaries, num_guesses, num_correct, np.array([high]), failure_probability)[0]:
        low, high = high, 2 * high
    while high - low > TOLERANCE:
        # The recursion is over counts, so many μ cost hardly more than one.
        grid = np.linspace(low, high, 65)
        refuted = _gdp_refuted(num_canaries, num_guesses, num_correct, grid, failure_probability)
        if not refuted[0]:
            return 0.0  # only at low = 0: later grids begin at a refuted μ
        last = int(np.argmin(refuted)) - 1  # refuted μ come first, and the last of the grid never is
        low, high = float(grid[last]), float(grid[last + 1])
    return low


def _gdp_refuted(
    num_canaries: int, num_guesses: int, num_correct: int, mu: NDArray[np.float64], failure_probability: float
) -> NDArray[np.bool_]:
    """Whether P[correct ≥ v] > ``failure_probability`` would be impossible under μ-GDP, for each μ."""

    def least_false(right: NDArray[np.float64]) -> NDArray[np.float64]:
        return ndtr(ndtri(np.minimum(right, 1.0)) - mu)

    return curve_refuted(
        num_canaries, num_guesses, num_correct, np.full(mu.shape, failure_probability), least_false
    )


def curve_refuted(
    num_canaries: int,
    num_guesses: int,
    num_correct: int,
    failure_probability: NDArray[np.float64],
    least_false: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> NDArray[np.bool_]:
    """Whether P[correct ≥ v] > ``failure_probability`` would be impossible under f-DP.

    ``least_false`` is the inverse of 1 − f: the least false positive rate of a test with this true positive
    rate. Arrays hold any number of curves, or one.

    With p_i = P[i correct], right_v = Σ_{i≥v} i·p_i / m and wrong_v = Σ_{i≥v} (g − i)·p_i / m, flipping one
    canary's coin shows right_v ≤ 1 − f(wrong_{v−1}) for every v (Mahloujifar et al. 2024, for two choices;
    1 − f is concave, so canaries may be averaged). From the assumed tail downwards this forces ever more
    probability at lower counts; if the sum, g / m times a probability, passes g / m, it was false.
    """
    whole = num_guesses / num_canaries
    right = failure_probability * num_correct / num_canaries
    wrong = failure_probability * (num_guesses - num_correct) / num_canaries
    for count in range(num_correct - 1, -1, -1):
        forced = np.maximum(wrong, least_false(right))
        if np.array_equal(forced, wrong):
            break  # nothing is forced any more, and nothing will be
        right = right + count / (num_guesses - count) * (forced - wrong)
        wrong = forced
    return right + wrong > whole


def guess_grid(num_canaries: int) -> list[int]:
    """Numbers of guesses to choose from: all canaries, half of them, and so on; up to 8, none below 8."""
    grid = [num_canaries // 2**power for power in range(8)]
    return [number for number in grid if number >= 8] or [num_canaries]


@dataclass(frozen=True)
class _BestGuess:
    value: float
    ceiling: float
    num_canaries: int
    num_guesses: int
    num_correct: int


def _best_bound(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    count_bound: CountBound,
    confidence: float,
    num_guesses: int | Sequence[int] | None,
    sides: Sides,
) -> _BestGuess:
    """Guess, bound each number of guesses with its share of the failures, and take the best."""
    failure_probability = check_confidence(confidence)
    scores_in, scores_out = check_scores(scores_in, scores_out, at_least=0)  # coins may all fall to one side
    canaries = len(scores_in) + len(scores_out)
    check_scores(np.concatenate([scores_in, scores_out]), np.zeros(1))
    numbers = guess_numbers(num_guesses, canaries)
    share = failure_probability / len(numbers)
    correct = count_correct(scores_in, scores_out, numbers, sides)
    values = [count_bound(canaries, n, right, share) for n, right in zip(numbers, correct, strict=True)]
    best = int(np.argmax(values))
    ceiling = max(count_bound(canaries, number, number, share) for number in numbers)
    return _BestGuess(values[best], ceiling, canaries, numbers[best], correct[best])


def guess_numbers(num_guesses: int | Sequence[int] | None, num_canaries: int) -> list[int]:
    """The numbers of guesses to try, the most first: where nothing is found, it is the one reported."""
    if num_guesses is None:
        num_guesses = guess_grid(num_canaries)
    numbers = np.unique(np.atleast_1d(num_guesses))[::-1].tolist()
    if not numbers or not 1 <= numbers[-1] <= numbers[0] <= num_canaries:
        raise ConfigError(
            "bad-guesses",
            f"num_guesses is {num_guesses}, but {num_canaries} canaries allow 1 to {num_canaries} guesses.",
            fix="Leave it out for a grid, or give numbers in that range.",
        )
    return numbers


def count_correct(scores_in: Scores, scores_out: Scores, numbers: list[int], sides: Sides) -> list[int]:
    """Right guesses among the most extreme scores, for each number of guesses.

    Within a tie the wrong ones are counted first. Any rule that does not know who is a member does at least
    as well, so the bound holds; a tie broken by place would leak membership, since the sides come apart.
    """
    if sides not in ("both", "in", "out"):
        raise ConfigError(
            "bad-guesses",
            f"sides is {sides!r}.",
            fix="Guess 'both', or only who is 'in', or 'out'.",
        )
    members = np.arange(len(scores_in) + len(scores_out)) < len(scores_in)
    # Members come first among equals: wrong for whoever guesses from below, and last for those from above.
    members = members[np.lexsort((~members, np.concatenate([scores_in, scores_out])))]
    in_above = np.concatenate([[0], np.cumsum(members[::-1])])
    out_below = np.concatenate([[0], np.cumsum(~members)])
    guessed_in = [{"both": (number + 1) // 2, "in": number, "out": 0}[sides] for number in numbers]
    return [int(in_above[k] + out_below[n - k]) for n, k in zip(numbers, guessed_in, strict=True)]


def _check_counts(num_canaries: int, num_guesses: int, num_correct: int) -> None:
    if not (0 <= num_correct <= num_guesses <= num_canaries and num_guesses >= 1):
        raise ConfigError(
            "bad-guesses",
            f"{num_correct} correct of {num_guesses} guesses on {num_canaries} canaries cannot be.",
            fix="0 <= correct <= guesses <= canaries, with at least one guess.",
        )


def _largest(refuted: Callable[[float], bool]) -> float:
    """The end of the refuted values that begin at 0, rounded down; 0 if there are none."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    while high - low > TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
