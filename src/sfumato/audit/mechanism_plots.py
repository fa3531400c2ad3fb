"""Pictures of a mechanism audit: scores, ROC curves on logarithmic axes, bounds beside what is promised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sfumato.audit.curves import roc_curve, score_histogram
from sfumato.audit.mechanism import MechanismResult
from sfumato.audit.scores import Scores
from sfumato.privacy.statement import round_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _ACCENT, _SOFT = "#26323f", "#b3541e", "#5b7f95"


def plot_mechanism(
    results: Sequence[MechanismResult], scores: Sequence[tuple[Scores, Scores]], paths: Sequence[Path]
) -> None:
    """One figure, to every path; a path's ending (.png, .svg) chooses the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * max(3, len(results)), 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 1)
    upper, lower = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    for axes, result, sides in zip(
        np.atleast_1d(upper.subplots(1, len(results))), results, scores, strict=True
    ):
        _draw_scores(axes, result, sides)
    left, right = lower.subplots(1, 2)
    fewest = 1 / max(result.repetitions for result in results)
    for result, sides in zip(results, scores, strict=True):
        fpr, tpr = zip(*roc_curve(*sides).points(lowest=fewest), strict=True)
        left.loglog(fpr, tpr, label=f"ε = {round_up(result.nominal_epsilon, 3)}")
    left.plot([fewest, 1], [fewest, 1], color="#9aa5b1", linewidth=0.8)
    left.set(xlim=(fewest, 1), ylim=(fewest, 1), title="ROC of the likelihood score")
    left.set(xlabel="false positive rate", ylabel="true positive rate")
    left.legend(frameon=False)
    _draw_bounds(right, results)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    for path in paths:
        figure.savefig(path, dpi=130)


def _draw_scores(axes: Axes, result: MechanismResult, sides: tuple[Scores, Scores]) -> None:
    bins = score_histogram(*sides)
    axes.stairs(bins["num_out"], bins["edges"], fill=True, alpha=0.5, color=_SOFT, label="without the canary")
    axes.stairs(bins["num_in"], bins["edges"], fill=True, alpha=0.5, color=_ACCENT, label="with it")
    axes.set(
        title=f"nominal ε = {round_up(result.nominal_epsilon, 3)}", xlabel="log-likelihood ratio", yticks=[]
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _draw_bounds(axes: Axes, results: Sequence[MechanismResult]) -> None:
    ordered = sorted(results, key=lambda result: result.nominal_epsilon)
    nominal = [result.nominal_epsilon for result in ordered]
    axes.plot(nominal, nominal, color="#9aa5b1", label="promised")
    axes.plot(
        nominal, [result.ceiling for result in ordered], "v:", color=_INK, label="ceiling of this audit"
    )
    axes.plot(nominal, [result.epsilon for result in ordered], "o-", color=_ACCENT, label="found: at least")
    axes.plot(
        nominal,
        [result.clopper_pearson_epsilon for result in ordered],
        "s--",
        color=_SOFT,
        label="found, nothing assumed (Clopper-Pearson)",
    )
    sure = f"{100 * ordered[0].confidence:g} % sure"
    axes.set(xscale="log", yscale="log", xlabel="nominal ε", ylabel="ε", title=f"Lower bounds, {sure}")
    axes.legend(frameon=False, fontsize=8)
