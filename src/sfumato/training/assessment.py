"""Everything that is read of a finished classifier, each figure with its interval over people.

Scores of private images are sensitive, whatever the interval; whoever calls this says whose images they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.data import ImageSet
from sfumato.training.decision import Decision
from sfumato.training.metrics import (
    Flags,
    Floats,
    Whole,
    area_of,
    average_precision_of,
    brier_score,
    calibration,
    confusion,
    curve,
    fit_temperature,
    interval,
    operating_point,
    overall,
)

CONFIDENCE = 0.95
MOST_CURVES = 12  # classes whose curves are kept
_POINTS = 200  # of a curve: more than a page shows
_FEWEST_RESAMPLES, _MOST_RESAMPLES, _CELLS = 200, 1000, 20_000_000
_MOST_RESAMPLED = 20  # classes; of more, what needs their curves has no interval: it would take minutes
PER_CLASS = ("auc", "average_precision", "sensitivity", "specificity", "precision", "f1")
_AT_THRESHOLD = ("sensitivity", "specificity", "precision", "negative_predictive_value", "f1", "mcc")

Statistic = Callable[[Floats | None], dict[str, Floats]]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a model says of labelled images, and whose they are."""

    logits: Tensor  # (N, classes), before the decision
    labels: Tensor  # (N,)
    people: Tensor  # (N,): equal numbers are one person; images of nobody known are people of their own
    classes: tuple[str, ...]
    decision: Decision

    @property
    def probabilities(self) -> Floats:
        return self.decision.correct(self.logits).double().softmax(1).numpy()

    @property
    def predicted(self) -> Whole:
        return self.decision.choose(self.decision.correct(self.logits)).numpy()

    @classmethod
    def of(cls, logits: Tensor, images: ImageSet, decision: Decision) -> Outputs:
        """The outputs for ``images``; those whose patient is not known are taken as people of their own."""
        people = images.patients if images.patients is not None else torch.arange(len(images))
        return cls(
            logits=logits, labels=images.labels, people=people, classes=images.classes, decision=decision
        )

    def select(self, rows: Tensor) -> Outputs:
        """The same of some of the images."""
        return Outputs(
            logits=self.logits[rows],
            labels=self.labels[rows],
            people=self.people[rows],
            classes=self.classes,
            decision=self.decision,
        )


def assess(outputs: Outputs) -> dict[str, Any]:
    """All measures with their intervals, per class too, curves and calibration, as JSON values."""
    labels = outputs.labels.numpy()
    statistic = statistics(outputs)
    measures = _with_intervals(statistic, outputs)
    names = outputs.classes if len(outputs.classes) != 2 else (outputs.classes[outputs.decision.positive],)
    shown = names if len(names) <= MOST_CURVES else ()
    return {
        "confidence": CONFIDENCE,
        "num_people": len(np.unique(outputs.people.numpy())),
        "threshold": outputs.decision.threshold if len(outputs.classes) == 2 else None,
        "positive": names[0] if len(outputs.classes) == 2 else None,
        "measures": {name: value for name, value in measures.items() if "/" not in name},
        "classes": {
            name: {
                "num_examples": int((labels == number).sum()),
                **{key: measures[f"{number}/{key}"] for key in PER_CLASS},
            }
            for number, name in enumerate(outputs.classes)
        },
        "curves": {name: _curves(outputs, outputs.classes.index(name)) for name in shown},
        "calibration": _calibration(outputs),
    }


def statistics(outputs: Outputs, *, per_class: bool = True) -> Statistic:
    """Every measure by its name, for weights of the rows; of one class as "number/measure"."""
    labels, probabilities, predicted = outputs.labels.numpy(), outputs.probabilities, outputs.predicted
    num_classes, positive = probabilities.shape[1], outputs.decision.positive
    two = num_classes == 2

    def of_class(number: int, weights: Floats | None) -> dict[str, Floats]:
        mine, scores = labels == number, probabilities[:, number]
        if two:  # log-odds keep their order where probabilities round to 1
            scores = _log_odds(outputs, number)
        counts = curve(mine, scores, weights)
        return {
            "auc": area_of(counts),
            "average_precision": average_precision_of(counts),
            **operating_point(mine, predicted == number, weights),
        }

    def all_measures(weights: Floats | None) -> dict[str, Floats]:
        found = overall(confusion(labels, predicted, num_classes, weights))
        if weights is not None and num_classes > _MOST_RESAMPLED:
            return found
        each = {number: of_class(number, weights) for number in range(num_classes)}
        if two:
            found |= {key: each[positive][key] for key in ("auc", "average_precision", *_AT_THRESHOLD)}
        else:
            for key in ("auc", "average_precision"):
                found[key] = _mean_of_defined([each[number][key] for number in each])
        if per_class:
            found |= {f"{number}/{key}": each[number][key] for number in each for key in PER_CLASS}
        return found

    return all_measures


def gaps(mine: Outputs, other: Outputs) -> dict[str, Any]:
    """How far ``other`` is above ``mine`` on the same images, each measure with its paired interval."""
    first, second = statistics(mine, per_class=False), statistics(other, per_class=False)

    def difference(weights: Floats | None) -> dict[str, Floats]:
        before, after = first(weights), second(weights)
        return {name: after[name] - before[name] for name in before.keys() & after.keys()}

    return _with_intervals(difference, mine)


def subgroups(outputs: Outputs, values: Sequence[str]) -> dict[str, Any]:
    """The measures of each subgroup; ``values`` has one word for each image."""
    found = {}
    for value in sorted(set(values)):
        rows = np.flatnonzero(np.array([each == value for each in values]))
        part = outputs.select(outputs.labels.new_tensor(rows))
        measures = _with_intervals(statistics(part, per_class=False), part)
        people = len(np.unique(part.people.numpy()))
        found[value] = {"num_examples": len(rows), "num_people": people, "measures": measures}
    return found


def _with_intervals(statistic: Statistic, outputs: Outputs) -> dict[str, dict[str, float | None]]:
    values = statistic(None)
    names = list(values)

    def stacked(weights: Floats) -> Floats:
        found = statistic(weights)
        undefined = np.full(len(weights), np.nan)
        return np.stack([found.get(name, undefined) for name in names], axis=-1)

    rows = len(outputs.labels) * len(outputs.classes)
    num_resamples = max(_FEWEST_RESAMPLES, min(_MOST_RESAMPLES, _CELLS // max(1, rows)))
    ends = interval(stacked, outputs.people.numpy(), confidence=CONFIDENCE, num_resamples=num_resamples)
    return {
        name: {
            "value": json_number(values[name]),
            "lower": json_number(ends.lower[place]),
            "upper": json_number(ends.upper[place]),
        }
        for place, name in enumerate(names)
    }


def _curves(outputs: Outputs, number: int) -> dict[str, list[list[float]]]:
    """ROC (1 - specificity, sensitivity) and precision-recall (sensitivity, precision) of one class."""
    mine = (outputs.labels == number).numpy()
    scores = _log_odds(outputs, number) if len(outputs.classes) == 2 else outputs.probabilities[:, number]
    counts = curve(mine, scores)
    roc = np.stack([counts.false_positive_rate, counts.sensitivity], axis=1)
    recall = np.stack([counts.sensitivity, counts.precision], axis=1)[1:]
    return {"roc": _thinned(roc), "precision_recall": _thinned(recall)}


def _calibration(outputs: Outputs) -> dict[str, Any]:
    """Of two classes the positive one's probability, of more that of the chosen one.

    The temperature is what these very images would choose: a description of them, not used for anything.
    """
    happened, stated = _stated(outputs, outputs.probabilities)
    bins = calibration(happened, stated)
    corrected = outputs.decision.correct(outputs.logits).double().numpy()
    temperature = fit_temperature(corrected, outputs.labels.numpy())
    cooled = np.exp(corrected / temperature - (corrected / temperature).max(1, keepdims=True))
    after = calibration(*_stated(outputs, cooled / cooled.sum(1, keepdims=True)))
    return {
        "error": bins.error,
        "brier": json_number(brier_score(happened, stated)),
        "stated": [json_number(value) for value in bins.stated],
        "observed": [json_number(value) for value in bins.observed],
        "counts": [int(value) for value in bins.counts],
        "best_temperature": temperature,
        "error_at_best_temperature": after.error,
    }


def _stated(outputs: Outputs, probabilities: Floats) -> tuple[Flags, Floats]:
    labels = outputs.labels.numpy()
    if len(outputs.classes) == 2:
        positive = outputs.decision.positive
        return labels == positive, probabilities[:, positive]
    chosen = probabilities.argmax(1)
    return labels == chosen, probabilities[np.arange(len(labels)), chosen]


def _log_odds(outputs: Outputs, number: int) -> Floats:
    corrected = outputs.decision.correct(outputs.logits).double()
    return (corrected[:, number] - corrected[:, 1 - number]).numpy()


def _mean_of_defined(values: Sequence[Floats]) -> Floats:
    table = np.stack(values, axis=-1)
    defined = ~np.isnan(table)
    total, count = np.where(defined, table, 0.0).sum(-1), defined.sum(-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _thinned(points: Floats) -> list[list[float]]:
    """At most so many points, the first and the last among them; none of a curve that is not defined."""
    points = points[np.isfinite(points).all(axis=1)]
    if len(points) > _POINTS:
        points = points[np.unique(np.linspace(0, len(points) - 1, _POINTS).round().astype(int))]
    return [[round(float(x), 5), round(float(y), 5)] for x, y in points]


def json_number(value: object) -> float | None:
    """A finite number, or None for what is not defined."""
    number = float(np.asarray(value))
    return number if math.isfinite(number) else None


def flat_measures(assessment: Mapping[str, Any]) -> dict[str, float | None]:
    """The values alone, by the names that ``Scores`` does not have."""
    return {name: entry["value"] for name, entry in assessment["measures"].items()}
