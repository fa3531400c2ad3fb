"""Charts and tables of what medicine reads: ROC, precision-recall, calibration, figures with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from sfumato.release.card import NAMES, measure_text
from sfumato.release.documents import CalibrationDocument, ScoresDocument
from sfumato.reporting.charts import Series, line_chart

_PER_CLASS = {
    "auc": "AUC",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "precision": "precision",
    "f1": "F1",
}


def measures_of(scores: ScoresDocument | None) -> dict[str, Any] | None:
    """What the page shows of them; None for scores of earlier versions, which have no intervals."""
    if scores is None or "measures" not in scores:
        return None
    curves, positive = scores.get("curves", {}), scores.get("positive")
    classes: Mapping[str, Mapping[str, Any]] = scores.get("classes", {})
    return {
        "note": _note(scores),
        "rows": [
            (name, measure_text(scores["measures"][key]))
            for key, name in NAMES.items()
            if key in scores["measures"]
        ],
        "class_columns": ["class", "images", *_PER_CLASS.values()],
        "class_rows": [
            [name, f"{row['num_examples']:,}", *(measure_text(row[key]) for key in _PER_CLASS)]
            for name, row in classes.items()
        ],
        "roc": _roc(curves, scores, positive) if curves else None,
        "precision_recall": _precision_recall(curves, scores, positive) if curves else None,
        "calibration": None if "calibration" not in scores else _calibration(scores["calibration"]),
    }


def _note(scores: ScoresDocument) -> str:
    people = f"{scores['num_people']:,} people" if "num_people" in scores else "images"
    text = f"Intervals of {100 * scores.get('confidence', 0.95):g} %, by a bootstrap over {people}."
    threshold = scores.get("threshold")
    if scores.get("positive") is not None and threshold is not None:
        text = f"Called {scores['positive']} from a probability of {threshold:.3g} on. {text}"
    return text


def _roc(curves: Mapping[str, Any], scores: ScoresDocument, positive: str | None) -> Markup:
    measures = scores["measures"]
    marked = []
    if positive is not None and {"sensitivity", "specificity"} <= measures.keys():
        found, cleared = measures["sensitivity"]["value"], measures["specificity"]["value"]
        if found is not None and cleared is not None:
            marked.append(
                (f"threshold: sensitivity {found:.3f}, specificity {cleared:.3f}", 1 - cleared, found)
            )
    series = [Series(name, entry["roc"]) for name, entry in curves.items()]
    return line_chart(series, x_label="1 - specificity", y_label="sensitivity", marked=marked, diagonal=True)


def _precision_recall(curves: Mapping[str, Any], scores: ScoresDocument, positive: str | None) -> Markup:
    measures = scores["measures"]
    marked = []
    if positive is not None and {"sensitivity", "precision"} <= measures.keys():
        found, right = measures["sensitivity"]["value"], measures["precision"]["value"]
        if found is not None and right is not None:
            marked.append((f"threshold: sensitivity {found:.3f}, precision {right:.3f}", found, right))
    series = [Series(name, entry["precision_recall"]) for name, entry in curves.items()]
    return line_chart(series, x_label="sensitivity (recall)", y_label="precision", marked=marked)


def _calibration(bins: CalibrationDocument) -> dict[str, object]:
    points = [
        (stated, observed)
        for stated, observed in zip(bins["stated"], bins["observed"], strict=False)
        if stated is not None and observed is not None
    ]
    chart = line_chart(
        [Series("observed", points)],
        x_label="stated probability",
        y_label="observed share",
        markers=True,
        diagonal=True,
    )
    note = (
        f"Expected calibration error {bins['error']:.3f}. A temperature of {bins['best_temperature']:.2f} "
        f"would bring it to {bins['error_at_best_temperature']:.3f} on these images; it was not applied, "
        "since they are the test."
    )
    return {"chart": chart, "note": note}
