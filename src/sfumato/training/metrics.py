"""Measures of a classifier on labels and scores, with intervals over people.

One convention everywhere: ``weights`` counts each row, and its leading dimensions are kept: ``(N,)`` gives
one value, ``(R, N)`` gives R of them, so that a bootstrap is one call. What is not defined (an AUC without
healthy people) is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import trapezoid
from scipy.optimize import minimize_scalar
from scipy.sparse import csr_array
from scipy.special import log_softmax

from sfumato.errors import ConfigError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Whole = NDArray[np.int64]

_MOST_CELLS = 4_000_000  # of one part of a bootstrap: 32 MB
_LOWEST, _HIGHEST = np.log(0.01), np.log(100.0)  # temperatures that are looked at


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Counts of those called positive at each distinct threshold, the highest first.

    A row is called positive if its score is at least the threshold. The first threshold is infinite: nobody.
    """

    thresholds: Floats  # (D,)
    true_positives: Floats  # (..., D)
    false_positives: Floats  # (..., D)

    @property
    def sensitivity(self) -> Floats:
        """Share of the positive rows that are called so; also called recall."""
        return _ratio(self.true_positives, self.true_positives[..., -1:])

    @property
    def false_positive_rate(self) -> Floats:
        """Share of the negative rows that are called positive: 1 - specificity."""
        return _ratio(self.false_positives, self.false_positives[..., -1:])

    @property
    def precision(self) -> Floats:
        """Share of positive rows among those called so; NaN where none is."""
        return _ratio(self.true_positives, self.true_positives + self.false_positives)


def curve(positive: Flags, scores: Floats, weights: Floats | None = None) -> Curve:
    """The counts behind the ROC and the precision-recall curve; rows of equal score are called together."""
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    last = (
        np.append(np.flatnonzero(np.diff(ordered)), len(ordered) - 1) if len(ordered) else np.array([], int)
    )
    counts = _counted(weights, len(scores))[..., order]
    nobody = np.zeros((*counts.shape[:-1], 1))

    def called(rows: Flags) -> Floats:
        return np.concatenate([nobody, np.cumsum(counts * rows[order], axis=-1)[..., last]], axis=-1)

    return Curve(
        thresholds=np.concatenate([[np.inf], ordered[last]]),
        true_positives=called(positive),
        false_positives=called(~positive),
    )


def area_under_roc(positive: Flags, scores: Floats, weights: Floats | None = None) -> Floats:
    """Chance that a random positive row scores above a random negative one; ties count half."""
    return area_of(curve(positive, scores, weights))


def area_of(counts: Curve) -> Floats:
    """The area under the ROC curve of these counts."""
    sensitivity, false_rate = counts.sensitivity, counts.false_positive_rate
    undefined = np.isnan(sensitivity[..., -1]) | np.isnan(false_rate[..., -1])
    return np.where(undefined, np.nan, trapezoid(sensitivity, false_rate, axis=-1))


def average_precision(positive: Flags, scores: Floats, weights: Floats | None = None) -> Floats:
    """Area under the precision-recall curve, as a sum of steps: the mean precision over the positive rows."""
    return average_precision_of(curve(positive, scores, weights))


def average_precision_of(counts: Curve) -> Floats:
    """The same of counts."""
    gained = np.diff(counts.sensitivity, axis=-1)
    return np.where(
        np.isnan(gained).any(axis=-1),
        np.nan,
        np.sum(gained * np.nan_to_num(counts.precision[..., 1:]), axis=-1),
    )


def operating_point(positive: Flags, called: Flags, weights: Floats | None = None) -> dict[str, Floats]:
    """What is read at one threshold, from who is positive and who is called so."""
    counts = _counted(weights, len(positive))

    def count(rows: Flags) -> Floats:
        return np.asarray(counts @ rows.astype(np.float64))

    true_positives, false_negatives = count(positive & called), count(positive & ~called)
    false_positives, true_negatives = count(~positive & called), count(~positive & ~called)
    sensitivity = _ratio(true_positives, true_positives + false_negatives)
    specificity = _ratio(true_negatives, true_negatives + false_positives)
    product = true_positives * true_negatives - false_positives * false_negatives
    margins = (
        (true_positives + false_positives)
        * (true_positives + false_negatives)
        * (true_negatives + false_positives)
        * (true_negatives + false_negatives)
    )
    return {
        "sensitivity": sensitivity,
        "specificity": specificity,
        "balanced_accuracy": (sensitivity + specificity) / 2,
        "precision": _ratio(true_positives, true_positives + false_positives),
        "negative_predictive_value": _ratio(true_negatives, true_negatives + false_negatives),
        "f1": _ratio(2 * true_positives, 2 * true_positives + false_positives + false_negatives),
        "mcc": _ratio(product, np.sqrt(margins)),
    }


def confusion(labels: Whole, predicted: Whole, num_classes: int, weights: Floats | None = None) -> Floats:
    """Counts (..., true class, predicted class)."""
    counts = np.atleast_2d(_counted(weights, len(labels)))
    cells = labels * num_classes + predicted
    place = csr_array(
        (np.ones(len(cells)), (np.arange(len(cells)), cells)), shape=(len(cells), num_classes**2)
    )
    leading = () if weights is None else weights.shape[:-1]
    return (counts @ place).reshape(*leading, num_classes, num_classes)


def overall(matrix: Floats) -> dict[str, Floats]:
    """Accuracy, balanced accuracy, macro F1 and MCC of confusion matrices (..., true, predicted).

    Means over classes leave out those that do not occur. MCC is Gorodkin's for several classes.
    """
    hits = np.diagonal(matrix, axis1=-2, axis2=-1)
    true, called, total = matrix.sum(-1), matrix.sum(-2), matrix.sum((-2, -1))
    covariance = hits.sum(-1) * total - np.sum(true * called, -1)
    spread = np.sqrt(
        np.maximum(total**2 - np.sum(called**2, -1), 0) * np.maximum(total**2 - np.sum(true**2, -1), 0)
    )
    return {
        "accuracy": _ratio(hits.sum(-1), total),
        "balanced_accuracy": _mean(_ratio(hits, true)),
        "f1": _mean(np.where(true > 0, _ratio(2 * hits, true + called), np.nan)),
        "mcc": _ratio(covariance, spread),
    }


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Stated probability against what happened, in bins of equal width; NaN in an empty bin."""

    stated: Floats  # (bins,) mean probability
    observed: Floats  # (bins,) share that was so
    counts: Floats  # (bins,)

    @property
    def error(self) -> float:
        """Expected calibration error: the mean distance of the two, weighted by rows."""
        distance = np.nan_to_num(np.abs(self.stated - self.observed))
        return float(np.sum(distance * self.counts) / max(1.0, np.sum(self.counts)))


def calibration(happened: Flags, probabilities: Floats, *, num_bins: int = 10) -> Calibration:
    """How often it happened where the model said it would with this probability."""
    known = np.isfinite(probabilities)  # a network whose outputs overflow states nothing
    happened, probabilities = happened[known], probabilities[known]
    place = np.clip((probabilities * num_bins).astype(np.int64), 0, num_bins - 1)
    counts = np.bincount(place, minlength=num_bins).astype(np.float64)
    return Calibration(
        stated=_ratio(np.bincount(place, probabilities, minlength=num_bins), counts),
        observed=_ratio(np.bincount(place, happened.astype(np.float64), minlength=num_bins), counts),
        counts=counts,
    )


def brier_score(happened: Flags, probabilities: Floats, weights: Floats | None = None) -> Floats:
    """Mean squared distance of the probability to what happened."""
    counts = _counted(weights, len(happened))
    return np.asarray(_ratio(np.sum(counts * (probabilities - happened) ** 2, -1), np.sum(counts, -1)))


def fit_temperature(logits: Floats, labels: Whole) -> float:
    """The T that makes ``logits / T`` (N, classes) most likely (Guo et al. 2017), between 0.01 and 100.

    It is computed from these labels: of private ones it would be a release of its own.
    """
    rows = np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        return -float(log_softmax(logits / np.exp(log_temperature), axis=1)[rows, labels].mean())

    found = minimize_scalar(loss, bounds=(_LOWEST, _HIGHEST), method="bounded", options={"xatol": 1e-4})
    return float(np.exp(found.x))


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Lower and upper ends, of the shape of the statistic."""

    lower: Floats
    upper: Floats


def interval(
    statistic: Callable[[Floats], Floats],
    groups: Whole,
    *,
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of ``statistic(weights)`` over ``groups``: whole people are drawn, not images.

    ``statistic`` gets weights (R, N) and gives (R, ...). Resamples in which it is not defined are left out.
    The seed is fixed, so that a score is reported with the same interval each time.
    """
    if num_resamples < 1 or not 0 < confidence < 1:
        raise ConfigError(
            "bad-resamples",
            f"num_resamples is {num_resamples} and confidence {confidence}.",
            fix="Use 1 resample or more, better 1,000, and a confidence between 0 and 1.",
        )
    _, unit = np.unique(groups, return_inverse=True)
    num_units = int(unit.max()) + 1 if len(unit) else 0
    random = np.random.default_rng(seed)
    part = max(1, min(num_resamples, _MOST_CELLS // max(1, len(unit))))
    found = []
    for start in range(0, num_resamples, part):
        size = min(part, num_resamples - start)
        drawn = random.multinomial(num_units, np.full(num_units, 1 / max(1, num_units)), size=size)
        found.append(np.asarray(statistic(drawn[:, unit].astype(np.float64))))
    values = np.concatenate(found)
    ends = _quantiles(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(lower=ends[0], upper=ends[1])


def _quantiles(values: Floats, shares: list[float]) -> Floats:
    """Quantiles over the first dimension, of what is defined; NaN where nothing is."""
    undefined = np.isnan(values).all(axis=0)
    held = np.where(undefined, 0.0, values)  # nanquantile warns of columns without a number
    return np.where(undefined, np.nan, np.nanquantile(held, shares, axis=0))


def _counted(weights: Floats | None, rows: int) -> Floats:
    return np.ones(rows) if weights is None else weights


def _mean(values: Floats) -> Floats:
    """Mean over the last dimension of what is defined."""
    defined = ~np.isnan(values)
    return _ratio(np.sum(np.where(defined, values, 0.0), -1), defined.sum(-1))


def _ratio(above: NDArray, below: NDArray) -> Floats:
    """Their quotient, NaN where ``below`` is 0."""
    above, below = np.broadcast_arrays(np.asarray(above, np.float64), np.asarray(below, np.float64))
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below != 0)
