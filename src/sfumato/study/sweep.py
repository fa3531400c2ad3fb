"""Accuracy along one setting, out of finished runs: De et al. 2022, figures 2, 3 and 6 to 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sfumato.errors import ConfigError, RunError
from sfumato.recipes.recipe import Recipe
from sfumato.study.comparison import CONFIDENCE, paired_difference
from sfumato.study.conditions import Condition
from sfumato.study.documents import COLOURS, GREY, MARKERS, StudyResult, new_figure, styled
from sfumato.study.reproduction import Reproduction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What a sweep may go along, in the order of preference where several change together.
AXES = {
    "augmentation.views": "views",
    "privacy.clip_norm": "clip norm",
    "privacy.noise_multiplier": "noise multiplier",
    "training.batch_size": "batch size",
    "training.learning_rate": "learning rate",
    "training.num_steps": "steps",
}


@dataclass(frozen=True, kw_only=True)
class SweptPoint:
    """Runs of one condition: their mean accuracy in % with Student's interval, and the paper's figure."""

    curve: str
    place: float
    recipe: str
    mean: float | None  # None: no run is finished
    lower: float | None  # None: fewer than two runs
    upper: float | None
    num_runs: int
    published: float | None


def swept_setting(conditions: Sequence[Condition], over: str | None = None) -> str:
    """The setting that takes most values over the conditions, or the one that was asked for."""
    counts = {path: len({_value(c.recipe, path) for c in conditions} - {None}) for path in AXES}
    path = max(counts, key=lambda name: counts[name]) if over is None else over
    if counts.get(path, 0) < 2:
        varied = [name for name, count in counts.items() if count > 1]
        raise ConfigError(
            "nothing-swept",
            f"the conditions do not differ in {over or 'any setting that is swept'}.",
            fix=f"Give --over {' or '.join(varied)}." if varied else "Take a figure such as de2022/figure2.",
        )
    return path


def sweep(reproduction: Reproduction, path: str) -> list[SweptPoint]:
    """A point for each condition, curve by curve along ``path``."""
    places = [(condition, _value(condition.recipe, path)) for condition in reproduction.conditions]
    known = [(condition, place) for condition, place in places if place is not None]
    splitting = _splitting(known, path)
    points = []
    for condition, place in known:
        values = reproduction.values(condition, "accuracy")
        found = paired_difference(values, dict.fromkeys(values, 0.0))  # Student's interval of the mean itself
        labels = (f"{AXES[name]} {_value(condition.recipe, name):g}" for name in splitting)
        points.append(
            SweptPoint(
                curve=", ".join(labels) or "ours",
                place=place,
                recipe=condition.recipe_name,
                mean=None if found is None else found.mean,
                lower=None if found is None else found.lower,
                upper=None if found is None else found.upper,
                num_runs=len(values),
                published=condition.published.get("accuracy"),
            )
        )
    if not any(point.num_runs for point in points):
        name = f"{reproduction.family.name} ({reproduction.scale})"
        raise RunError(
            "nothing-finished",
            f"no run of {name} is finished in {reproduction.store.out}",
            fix=f"sfumato reproduce {reproduction.family.name} --scale {reproduction.scale} "
            f"--out {reproduction.store.out}",
        )
    return sorted(points, key=lambda point: (point.curve, point.place))


def sweep_result(reproduction: Reproduction, path: str, points: Sequence[SweptPoint]) -> StudyResult:
    """Document and rows, one for each condition."""
    rows: list[Mapping[str, object]] = [
        {
            "curve": point.curve,
            AXES[path].replace(" ", "_"): point.place,
            "accuracy": point.mean,
            "lower": point.lower,
            "upper": point.upper,
            "num_runs": point.num_runs,
            "published": point.published,
            "recipe": point.recipe,
        }
        for point in points
    ]
    document: dict[str, Any] = {
        "name": reproduction.family.name,
        "title": reproduction.family.title,
        "claim": reproduction.family.claim,
        "scale": reproduction.scale,
        "note": reproduction.family.mini_note if reproduction.scale == "mini" else None,
        "over": path,
        "confidence": CONFIDENCE,
        "points": rows,
    }
    return StudyResult(study="sweep", document=document, rows=rows)


@styled
def draw_sweep(path: str, points: Sequence[SweptPoint]) -> Figure:
    """Means with intervals against the setting; in grey what the paper reports for the same conditions."""
    figure, axes = new_figure(3.6, 2.6)
    (panel,) = axes[0]
    for number, curve in enumerate(dict.fromkeys(point.curve for point in points)):
        along = [point for point in points if point.curve == curve]
        _draw_ours([point for point in along if point.mean is not None], panel, curve, number)
        theirs = [(point.place, point.published) for point in along if point.published is not None]
        if theirs:
            panel.plot(
                *zip(*theirs, strict=True),
                color=GREY,
                linestyle="--",
                marker=MARKERS[number % 8],
                markersize=3,
                label=f"theirs{'' if curve == 'ours' else f', {curve}'}",
            )
    places = sorted({point.place for point in points})
    if places[0] > 0 and places[-1] / places[0] > 3:
        panel.set_xscale("log", base=2)
    panel.set_xticks(places, [f"{place:,g}" for place in places])
    panel.minorticks_off()
    panel.set_xlabel(AXES[path])
    panel.set_ylabel("accuracy (%)")
    panel.grid(axis="y")
    if len(panel.get_legend_handles_labels()[1]) > 1:
        panel.legend(loc="best")
    return figure


def _draw_ours(along: Sequence[SweptPoint], panel: Any, curve: str, number: int) -> None:
    means = [point.mean or 0.0 for point in along]
    below = [m - (m if p.lower is None else p.lower) for m, p in zip(means, along, strict=True)]
    above = [(m if p.upper is None else p.upper) - m for m, p in zip(means, along, strict=True)]
    places = [point.place for point in along]
    style = {"color": COLOURS[number % 8], "marker": MARKERS[number % 8], "markersize": 3.5, "capsize": 2}
    panel.errorbar(places, means, yerr=[below, above], label=curve, **style)


def _splitting(known: Sequence[tuple[Condition, float]], path: str) -> list[str]:
    """The other settings that differ between conditions at one place: they tell the curves apart."""
    found = []
    for name in AXES:
        at: dict[float, set[float | None]] = {}
        for condition, place in known:
            at.setdefault(place, set()).add(_value(condition.recipe, name))
        if name != path and any(len(values - {None}) > 1 for values in at.values()):
            found.append(name)
    return found


def _value(recipe: Recipe, path: str) -> float | None:
    section, name = path.split(".")
    value = getattr(getattr(recipe, section), name)
    return None if value is None else float(value)
