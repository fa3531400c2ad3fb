"""Scores where an image has any number of findings: the area under the ROC curve of each."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sfumato.training.decision import Decision
from sfumato.training.losses import BinaryCrossEntropy
from sfumato.training.metrics import Floats, area_under_roc, interval, operating_point

CALLED_FROM_HALF = Decision()  # each finding from a probability of one half on
_RESAMPLES = 200  # of the bootstrap


@dataclass(frozen=True, kw_only=True)
class FindingScore:
    """One finding. None: not defined, since no image has it, or every one."""

    auc: float | None
    auc_interval: tuple[float, float] | None  # 95 %, by drawing people anew; None also if not asked for
    sensitivity: float | None  # at the threshold
    specificity: float | None
    balanced_accuracy: float | None
    threshold: float  # of the probability
    num_positive: int


@dataclass(frozen=True, kw_only=True)
class FindingScores:
    """What ``evaluate --json`` prints for several findings per image. Shares are between 0 and 1."""

    accuracy: float  # mean over findings of the share of images where it is called rightly
    num_examples: int
    loss: float  # mean over images of the sum over findings, unweighted
    exact_match: float  # images of which all findings are called rightly
    mean_auc: float | None  # over the findings for which it is defined
    mean_auc_interval: tuple[float, float] | None
    auc: dict[str, float | None]
    per_finding: dict[str, FindingScore]
    task: str = "multi-label"

    def as_dict(self) -> dict[str, Any]:
        """JSON values; a loss beyond all numbers becomes None."""
        return {**asdict(self), "loss": self.loss if math.isfinite(self.loss) else None}


def finding_scores(
    logits: Tensor,
    labels: Tensor,
    findings: tuple[str, ...],
    *,
    decision: Decision = CALLED_FROM_HALF,
    groups: Tensor | None = None,
    intervals: bool = True,
) -> FindingScores:
    """Scores from logits and labels, both (N, findings); ``groups`` says whose image each is.

    ``decision`` says from which probability on each finding is called.

    ``intervals`` takes some seconds for tens of thousands of images.
    """
    truth, scores = labels.numpy() > 0, logits.double().numpy()
    called = decision.found(logits).numpy()
    cuts = (0.5,) * len(findings) if decision.thresholds is None else decision.thresholds
    right = called == truth
    owners = np.arange(len(labels)) if groups is None else groups.numpy()

    def areas(weights: Floats | None = None) -> Floats:
        """(..., findings + 1): of each finding, and their mean."""
        each = [area_under_roc(truth[:, i], scores[:, i], weights) for i in range(len(findings))]
        return np.stack([*each, _mean_of_defined(each)], axis=-1)

    found = areas()
    ends = None
    if intervals and len(labels):
        bounds = interval(areas, owners, num_resamples=_RESAMPLES)
        ends = [_pair(low, high) for low, high in zip(bounds.lower, bounds.upper, strict=True)]
    per_finding = {
        name: _finding(truth[:, i], called[:, i], found[i], None if ends is None else ends[i], cuts[i])
        for i, name in enumerate(findings)
    }
    return FindingScores(
        accuracy=float(right.mean()),
        num_examples=len(labels),
        loss=BinaryCrossEntropy()(logits.double(), labels.double()).item(),
        exact_match=float(right.all(axis=1).mean()),
        mean_auc=_defined(found[-1]),
        mean_auc_interval=None if ends is None else ends[-1],
        auc={name: score.auc for name, score in per_finding.items()},
        per_finding=per_finding,
    )


def _finding(
    truth: np.ndarray, called: np.ndarray, auc: float, ends: tuple[float, float] | None, threshold: float
) -> FindingScore:
    point = operating_point(truth, called)
    shares = point["sensitivity"], point["specificity"]
    return FindingScore(
        auc=_defined(auc),
        auc_interval=ends if _defined(auc) is not None else None,
        sensitivity=_defined(point["sensitivity"]),
        specificity=_defined(point["specificity"]),
        balanced_accuracy=_defined((shares[0] + shares[1]) / 2),
        threshold=threshold,
        num_positive=int(truth.sum()),
    )


def _mean_of_defined(each: list[Floats]) -> Floats:
    values = np.stack(each)
    defined = ~np.isnan(values)
    total, count = np.where(defined, values, 0.0).sum(0), defined.sum(0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _pair(low: float, high: float) -> tuple[float, float] | None:
    return None if math.isnan(low) else (float(low), float(high))


def _defined(value: float | Floats) -> float | None:
    return None if math.isnan(value) else float(value)
