"""What a training would be: its plan, and what it takes here or on other hardware."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from sfumato.cli import echo_json
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from sfumato.recipes.recipe import Recipe
    from sfumato.run.hardware import Projection
    from sfumato.run.prepare import Prepared


def hardware_options(function: Any) -> Any:
    """--hardware and --price of a command that plans."""
    price = click.option(
        "--price",
        type=click.FloatRange(0),
        metavar="DOLLARS",
        help="Of one device for one hour; else an assumption.",
    )
    hardware = click.option(
        "--hardware", metavar="8xA100", help="Time, memory and cost there: RTX8000, 8xA100, cpu:2, …"
    )
    return hardware(price(function))


def check_planned(hardware: str | None, *, dry_run: bool) -> None:
    """Refuse hardware that is unknown, or that would not be used."""
    if hardware is None:
        return
    if not dry_run:
        raise ConfigError(
            "hardware-without-dry-run",
            f"--hardware {hardware} plans for another machine, but the training would run on this one.",
            fix="Add --dry-run, or leave out --hardware.",
        )
    from sfumato.run.hardware import parse_hardware

    parse_hardware(hardware)  # before minutes of decoding


def show_plan(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool,
    force: bool,
    as_json: bool,
    hardware: str | None = None,
    price: float | None = None,
) -> None:
    """Prepare the run, check everything, and say what it takes; nothing is trained or spent."""
    from sfumato.cli.progress import duration, echo_start, make_progress, note_busy_cores
    from sfumato.ledger.receipt import plan_values
    from sfumato.release.run_folder import RunFolder
    from sfumato.run.estimate import estimate
    from sfumato.run.prepare import prepare

    RunFolder(folder).check_usable(recipe, resume=resume)
    progress = make_progress(quiet=as_json)
    note_busy_cores(recipe)
    try:
        prepared = prepare(recipe, force=force, observer=progress, rows=False)
    finally:
        progress.close()
    cost = estimate(prepared)
    elsewhere, reason = _elsewhere(prepared, cost.rows_per_step, hardware, price)
    if as_json:
        plan = prepared.plan
        echo_json(
            {
                "folder": str(folder),
                "epsilon": None if plan is None else plan.epsilon,
                "plan": plan_values(plan),
                "resolved": prepared.resolved.document(),
                "releasable": prepared.releasable,
                **asdict(cost),
                "hardware": None if elsewhere is None else asdict(elsewhere),
            }
        )
        return
    echo_start(prepared, 0)
    if recipe.pretraining is not None and recipe.model.weights is None:
        click.echo(f"First      pre-training on {recipe.pretraining.data}, not counted below")
    features = f"{duration(cost.feature_seconds)} of it for features, " if cost.feature_seconds else ""
    click.echo(
        f"Time       about {duration(cost.seconds)} ({features}{cost.seconds_per_step:.3g} s per step)"
    )
    click.echo(
        f"Memory     about {cost.memory_bytes / 2**30:.1f} GiB ({cost.microbatch_size} of "
        f"{cost.rows_per_step:,} rows at once)"
    )
    if elsewhere is not None:
        for line in projection_lines(elsewhere):
            click.echo(line)
    elif reason is not None:
        click.echo(f"Elsewhere  {reason}")
    click.echo(f"Folder     {folder}   (not made)")


def _elsewhere(
    prepared: Prepared, rows_per_step: int, hardware: str | None, price: float | None
) -> tuple[Projection | None, str | None]:
    """The projection that was asked for; or why there is none."""
    if hardware is None:
        return None, None
    from sfumato.run.hardware import parse_hardware, project
    from sfumato.run.workload import workload_of_prepared

    try:
        workload = workload_of_prepared(prepared, rows_per_step)
    except ConfigError as error:
        if error.code != "not-counted":
            raise
        return None, f"{hardware}: {error.what}"
    return project(workload, parse_hardware(hardware), dollars_per_hour=price), None


def projection_lines(projection: Projection) -> list[str]:
    """The projection in words."""
    from sfumato.cli.progress import duration

    room = "" if projection.fits else ", more than it has"
    return [
        f"Elsewhere  {projection.hardware}: about {duration(projection.seconds)} "
        f"({projection.seconds_per_step:.3g} s per step), {projection.memory_gib:.1f} GiB each{room}, "
        f"about ${projection.dollars:,.2f}",
        f"           by: {projection.basis}",
    ]
