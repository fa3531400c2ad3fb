"""The operating point of another place, from its images without labels and declared prevalences.

Images of another scanner may shift the scores of all classes, so that a threshold chosen elsewhere is wrong,
while their order survives. Of two classes, or of a finding, the scores there are two heaps: two normal
distributions of one spread, of weights as declared, are fitted by EM, and images are called from the middle
on, where both classes are told apart alike. A wrong prevalence moves that little, as the heaps themselves
say where they are: a threshold above which the declared share lies was worse by 0.06 in balanced accuracy
with 10 points of error (benchmarks/2026-11-18-another-place.md). Of more classes, logits are shifted until
the mean probabilities are the declared prevalences.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, logit, logsumexp, softmax
from torch import Tensor

from sfumato.errors import DataError
from sfumato.training.decision import Decision, Shares
from sfumato.training.metrics import Floats

_MOST_STEPS = 500
_SETTLED = 1e-8  # change of any image's chance at which EM ends
_LARGEST = 1000.0  # shift of a logit, the release's own included: what config.json may hold


def moved_decision(
    decision: Decision, corrected: Tensor, weights: Tensor, prevalence: Shares, *, several: bool
) -> tuple[Decision, Shares]:
    """The decision that suits the place, and what it adds to each logit.

    ``corrected`` are logits (N, classes) after ``decision``, ``weights`` how much each row counts. Images are
    called from a probability of one half on: probabilities are those with both classes alike, or every
    finding as likely as not. Of more than two classes they are those at the declared prevalences.
    """
    rows, counts = corrected.double().numpy(), weights.double().numpy()
    if several:
        added = [-middle(rows[:, k], counts, share) for k, share in enumerate(prevalence)]
    elif len(prevalence) == 2:
        log_odds = rows[:, decision.positive] - rows[:, 1 - decision.positive]
        cut = middle(log_odds, counts, prevalence[decision.positive])
        added = [cut / 2, cut / 2]
        added[decision.positive] = -cut / 2
    else:
        added = matching_shift(rows, counts, prevalence)
    moved = tuple(float(value) * decision.temperature for value in added)
    before = decision.shift or (0.0,) * len(moved)
    shift = tuple(old + new for old, new in zip(before, moved, strict=True))
    if not all(abs(value) <= _LARGEST for value in shift):
        raise _unusable("their scores lie beyond what a shift can bring back")
    return replace(decision, shift=shift, threshold=0.5, thresholds=None), moved


def middle(scores: Floats, counts: Floats, prevalence: float) -> float:
    """The middle between the means of two normal distributions of one spread and of declared weights.

    EM from the cut on above which the declared share lies; ``counts`` says how much each score counts.
    """
    if not np.isfinite(scores).all() or np.ptp(scores) == 0:
        raise _unusable("the model's scores for them are all alike, or not finite")
    order = np.argsort(-scores, kind="stable")
    above = np.cumsum(counts[order]) <= prevalence * counts.sum()
    above[0], above[-1] = True, False  # both sides have somebody
    high = np.zeros(len(scores))
    high[order] = above
    prior, weights = logit(prevalence), counts / counts.sum()
    upper = lower = 0.0
    for _ in range(_MOST_STEPS):
        upper, lower = (
            float(np.average(scores, weights=weights * high)),
            float(np.average(scores, weights=weights * (1 - high))),
        )
        squares = high * (scores - upper) ** 2 + (1 - high) * (scores - lower) ** 2
        variance = float(weights @ squares) + 1e-12 * float(np.ptp(scores)) ** 2
        odds = prior + ((scores - lower) ** 2 - (scores - upper) ** 2) / (2 * variance)
        before, high = high, np.clip(expit(odds), 1e-12, 1 - 1e-12)
        if np.abs(high - before).max() < _SETTLED:
            break
    return (upper + lower) / 2


def matching_shift(logits: Floats, counts: Floats, prevalence: Shares) -> list[float]:
    """What to add to the logits of each class so that mean probabilities are the prevalences; its sum is 0.

    It is where a convex function is least, whose slope is the difference of the two.
    """
    wanted, weights = np.array(prevalence), counts / counts.sum()

    def slack(shift: Floats) -> tuple[float, Floats]:
        moved = logits + shift
        value = float(weights @ logsumexp(moved, axis=1) - wanted @ shift)
        return value, weights @ softmax(moved, axis=1) - wanted

    found = minimize(slack, np.log(wanted), jac=True, method="BFGS", options={"gtol": 1e-8})
    shift = found.x - found.x.mean()
    if not np.abs(slack(shift)[1]).max() < 1e-3 or not all(map(math.isfinite, shift)):
        raise _unusable("no shift of the model's outputs gives the declared prevalences")
    return shift.tolist()


def _unusable(what: str) -> DataError:
    return DataError(
        "no-operating-point",
        f"the images of the place give no operating point: {what}.",
        why="What the model says of them does not tell the classes apart.",
        fix="Look at the images with sfumato predict: are they of the kind that the model was trained on?",
    )
