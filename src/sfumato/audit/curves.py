"""How well an attack tells members from others: ROC, TPR at a low FPR, AUC, advantage; and points to plot."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri
from scipy.stats import rankdata

from sfumato.audit.intervals import rate_interval
from sfumato.audit.scores import Scores, check_audit_delta, check_confidence, check_scores
from sfumato.audit.thresholds import choose_threshold, count_errors
from sfumato.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RocCurve:
    """Corners of the ROC curve, from (0, 0) to (1, 1): "a member, if the score is at least the threshold".

    The first threshold is above every score. Tied scores make one step, with both rates at once.
    """

    fpr: NDArray[np.float64]
    tpr: NDArray[np.float64]
    thresholds: NDArray[np.float64]

    def points(self, num_points: int = 200, *, lowest: float = 1e-5) -> list[tuple[float, float]]:
        """(FPR, TPR) for logarithmic axes: even steps of FPR from ``lowest`` to 1, and the TPR there."""
        wanted = np.geomspace(lowest, 1.0, num_points)
        reached = self.tpr[np.searchsorted(self.fpr, wanted * (1 + 1e-12), side="right") - 1]
        return list(zip(wanted.tolist(), reached.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its interval at ``confidence``."""

    value: float
    lower: float
    upper: float
    confidence: float
    method: str

    def as_dict(self) -> dict[str, str | float]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class TprAtFpr:
    """TPR at the threshold whose share of false positives is at most ``target_fpr``.

    The TPR's interval is exact at that threshold; ``fpr_upper`` bounds the threshold's true FPR.
    """

    target_fpr: float
    threshold: float
    fpr: float
    fpr_upper: float
    tpr: float
    tpr_lower: float
    tpr_upper: float
    confidence: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def roc_curve(scores_in: ArrayLike, scores_out: ArrayLike) -> RocCurve:
    """Every corner of the ROC curve."""
    scores_in, scores_out = check_scores(scores_in, scores_out)
    values = np.union1d(scores_in, scores_out)[::-1]
    thresholds = np.concatenate([[np.nextafter(values[0], np.inf)], values])
    positives, negatives = count_errors(scores_in, scores_out, thresholds)
    return RocCurve(
        fpr=positives / len(scores_out), tpr=1 - negatives / len(scores_in), thresholds=thresholds
    )


def tpr_at_fpr(
    scores_in: ArrayLike, scores_out: ArrayLike, fpr: float, *, confidence: float = 0.95
) -> TprAtFpr:
    """The largest TPR with an observed FPR of at most ``fpr`` (Carlini et al. 2022).

    The threshold depends on ``scores_out`` alone, so the TPR's interval keeps its confidence. The FPR's bound
    is that of the order statistic: it holds although the threshold was chosen on these scores.
    """
    failure_probability = check_confidence(confidence)
    scores_in, scores_out = check_scores(scores_in, scores_out)
    if not 0 <= fpr <= 1:
        raise ConfigError(
            "bad-rate", f"fpr is {fpr}, but a rate is from 0 to 1.", fix="Use for example 0.01 or 0.001."
        )
    allowed = math.floor(fpr * len(scores_out) * (1 + 1e-12))
    descending = np.sort(scores_out)[::-1]
    # Just above the first score that must not be reached; below everything if all may be.
    lowest = min(descending[-1], scores_in.min())
    threshold = lowest if allowed >= len(scores_out) else np.nextafter(descending[allowed], np.inf)
    reached = int((scores_in >= threshold).sum())
    low, high = rate_interval(reached, len(scores_in), failure_probability)
    return TprAtFpr(
        target_fpr=fpr,
        threshold=float(threshold),
        fpr=float((scores_out >= threshold).mean()),
        fpr_upper=rate_interval(min(allowed, len(scores_out)), len(scores_out), 2 * failure_probability)[1],
        tpr=reached / len(scores_in),
        tpr_lower=low,
        tpr_upper=high,
        confidence=confidence,
    )


def auc(scores_in: ArrayLike, scores_out: ArrayLike, *, confidence: float = 0.95) -> Estimate:
    """Probability that a member scores higher than another, ties counted half, with DeLong's interval.

    The interval is asymptotic. Where the estimate of its variance is 0 (full separation, constant scores, one
    score), or a side has fewer than 2 scores, it is Hoeffding's instead: wide, but right for every number.
    """
    failure_probability = check_confidence(confidence)
    scores_in, scores_out = check_scores(scores_in, scores_out)
    value, variance = _auc_and_variance(scores_in, scores_out)
    if variance > 0:
        method, half_width = "delong", -float(ndtri(failure_probability / 2)) * math.sqrt(variance)
    else:
        fewer = min(len(scores_in), len(scores_out))
        method, half_width = "hoeffding", math.sqrt(math.log(2 / failure_probability) / (2 * fewer))
    return Estimate(
        value=value,
        lower=max(0.0, value - half_width),
        upper=min(1.0, value + half_width),
        confidence=confidence,
        method=method,
    )


def _auc_and_variance(scores_in: Scores, scores_out: Scores) -> tuple[float, float]:
    """Mann and Whitney's share of ordered pairs, and DeLong's variance of it from ranks; 0 if it has none."""
    together = rankdata(np.concatenate([scores_in, scores_out]))
    # For each score the share of the other side that it beats.
    beaten_by_in = (together[: len(scores_in)] - rankdata(scores_in)) / len(scores_out)
    beaten_by_out = (together[len(scores_in) :] - rankdata(scores_out)) / len(scores_in)
    value = float(beaten_by_in.mean())
    if min(len(scores_in), len(scores_out)) < 2:
        return value, 0.0
    return value, float(
        beaten_by_in.var(ddof=1) / len(scores_in) + beaten_by_out.var(ddof=1) / len(scores_out)
    )


def membership_advantage(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    confidence: float = 0.95,
    threshold: float | None = None,
    seed: int = 0,
) -> Estimate:
    """TPR − FPR at a threshold given, or chosen on a random half of the scores and judged on the other.

    Guarantee: the interval holds the true advantage of that very test with at least ``confidence``
    (Clopper-Pearson, half of the failures for each rate). Its upper end says nothing of a better attack.
    """
    failure_probability = check_confidence(confidence)
    scores_in, scores_out = check_scores(scores_in, scores_out)
    bounds = choose_threshold(
        scores_in,
        scores_out,
        lambda fpr, fnr: 1 - fpr - fnr,
        threshold="split" if threshold is None else threshold,
        failure_probability=failure_probability,
        seed=seed,
    )
    positives, negatives = int(bounds.false_positives[0]), int(bounds.false_negatives[0])
    fpr_low, fpr_high = rate_interval(positives, bounds.num_out, failure_probability / 2)
    fnr_low, fnr_high = rate_interval(negatives, bounds.num_in, failure_probability / 2)
    return Estimate(
        value=1 - negatives / bounds.num_in - positives / bounds.num_out,
        lower=1 - fnr_high - fpr_high,
        upper=1 - fnr_low - fpr_low,
        confidence=confidence,
        method="clopper-pearson",
    )


def largest_advantage(epsilon: float, delta: float) -> float:
    """The largest TPR − FPR of any test that (ε, δ)-DP allows: (e^ε − 1 + 2δ) / (e^ε + 1)."""
    check_audit_delta(delta)
    return min(1.0, math.tanh(epsilon / 2) + 2 * delta / (1 + math.exp(min(epsilon, 700.0))))


def score_histogram(
    scores_in: ArrayLike, scores_out: ArrayLike, *, num_bins: int = 50
) -> dict[str, list[float]]:
    """Both sides counted in the same bins: ``edges`` (one more), ``num_in`` and ``num_out``."""
    scores_in, scores_out = check_scores(scores_in, scores_out)
    edges = np.histogram_bin_edges(np.concatenate([scores_in, scores_out]), bins=num_bins)
    return {
        "edges": edges.tolist(),
        "num_in": np.histogram(scores_in, bins=edges)[0].tolist(),
        "num_out": np.histogram(scores_out, bins=edges)[0].tolist(),
    }
