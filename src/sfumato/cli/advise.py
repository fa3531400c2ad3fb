"""``sfumato advise``: which recipe for these images, beside what else there is; spends nothing."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from sfumato.cli import echo_json, split_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sfumato.recipes.reference import Measured
    from sfumato.run.advice import Advice, Expectation

# Of all data that we measured on, those that stand for small and large sets.
_SHOWN = (("chest-xray", "auc", "X-rays, AUC"), ("cifar10", "accuracy", "CIFAR-10, %"))


@click.command("advise")
@click.argument("data")
@click.option("--epsilon", type=float, required=True, help="Privacy budget ε: 8 is weak, 3 medium, 1 strong.")
@click.option("--unit", type=click.Choice(["image", "patient"]), default="image", help="What is protected.")
@click.option("--patient-from", metavar="REGEX", help="Finds the patient in each file's path.")
@click.option("--findings", metavar="A,B", help="Any number per image: the manifest's findings, in order.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), help="The time that you have.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    data: str,
    epsilon: float,
    unit: str,
    patient_from: str | None,
    findings: str | None,
    minutes: float | None,
    as_json: bool,
) -> None:
    """Compare the ways to train on DATA: time, accuracy on other data, what they use. Spends nothing.

    Only public facts decide: how many units and classes there are, the budget, this machine, what is
    installed. No image is opened.
    """
    advice = advice_for(
        data,
        epsilon=epsilon,
        unit=unit,
        patient_from=patient_from,
        minutes=minutes,
        findings=split_names(findings),
        quiet=as_json,
    )
    if as_json:
        echo_json(_document(advice))
        return
    facts = advice.facts
    click.echo(f"{_public(advice)}: {advice.chosen.recipe}, {advice.reason}.\n")
    _echo_table(advice)
    click.echo(
        "\nOurs are medians of runs on other images (results/README.md): yours will differ. Minutes are "
        f"those of idle cores, scaled to your {facts.num_cores}."
    )
    if facts.unit == "patient":
        click.echo("Each patient is taken to have two images: how many they have is private.")
    if facts.has_accelerator:
        click.echo("There is a graphics card; none was measured, so expect less time than that.")
    if "data.class_counts" in advice.settings:
        click.echo("How frequent the classes are is released with noise, counted in ε (docs/evaluation.md).")
    for line in missing_lines(advice):
        click.echo(line)
    flags = {"--unit": unit if unit != "image" else None, "--patient-from": patient_from}
    flags |= {"--findings": findings, "--minutes": None if minutes is None else f"{minutes:g}"}
    words = [word for name, value in flags.items() if value is not None for word in (name, value)]
    call = shlex.join(["sfumato", "train", data, *words, "--epsilon", f"{epsilon:g}"])
    click.echo(f"Nothing was spent. To train so: {call}")


def advice_for(
    data: str,
    *,
    epsilon: float | None,
    unit: str,
    patient_from: str | None,
    minutes: float | None,
    classes: tuple[str, ...] | None = None,
    findings: Sequence[str] | None = None,
    quiet: bool = False,
) -> Advice:
    """Count what is public of ``data``, showing how far that is unless ``quiet``, and choose."""
    from sfumato.accounting import check_budget
    from sfumato.cli.progress import make_progress
    from sfumato.data.counting import count_units
    from sfumato.run.advice import advise, facts_of
    from sfumato.run.progress import listing_counter, reading_counter

    if epsilon is not None:
        check_budget(epsilon)
    protected: Any = unit
    progress = make_progress(quiet=quiet)
    try:
        counted = count_units(
            data,
            unit=protected,
            patient_from=patient_from,
            classes=classes,
            findings=findings,
            on_progress=reading_counter(progress),
            on_listing=listing_counter(progress),
        )
    finally:
        progress.close()
    return advise(facts_of(counted, unit=protected, epsilon=epsilon, minutes=minutes))


def choice_line(advice: Advice) -> str:
    """The choice in one line, and what else there is."""
    others = [item for item in advice.expectations if item.way != advice.chosen and item.installed]
    listed = "; ".join(f"{item.way.recipe} {_brief(item)}" for item in others[:3])
    own = next(item for item in advice.expectations if item.way == advice.chosen)
    return (
        f"Chosen     {advice.chosen.recipe} {_brief(own)}. Else: {listed}. sfumato advise compares them all."
    )


def missing_lines(advice: Advice) -> list[str]:
    """What better ways lack, and how to get it."""
    from sfumato.run.advice import INSTALL

    if not advice.missing:
        return []
    best = advice.missing[0]
    return [f"Better, but not installed: {best.way.recipe} {_brief(best)}. {INSTALL}"]


def _public(advice: Advice) -> str:
    facts = advice.facts
    return (
        f"For {facts.num_units:,} {facts.unit}s in {facts.num_classes} classes at ε = {facts.epsilon:g} "
        f"on {facts.num_cores} cores"
    )


def _brief(item: Expectation) -> str:
    """Time, and the first of our figures."""
    figures = [
        f"{name} {found.median:g} at ε = {found.epsilon:g}"
        for data, metric, name in _SHOWN
        if (found := _figure(item, data, metric)) is not None
    ]
    return f"(about {_minutes(item)} min; {figures[0] if figures else 'not measured'})"


def _figure(item: Expectation, data: str, metric: str) -> Measured | None:
    return next((each for each in item.measured if (each.data, each.metric) == (data, metric)), None)


def _minutes(item: Expectation) -> str:
    return f"{item.minutes:.0f}" if item.minutes >= 1 else "1"


def _echo_table(advice: Advice) -> None:
    rows = [("", "recipe", "minutes", *(name for _, _, name in _SHOWN), "uses")]
    for item in advice.expectations:
        found = [_figure(item, data, metric) for data, metric, _ in _SHOWN]
        cells = ["-" if each is None else f"{each.median:g} (ε = {each.epsilon:g})" for each in found]
        mark = "*" if item.way == advice.chosen else ""
        uses = item.way.uses if item.installed else f"{item.way.uses}; NOT INSTALLED"
        rows.append((mark, item.way.recipe, _minutes(item), *cells, uses))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _document(advice: Advice) -> dict[str, Any]:
    from msgspec import to_builtins

    from sfumato.run.advice import INSTALL

    return {
        "facts": {**asdict(advice.facts), "weights": sorted(advice.facts.weights)},
        "chosen": advice.chosen.recipe,
        "settings": advice.settings,
        "reason": advice.reason,
        "ways": [
            {
                "recipe": item.way.recipe,
                "settings": dict(item.way.settings),
                "minutes": round(item.minutes, 1),
                "measured": to_builtins(item.measured),
                "uses": item.way.uses,
                "installed": item.installed,
                "install": None if item.installed else INSTALL,
            }
            for item in advice.expectations
        ],
    }
