"""How much a statistic of the scores would vary over other scores of the same kind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from sfumato.audit.curves import Estimate
from sfumato.audit.scores import Scores, check_confidence, check_scores
from sfumato.errors import ConfigError


def bootstrap(
    statistic: Callable[[Scores, Scores], float],
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Estimate:
    """``statistic(scores_in, scores_out)`` with the percentile interval over resampled scores.

    An approximation for many scores and smooth statistics; with few scores, or at the edge of what the
    statistic can be, it is too narrow. It is never a bound of ε: use the bounds for that.
    """
    failure_probability = check_confidence(confidence)
    scores_in, scores_out = check_scores(scores_in, scores_out)
    if num_resamples < 1:
        raise ConfigError(
            "bad-resamples", f"num_resamples is {num_resamples}.", fix="Use at least 1, better 1,000."
        )
    random = np.random.default_rng(seed)
    values = [
        statistic(random.choice(scores_in, len(scores_in)), random.choice(scores_out, len(scores_out)))
        for _ in range(num_resamples)
    ]
    lower, upper = np.quantile(values, [failure_probability / 2, 1 - failure_probability / 2])
    return Estimate(
        value=float(statistic(scores_in, scores_out)),
        lower=float(lower),
        upper=float(upper),
        confidence=confidence,
        method="bootstrap",
    )
