"""Accuracy against ε for many runs beside published results.

Remerscheid et al. 2022, figure 2; De et al. 2022, figure 1a.

``published.csv`` holds results of training without further data, each with the table it was copied from.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from statistics import median, stdev
from typing import TYPE_CHECKING

from sfumato.errors import DataError
from sfumato.reporting.records import RunRecord
from sfumato.study.documents import COLOURS, GREY, INK, MARKERS, StudyResult, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = (
    "recipe",
    "data",
    "metric",
    "value",
    "epsilon",
    "delta",
)  # of a results table, those that are read


@dataclass(frozen=True, kw_only=True)
class TradeOff:
    """An accuracy in % and the budget it cost: the median over ``num_runs``."""

    series: str
    data: str
    epsilon: float
    delta: float | None
    accuracy: float
    deviation: float | None  # over the runs; None: one run, or not stated
    num_runs: int | None  # None: not stated
    published: bool
    where: str


def published_results(data: str) -> list[TradeOff]:
    """What the papers report for this data set; empty if they report nothing."""
    text = files("sfumato.study").joinpath("published.csv").read_text(encoding="utf-8")
    return [
        TradeOff(
            series=f"{row['source']}, {row['method']}",
            data=row["data"],
            epsilon=float(row["epsilon"]),
            delta=_number(row["delta"]),
            accuracy=float(row["accuracy"]),
            deviation=_number(row["deviation"]),
            num_runs=int(row["runs"]) if row["runs"] else None,
            published=True,
            where=row["where"],
        )
        for row in csv.DictReader(text.splitlines())
        if row["data"] == data
    ]


def run_results(records: Iterable[RunRecord]) -> list[TradeOff]:
    """Final public scores of private runs, runs of one model, data set and budget together."""
    groups: dict[tuple[str, str, float, float | None], list[tuple[str, float]]] = defaultdict(list)
    for record in records:
        epsilon = record.privacy["epsilon"]
        if record.scores is None or epsilon is None:
            continue
        key = (record.model, record.config["data"], epsilon, record.privacy["delta"])
        groups[key].append((record.name, 100 * record.scores["accuracy"]))
    return [
        _summary(
            series, data, epsilon, delta, [value for _, value in members], ", ".join(n for n, _ in members)
        )
        for (series, data, epsilon, delta), members in groups.items()
    ]


def table_results(path: Path, *, only: Sequence[str] = ("*",)) -> list[TradeOff]:
    """The accuracies of a results.csv: medians over its seeds, of recipes that match a pattern."""
    groups: dict[tuple[str, str, float, float | None], list[float]] = defaultdict(list)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"it has no column {missing[0]}")
            for row in reader:
                epsilon = _number(row["epsilon"])
                wanted = any(fnmatchcase(row["recipe"], pattern) for pattern in only)
                if wanted and row["metric"] == "accuracy" and epsilon is not None:
                    key = (row["recipe"], row["data"], epsilon, _number(row["delta"]))
                    groups[key].append(100 * float(row["value"]))
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise DataError(
            "bad-results",
            f"{path} is not a table of results: {error}",
            why=f"The columns {', '.join(_COLUMNS)} are read; value is a share, epsilon a number.",
            fix="Give a results.csv as Sfumato's own.",
        ) from error
    return [_summary(*key, values, path.name) for key, values in groups.items()]


def _summary(
    series: str, data: str, epsilon: float, delta: float | None, values: list[float], where: str
) -> TradeOff:
    return TradeOff(
        series=series,
        data=data,
        epsilon=epsilon,
        delta=delta,
        accuracy=median(values),
        deviation=stdev(values) if len(values) > 1 else None,
        num_runs=len(values),
        published=False,
        where=where,
    )


def pareto_front(points: Iterable[TradeOff]) -> list[TradeOff]:
    """The points that no other beats, by rising ε: none has at most their ε and more accuracy."""
    front: list[TradeOff] = []
    for point in sorted(points, key=lambda one: (one.epsilon, -one.accuracy)):
        if not front or point.accuracy > front[-1].accuracy:
            front.append(point)
    return front


def _number(text: str) -> float | None:
    """A finite number; None if there is none. Raises ``ValueError`` for other words."""
    if not text:
        return None
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number")
    return value


def pareto_result(data: str, points: Sequence[TradeOff]) -> StudyResult:
    """Document and rows; each row says whether it lies on the front of ours, of theirs, and of all."""
    ours = pareto_front(point for point in points if not point.published)
    theirs = pareto_front(point for point in points if point.published)
    every = pareto_front(points)
    rows = [
        {
            **asdict(point),
            "on_front_of_its_kind": point in (theirs if point.published else ours),
            "on_front": point in every,
        }
        for point in sorted(points, key=lambda one: (one.published, one.series, one.epsilon))
    ]
    return StudyResult(study="pareto", document={"data": data, "points": rows}, rows=rows)


@styled
def draw_pareto(data: str, points: Sequence[TradeOff]) -> Figure:
    """Ours filled and in colour, the published ones hollow and grey; lines are the two fronts."""
    figure, axes = new_figure(6.9, 3.4)
    plot = axes[0, 0]
    theirs = [point for point in points if point.published]
    ours = [point for point in points if not point.published]
    _draw_front(plot, theirs, color=GREY, linestyle=(0, (4, 2)), label="best published")
    _draw_front(plot, ours, color=INK, linestyle="-", label="best of ours")
    for number, series in enumerate(dict.fromkeys(point.series for point in ours)):
        marker, colour = MARKERS[number % len(MARKERS)], COLOURS[number % len(COLOURS)]
        style = {"color": colour, "marker": marker, "markersize": 5, "zorder": 3}
        _draw_series(plot, [point for point in ours if point.series == series], style)
    for number, series in enumerate(dict.fromkeys(point.series for point in theirs)):
        marker = MARKERS[number % len(MARKERS)]
        style = {
            "color": "#5f6670",
            "marker": marker,
            "markersize": 4.5,
            "markerfacecolor": "white",
            "zorder": 2,
        }
        _draw_series(plot, [point for point in theirs if point.series == series], style)
    largest, smallest = max(point.epsilon for point in points), min(point.epsilon for point in points)
    if largest > 20 * smallest:
        plot.set_xscale("log")
    else:
        plot.set_xlim(left=0)
    plot.set(xlabel="ε", ylabel="test accuracy (%)")
    plot.set_title(data, loc="left")
    plot.grid(axis="both")
    plot.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _draw_series(axes: Axes, points: Sequence[TradeOff], style: dict[str, object]) -> None:
    ordered = sorted(points, key=lambda one: one.epsilon)
    axes.errorbar(
        [point.epsilon for point in ordered],
        [point.accuracy for point in ordered],
        yerr=[point.deviation or 0.0 for point in ordered],
        linestyle="none",
        linewidth=0.8,
        elinewidth=0.8,
        capsize=1.5,
        label=ordered[0].series,
        **style,  # type: ignore[arg-type]
    )


def _draw_front(axes: Axes, points: Sequence[TradeOff], **style: object) -> None:
    front = pareto_front(points)
    if len(front) > 1:
        across, up = [point.epsilon for point in front], [point.accuracy for point in front]
        axes.plot(across, up, linewidth=1.0, zorder=1, **style)  # type: ignore[arg-type]
