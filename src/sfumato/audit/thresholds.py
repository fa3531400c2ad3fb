"""Tests of the form "a member, if the score is at least t", and honest ways to choose t.

A bound at the threshold that looked best on the same scores is no bound: it exceeds the truth far more often
than its confidence allows. Three choices keep the confidence:

- a number, fixed before the scores were seen;
- "split": chosen on a random half of the scores, judged on the other half;
- "bonferroni": many candidates at once, each with its share of the failures. They are order statistics
  at fixed ranks, so that their bounds hold although they come from the scores, and with ties too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sfumato.audit.intervals import upper_rate
from sfumato.audit.scores import Scores, check_scores, divide
from sfumato.errors import ConfigError

Threshold = Literal["split", "bonferroni"] | float
Objective = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]
MAX_CANDIDATES = 12  # a side; finer ranks cost more in the correction than they find
MAX_TRIED = 64  # a side, on the half that only chooses


@dataclass(frozen=True)
class ErrorBounds:
    """Thresholds with their errors counted, and upper bounds of both error rates that hold together."""

    thresholds: NDArray[np.float64]
    false_positives: NDArray[np.int64]
    false_negatives: NDArray[np.int64]
    fpr_upper: NDArray[np.float64]
    fnr_upper: NDArray[np.float64]
    num_in: int
    num_out: int
    failure_each: float  # how often each single rate's bound may be wrong

    def best(self, objective: Objective) -> int:
        """Where the objective of (upper FPR, upper FNR) is largest."""
        return int(np.argmax(objective(self.fpr_upper, self.fnr_upper)))

    def flawless(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The upper bounds of an attack without any error: no scores of this number can show less."""
        none = np.zeros(1)
        each = self.failure_each
        return upper_rate(none, self.num_out, each), upper_rate(none, self.num_in, each)


def choose_threshold(
    scores_in: Scores,
    scores_out: Scores,
    objective: Objective,
    *,
    threshold: Threshold,
    failure_probability: float,
    max_candidates: int | None = MAX_CANDIDATES,
    seed: int = 0,
) -> ErrorBounds:
    """Error bounds at one threshold, or at several of which the best by ``objective`` may be taken.

    Guarantee: all hold together with probability at least 1 − ``failure_probability``, whichever is taken.
    """
    if threshold == "bonferroni":
        return simultaneous_bounds(scores_in, scores_out, failure_probability, max_candidates)
    if threshold == "split":
        check_scores(scores_in, scores_out, at_least=2)
        random = np.random.default_rng(seed)
        (tried_in, judged_in), (tried_out, judged_out) = divide(scores_in, random), divide(scores_out, random)
        # By bounds that hold together: the luckiest of the extreme thresholds would not be lucky again.
        tried = simultaneous_bounds(tried_in, tried_out, failure_probability, MAX_TRIED)
        chosen = tried.thresholds[[tried.best(objective)]]
        return bounds_at(judged_in, judged_out, chosen, failure_probability)
    if isinstance(threshold, str) or not np.isfinite(threshold):
        raise ConfigError(
            "bad-threshold",
            f"threshold is {threshold!r}, but it is 'split', 'bonferroni' or a finite number.",
            why="A threshold that was chosen on the scores it is judged by makes the bound too high.",
            fix="Give a number only if it was fixed before these scores were seen.",
        )
    return bounds_at(scores_in, scores_out, np.array([float(threshold)]), failure_probability)


def bounds_at(
    scores_in: Scores, scores_out: Scores, thresholds: NDArray[np.float64], failure_probability: float
) -> ErrorBounds:
    """Bounds at thresholds that do not depend on these scores.

    Guarantee: each pair holds with probability 1 − ``failure_probability``.
    """
    each = failure_probability / 2
    positives, negatives = count_errors(scores_in, scores_out, thresholds)
    return ErrorBounds(
        thresholds=thresholds,
        false_positives=positives,
        false_negatives=negatives,
        fpr_upper=upper_rate(positives, len(scores_out), each),
        fnr_upper=upper_rate(negatives, len(scores_in), each),
        num_in=len(scores_in),
        num_out=len(scores_out),
        failure_each=each,
    )


def simultaneous_bounds(
    scores_in: Scores,
    scores_out: Scores,
    failure_probability: float,
    max_candidates: int | None = MAX_CANDIDATES,
) -> ErrorBounds:
    """Bounds at order statistics of either side; at all ranks if ``max_candidates`` is None.

    Guarantee: all hold together with probability 1 − ``failure_probability``.
    A threshold just above the k-th highest score of one side has a true rate of at most the k-th
    smallest of n uniform variables, ties or not; its bound is Clopper-Pearson's for k − 1 of n. Seen from the
    other side, whose scores are independent, the threshold is fixed. The union bound does the rest.
    """
    from_out, from_in, ranks_out, ranks_in = order_statistics(scores_in, scores_out, max_candidates)
    thresholds = np.concatenate([from_out, from_in])
    each = failure_probability / (2 * len(thresholds))
    positives, negatives = count_errors(scores_in, scores_out, thresholds)
    split = len(from_out)
    # A tie at the order statistic makes fewer errors than its rank says: the rank is what is safe.
    safe_positives = np.concatenate([ranks_out - 1, positives[split:]])
    safe_negatives = np.concatenate([negatives[:split], ranks_in - 1])
    return ErrorBounds(
        thresholds=thresholds,
        false_positives=positives,
        false_negatives=negatives,
        fpr_upper=upper_rate(safe_positives, len(scores_out), each),
        fnr_upper=upper_rate(safe_negatives, len(scores_in), each),
        num_in=len(scores_in),
        num_out=len(scores_out),
        failure_each=each,
    )


def count_errors(
    scores_in: Scores, scores_out: Scores, thresholds: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """False positives (out, at least t) and false negatives (in, below t) of each threshold."""
    below_out = np.searchsorted(np.sort(scores_out), thresholds, side="left")
    below_in = np.searchsorted(np.sort(scores_in), thresholds, side="left")
    return len(scores_out) - below_out, below_in


def order_statistics(
    scores_in: Scores, scores_out: Scores, limit: int | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Thresholds just above the highest scores out, thresholds at the lowest scores in, and their ranks."""
    ranks_out, ranks_in = ranks(len(scores_out), limit), ranks(len(scores_in), limit)
    from_out = np.nextafter(np.sort(scores_out)[::-1][ranks_out - 1], np.inf)
    from_in = np.sort(scores_in)[ranks_in - 1]
    return from_out, from_in, ranks_out, ranks_in


def ranks(number: int, limit: int | None) -> NDArray[np.int64]:
    """Ranks from 1 to ``number``: all of them, or about ``limit`` that are dense at the extreme scores."""
    if limit is None or number <= limit:
        return np.arange(1, number + 1)
    return np.unique(np.round(np.geomspace(1, number, limit)).astype(np.int64))
