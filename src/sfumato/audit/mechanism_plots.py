"""Pictures of a mechanism audit: scores, ROC curves on logarithmic axes, bounds beside what is promised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr, ndtri

from sfumato.audit.curves import roc_curve, score_histogram
from sfumato.audit.mechanism_results import MechanismResult
from sfumato.audit.scores import Scores
from sfumato.privacy.statement import round_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_INK, _PALE, _IN, _OUT = "#26323f", "#9aa5b1", "#b3541e", "#3f6f8f"
_DEEPEST = 0.85  # of the colour map: its brightest end is hard to see on white


def plot_mechanism(
    results: Sequence[MechanismResult], scores: Sequence[tuple[Scores, Scores]], paths: Sequence[Path]
) -> None:
    """One figure, to every path; a path's ending (.png, .svg) chooses the format."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(
        {
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": _INK,
            "axes.titlelocation": "left",
            "legend.frameon": False,
        }
    ):
        figure = Figure(figsize=(max(8.0, 2.6 * len(results)), 6.2), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(2, 1, height_ratios=(0.8, 1.0))
        upper, lower = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
        _draw_histograms(upper, results, scores)
        left, right = lower.subplots(1, 2)
        _draw_roc(left, results, scores)
        _draw_bounds(right, results)
        for path in paths:
            figure.savefig(path, dpi=150)


def _draw_histograms(
    figure: Figure | SubFigure, results: Sequence[MechanismResult], scores: Sequence[tuple[Scores, Scores]]
) -> None:
    panels = np.atleast_1d(figure.subplots(1, len(results)))
    for axes, result, sides in zip(panels, results, scores, strict=True):
        bins = score_histogram(*sides)
        for name, side, colour, label in (
            ("num_out", sides[1], _OUT, "canary out"),
            ("num_in", sides[0], _IN, "canary in"),
        ):
            density = np.array(bins[name]) / len(side)
            axes.stairs(density, bins["edges"], fill=True, alpha=0.25, color=colour)
            axes.stairs(density, bins["edges"], color=colour, linewidth=1.1, label=label)
        axes.axvline(0, color=_INK, linewidth=0.8, linestyle=":")
        axes.set(title=f"ε = {round_up(result.nominal_epsilon, 3)}", yticks=[], ylim=(0, None))
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("log-likelihood ratio")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2)
    figure.suptitle(
        "Scores of the canaries; guessed in, right of the dotted line", x=0.01, ha="left", fontsize=10
    )


def _draw_roc(
    axes: Axes, results: Sequence[MechanismResult], scores: Sequence[tuple[Scores, Scores]]
) -> None:
    from matplotlib import colormaps

    fewest = 10.0 ** np.floor(np.log10(1 / max(len(sides[1]) for sides in scores)))
    shades = colormaps["viridis"](np.linspace(0, _DEEPEST, len(results)))[::-1]
    rates = np.geomspace(fewest, 1, 200)
    for result, sides, colour in zip(results, scores, shades, strict=True):
        # a rate of fewer than one score was not seen
        fpr, tpr = np.array(roc_curve(*sides).points(lowest=1 / len(sides[1]))).T
        seen = tpr * len(sides[0]) >= 1
        axes.loglog(
            fpr[seen],
            tpr[seen],
            color=colour,
            label=f"ε = {round_up(result.nominal_epsilon, 3)}",
            linewidth=1.4,
        )
        if result.sampling_rate == 1:  # the guarantee is Gaussian
            axes.plot(rates, ndtr(result.mu_gdp + ndtri(rates)), color=colour, linewidth=0.8, linestyle="--")
    axes.plot([fewest, 1], [fewest, 1], color=_PALE, linewidth=0.8, label="guessing")
    if any(result.sampling_rate == 1 for result in results):
        axes.plot([], [], color=_INK, linewidth=0.8, linestyle="--", label="largest that is allowed")
    axes.set(xlim=(fewest, 1), ylim=(fewest, 1.3), title="ROC of the likelihood score")
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.legend(loc="lower right")


def _draw_bounds(axes: Axes, results: Sequence[MechanismResult]) -> None:
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    ordered = sorted(results, key=lambda result: result.nominal_epsilon)
    nominal = [result.nominal_epsilon for result in ordered]
    bare = [result.clopper_pearson_epsilon for result in ordered]
    ends = np.array([nominal[0] / 1.3, nominal[-1] * 1.3])
    axes.plot(
        nominal, [result.ceiling for result in ordered], "v:", color=_INK, label="ceiling of this audit"
    )
    axes.plot(ends, ends, color=_PALE, label="promised")
    axes.plot(nominal, [result.epsilon for result in ordered], "o", color=_IN, label="found")
    axes.plot(nominal, bare, "s--", color=_OUT, linewidth=0.9, markersize=4, label="found, nothing assumed")
    for result in ordered:
        axes.annotate(
            f"{100 * result.share:.0f} %",
            (result.nominal_epsilon, result.epsilon),
            xytext=(5, -11),
            textcoords="offset points",
            color=_IN,
        )
    sure = f"{100 * ordered[0].confidence:g} % sure"
    axes.set(xscale="log", yscale="log", xlabel="ε promised", ylabel="ε", title=f"Lower bounds, {sure}")
    # what assumes nothing may find nothing: its points may lie below
    axes.set(xlim=tuple(ends), ylim=(nominal[0] / 12, 2 * max(result.ceiling for result in ordered)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(nominal, [round_up(value, 3) for value in nominal])
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.9), fontsize=8)
