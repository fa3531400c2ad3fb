"""Table 9 from scores: the bound of ε, AUC and advantage of one audited setting, beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sfumato.audit.bounds import clopper_pearson_bound, epsilon_of_errors
from sfumato.audit.curves import auc, largest_advantage, membership_advantage, roc_curve, score_histogram
from sfumato.audit.paper_settings import PAPER_BOUNDS, Problem, Setting
from sfumato.audit.thresholds import MAX_TRIED, Objective, simultaneous_bounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONFIDENCE = 0.999
HELD_OUT = 0.2  # of the models of each side: they choose the threshold, the others test it
FEWEST = 10  # models a side

Scores = tuple[np.ndarray, np.ndarray]  # of members, of others


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of table 9, with how it came about."""

    epsilon: float  # nominal
    delta: float
    setting: Setting
    num_models: int  # a side, those that chose the threshold included
    lower_bound: float
    lower_bound_of_all: float  # without held-out models: several thresholds that share the failures
    ceiling: float  # what an attack without an error would have shown with as many models
    confidence: float
    auc: float
    auc_interval: tuple[float, float]
    advantage: float
    advantage_upper_bound: float  # of any attack, from ε and δ
    paper: tuple[float, float, float] | None  # lower bound, AUC, advantage; 490,000 models a side
    violates: bool  # of all rows of a table together, if nothing is wrong, with probability 0.001 at most

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def table_row(
    problem: Problem, epsilon: float, setting: Setting, scores: Scores, *, num_rows: int = 1
) -> Row | None:
    """The row of these scores in a table of ``num_rows``; None if there are too few.

    Guarantee: if training is (ε, δ)-DP, ``lower_bound`` exceeds ε with probability at most 0.001: the
    threshold is chosen on models that the bound does not use. ``violates`` has a ``num_rows``-th of that.
    """
    size = min(map(len, scores))
    if size < FEWEST:
        return None
    held = max(2, round(HELD_OUT * size))
    chosen_on = scores[0][:held], scores[1][:held]
    scores_in, scores_out = (side[held:size] for side in scores)
    threshold = _threshold(chosen_on, lambda fpr, fnr: epsilon_of_errors(fpr, fnr, problem.delta))
    bound, surer = (
        clopper_pearson_bound(
            scores_in, scores_out, delta=problem.delta, confidence=confidence, threshold=threshold
        )
        for confidence in (CONFIDENCE, 1 - (1 - CONFIDENCE) / num_rows)
    )
    assert bound.ceiling is not None  # Clopper-Pearson bounds have one
    middle = _threshold(chosen_on, lambda fpr, fnr: 1 - fpr - fnr)
    area = auc(scores_in, scores_out)
    return Row(
        epsilon=epsilon,
        delta=problem.delta,
        setting=setting,
        num_models=size,
        lower_bound=bound.epsilon,
        lower_bound_of_all=clopper_pearson_bound(
            scores[0][:size],
            scores[1][:size],
            delta=problem.delta,
            confidence=CONFIDENCE,
            threshold="bonferroni",
        ).epsilon,
        ceiling=bound.ceiling,
        confidence=CONFIDENCE,
        auc=area.value,
        auc_interval=(area.lower, area.upper),
        advantage=membership_advantage(scores_in, scores_out, threshold=middle).value,
        advantage_upper_bound=largest_advantage(epsilon, problem.delta),
        paper=PAPER_BOUNDS[problem.num_examples].get(int(epsilon)) if epsilon == int(epsilon) else None,
        violates=surer.epsilon > epsilon,
    )


def _threshold(scores: Scores, objective: Objective) -> float:
    """The threshold whose upper error rates on these scores are best."""
    # By bounds that hold together: the luckiest of the extreme thresholds would not be lucky again.
    tried = simultaneous_bounds(*scores, 1 - CONFIDENCE, MAX_TRIED)
    return float(tried.thresholds[tried.best(objective)])


def table_text(rows: Sequence[Row]) -> str:
    """The rows for people."""
    titles = (
        "nominal",
        "models",
        "ε at least",
        "(paper)",
        "ceiling",
        "AUC",
        "(paper)",
        "advantage",
        "(paper)",
    )
    lines = ["".join(f"{title:>11}" for title in (*titles, "at most")) + "   setting"]
    for row in rows:
        bound, area, advantage = ("-",) * 3 if row.paper is None else map("{:g}".format, row.paper)
        values = (
            *(f"{row.epsilon:g}", f"{row.num_models:,}", f"{row.lower_bound:.3f}", bound),
            *(f"{row.ceiling:.2f}", f"{row.auc:.3f}", area, f"{row.advantage:.3f}", advantage),
            f"{row.advantage_upper_bound:.2f}",
        )
        chosen = row.setting
        setting = (
            f"{chosen.canary}, rate {chosen.learning_rate:g}, clip {chosen.clip_norm:g}, "
            f"{chosen.num_steps} updates"
        )
        note = "   VIOLATION" if row.violates else ""
        lines.append("".join(f"{value:>11}" for value in values) + f"   {setting}{note}")
    return "\n".join(lines)


def plot_audit(rows: Sequence[Row], scores: Mapping[float, Scores], path: Path) -> None:
    """Histograms and ROC curves of each nominal ε, and the bounds beside the paper's, as one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * max(3, len(rows)), 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 1)
    upper, lower = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    for axes, row in zip(np.atleast_1d(upper.subplots(1, len(rows))), rows, strict=True):
        _draw_histogram(axes, row, scores[row.epsilon])
    left, right = lower.subplots(1, 2)
    for row in rows:
        curve = roc_curve(*scores[row.epsilon])
        left.plot(curve.fpr, curve.tpr, label=f"ε = {row.epsilon:g}")
    fewest = 1 / max(row.num_models for row in rows)
    left.plot([fewest, 1], [fewest, 1], color="#9aa5b1", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlim=(fewest, 1), ylim=(fewest, 1))
    left.set(xlabel="false positive rate", ylabel="true positive rate")
    left.legend(frameon=False)
    _draw_bounds(right, rows)
    figure.savefig(path, dpi=130)


def _draw_histogram(axes: Axes, row: Row, scores: Scores) -> None:
    bins = score_histogram(*scores)
    axes.stairs(bins["num_out"], bins["edges"], fill=True, alpha=0.5, label="without z")
    axes.stairs(bins["num_in"], bins["edges"], fill=True, alpha=0.5, label="with z")
    axes.set(title=f"nominal ε = {row.epsilon:g}", xlabel="− loss on z", yticks=[])
    axes.legend(frameon=False, fontsize=8)


def _draw_bounds(axes: Axes, rows: Sequence[Row]) -> None:
    nominal = [row.epsilon for row in rows]
    axes.plot(nominal, nominal, color="#9aa5b1", linewidth=0.8, label="nominal ε")
    axes.plot(nominal, [row.ceiling for row in rows], "k:", linewidth=0.8, label="ceiling of this audit")
    axes.plot(nominal, [row.lower_bound for row in rows], "o-", label="lower bound, 99.9 %")
    known = [(row.epsilon, row.paper[0]) for row in rows if row.paper is not None]
    if known:
        axes.plot(*zip(*known, strict=True), "x--", label="De et al. (490,000 a side)")
    axes.set(xlabel="nominal ε", ylabel="ε at least")
    axes.legend(frameon=False, fontsize=8)
