"""Accuracy along training, against steps and against the budget spent: Klause et al. 2022, figure 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from sfumato.errors import RunError
from sfumato.recipes.recipe import differences
from sfumato.reporting.records import RunRecord
from sfumato.study.documents import COLOURS, MARKERS, StudyResult, new_figure, styled
from sfumato.study.subjects import budget_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Point:
    """A score that may be shown, on the way or at the end."""

    step: int
    epsilon: float | None  # spent by then; None: without privacy
    accuracy: float
    split: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Runs of one recipe that differ in their seeds only, and their points."""

    label: str
    runs: tuple[str, ...]
    points: tuple[tuple[Point, ...], ...]  # of each run

    def means(self) -> list[tuple[Point, float]]:
        """(mean, standard deviation over the runs) at the steps that all runs have a score for."""
        shared = sorted(set.intersection(*({point.step for point in run} for run in self.points)))
        by_step = [{point.step: point for point in run} for run in self.points]
        found = []
        for step in shared:
            values = [run[step].accuracy for run in by_step]
            first = by_step[0][step]
            mean = Point(step=step, epsilon=first.epsilon, accuracy=fmean(values), split=first.split)
            found.append((mean, stdev(values) if len(values) > 1 else 0.0))
        return found


def points_of(record: RunRecord) -> tuple[Point, ...]:
    """The public scores of a run in the order of its steps; test images before public validation images."""
    points = []
    for line in record.metrics:
        accuracy = line.get("test_accuracy", line.get("val_accuracy"))
        if accuracy is not None:
            split = "test" if "test_accuracy" in line else "val"
            points.append(Point(step=line["step"], epsilon=line["epsilon"], accuracy=accuracy, split=split))
    if not points:
        raise RunError(
            "no-curve",
            f"{record.name} has no scores that may be shown",
            why="Scores are taken on the way on test images, or on validation images declared public.",
            fix="Train on data with test/, or declare it: --set data.val_is_public=true.",
        )
    return tuple(points)


def gather_curves(records: Sequence[RunRecord]) -> list[Curve]:
    """Runs whose recipes differ in nothing but the seed become one curve."""
    groups: list[list[RunRecord]] = []
    for record in records:
        for group in groups:
            if set(differences(group[0].recipe, record.recipe)) <= {"training.seed"}:
                group.append(record)
                break
        else:
            groups.append([record])
    models = [group[0].model for group in groups]
    return [
        Curve(
            label=_label(group[0], distinct=models.count(group[0].model) == 1, num_runs=len(group)),
            runs=tuple(record.name for record in group),
            points=tuple(points_of(record) for record in group),
        )
        for group in groups
    ]


def _label(record: RunRecord, *, distinct: bool, num_runs: int) -> str:
    several = f", {num_runs} runs" if num_runs > 1 else ""
    return f"{record.model if distinct else record.name}, {budget_words(record.privacy['epsilon'])}{several}"


def convergence_result(curves: Sequence[Curve]) -> StudyResult:
    """Document and rows, one for each score of each run."""
    rows = [
        {
            "curve": curve.label,
            "run": name,
            "step": point.step,
            "epsilon": point.epsilon,
            "split": point.split,
            "accuracy": point.accuracy,
        }
        for curve in curves
        for name, run in zip(curve.runs, curve.points, strict=True)
        for point in run
    ]
    document = {
        "curves": [
            {
                "label": curve.label,
                "runs": list(curve.runs),
                "mean": [
                    {
                        "step": mean.step,
                        "epsilon": mean.epsilon,
                        "accuracy": mean.accuracy,
                        "deviation": spread,
                    }
                    for mean, spread in curve.means()
                ],
            }
            for curve in curves
        ]
    }
    return StudyResult(study="convergence", document=document, rows=rows)


@styled
def draw_convergence(curves: Sequence[Curve]) -> Figure:
    """Accuracy against steps, and against ε where there is any; bands are deviations over runs."""
    private = any(point.epsilon for curve in curves for run in curve.points for point in run)
    figure, axes = new_figure(6.9 if private else 3.6, 2.6, 1, 2 if private else 1, sharey=True)
    for number, curve in enumerate(curves):
        means = curve.means()
        _draw(axes[0, 0], [float(mean.step) for mean, _ in means], curve, number)
        budgets = [mean.epsilon for mean, _ in means]
        if private and all(budget is not None for budget in budgets):
            _draw(axes[0, 1], [budget or 0.0 for budget in budgets], curve, number)
    splits = {point.split for curve in curves for run in curve.points for point in run}
    axes[0, 0].set_ylabel(f"{' / '.join(sorted(splits))} accuracy (%)")
    axes[0, 0].set_xlabel("steps")
    axes[0, 0].set_xlim(left=0)
    if private:
        axes[0, 1].set_xlabel("ε spent")
    for one in axes[0]:
        one.grid(axis="y")
    axes[0, 0].legend(loc="lower right")
    return figure


def _draw(axes: Axes, across: Sequence[float], curve: Curve, number: int) -> None:
    colour, means = COLOURS[number % len(COLOURS)], curve.means()
    heights = [100 * mean.accuracy for mean, _ in means]
    marker = MARKERS[number % len(MARKERS)] if len(means) <= 30 else None
    axes.plot(across, heights, color=colour, marker=marker, markersize=3, label=curve.label)
    if len(curve.runs) > 1:
        spreads = [100 * spread for _, spread in means]
        low = [max(0.0, height - spread) for height, spread in zip(heights, spreads, strict=True)]
        high = [height + spread for height, spread in zip(heights, spreads, strict=True)]
        axes.fill_between(across, low, high, color=colour, alpha=0.18, linewidth=0)
