"""What every statistic asks of its scores, its confidence and its δ, and how scores are divided in two."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sfumato.errors import ConfigError, DataError

Scores = NDArray[np.float64]


def check_scores(scores_in: ArrayLike, scores_out: ArrayLike, *, at_least: int = 1) -> tuple[Scores, Scores]:
    """Both sides as flat float64 arrays of finite numbers, at least ``at_least`` on each side."""
    return _check_side(scores_in, "scores_in", at_least), _check_side(scores_out, "scores_out", at_least)


def _check_side(given: ArrayLike, name: str, at_least: int) -> Scores:
    try:
        scores = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        scores = np.full(1, np.nan)
    if scores.ndim != 1:
        raise DataError(
            "bad-scores",
            f"{name} has shape {scores.shape}, but a side is a flat array with one score per trial.",
            fix="Give one number for each model or canary.",
        )
    if not np.isfinite(scores).all():
        raise DataError(
            "bad-scores",
            f"{name} holds values that are not finite numbers.",
            why="Leaving them out, or ranking them silently, could make an audit claim what it did not find.",
            fix="Decide what such a trial means, for example the lowest score, before you see the result.",
        )
    if len(scores) < at_least:
        raise DataError(
            "too-few-scores",
            f"{name} has {len(scores)} of the {at_least} scores that this statistic needs on each side.",
            fix="Audit more trials; an explicit threshold or 'bonferroni' works from one score a side on.",
        )
    return scores


def check_confidence(confidence: float) -> float:
    """The probability with which the statement may fail, 1 − ``confidence``."""
    if not 0.5 <= confidence < 1:
        raise ConfigError(
            "confidence-out-of-range",
            f"confidence is {confidence}, but it is a probability from 0.5 to below 1.",
            why="It is how often a bound of this kind is right when the same audit is repeated.",
            fix="Use 0.95, or 0.999 as De et al. 2022.",
        )
    return 1.0 - confidence


def check_audit_delta(delta: float) -> None:
    """As for a budget, but that 0, pure differential privacy, can be audited too."""
    if not 0 <= delta < 1:
        raise ConfigError(
            "delta-out-of-range",
            f"delta is {delta}, but an audit needs a probability from 0 to below 1.",
            fix="Take the delta of the guarantee that is audited.",
        )


def divide(scores: Scores, random: np.random.Generator) -> tuple[Scores, Scores]:
    """Two random halves, the second the larger by one if the number is odd.

    Random, since the order in which scores are given may depend on their values.
    """
    mixed = random.permutation(scores)
    return mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
