"""``sfumato ledger``: what each data set has spent over all runs, and how much it may."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sfumato.cli import echo_json
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.ledger.ledger import Ledger, Record
    from sfumato.ledger.totals import Unit


@click.group("ledger")
def command() -> None:
    """Show or cap what each data set has spent, over all runs."""


@command.command("show")
@click.argument("data", required=False)
@click.option("--delta", type=float, help="δ of the totals; the smallest of the runs by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(data: str | None, delta: float | None, as_json: bool) -> None:
    """Spending of DATA (a folder, a known name or the start of a fingerprint), or of every data set."""
    from sfumato.ledger.ledger import Ledger

    with Ledger.open() as ledger:
        chosen = [_find(ledger, data)[0]] if data is not None else list(ledger.datasets())
        sheets = [_sheet(ledger, fingerprint, delta) for fingerprint in chosen]
        if as_json:
            echo_json({"ledger": str(ledger.path), "datasets": sheets})
            return
        click.echo(f"Ledger {ledger.path}")
        if not sheets:
            click.echo("No run has been recorded yet.")
        for sheet in sheets:
            _print(sheet)


@command.command("cap")
@click.argument("data")
@click.option("--epsilon", type=float, help="The most that all runs together may spend.")
@click.option("--delta", type=float, help="At this δ; 1e-5 by default.", default=1e-5)
@click.option("--unit", type=click.Choice(["image", "patient"]), default="image", show_default=True)
@click.option("--patient-from", metavar="REGEX", help="Finds the patient in each file's path, as in train.")
@click.option("--lift", is_flag=True, help="Remove the cap.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def cap(
    data: str,
    epsilon: float | None,
    delta: float,
    unit: Unit,
    patient_from: str | None,
    lift: bool,
    as_json: bool,
) -> None:
    """Cap the ε of DATA: training refuses to start a run that could exceed it."""
    from sfumato import accounting
    from sfumato.ledger.ledger import Cap, Ledger

    if lift == (epsilon is not None):
        raise ConfigError(
            "no-cap-given", "neither or both of --epsilon and --lift are given.", fix="Give one."
        )
    if epsilon is not None:
        accounting.check_epsilon(epsilon)
    accounting.check_delta(delta)
    with Ledger.open() as ledger:
        fingerprint, description = _find(ledger, data, patient_from)
        limit = None if epsilon is None else Cap(unit=unit, epsilon=epsilon, delta=delta)
        ledger.set_cap(fingerprint, limit, unit=unit, **description)
        sheet = _sheet(ledger, fingerprint, delta)
    if as_json:
        echo_json(sheet)
    else:
        _print(sheet)


@command.command("close")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def close(run: str, as_json: bool) -> None:
    """Declare that RUN, a folder or an id, will not go on: only what it may have used counts from now on.

    A process that still works on it stops before it uses or shows anything more.
    """
    from sfumato.ledger.ledger import Ledger

    run_id = _id_of(run)
    with Ledger.open() as ledger:
        known = [record.run_id for each in ledger.datasets() for record in ledger.records(each)]
        if run_id not in known:
            raise ConfigError(
                "unknown-run",
                f"no run {run_id!r} is on record.",
                fix="Give a run's folder, or its id as sfumato ledger show has it.",
            )
        ledger.close_run(run_id)
    if as_json:
        echo_json({"run_id": run_id, "finished": True})
        return
    click.echo(f"Run {run_id} is closed.")


@command.command("import")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def import_command(folders: tuple[Path, ...], as_json: bool) -> None:
    """Take over the records that run FOLDERS keep of themselves, after a ledger was lost or moved."""
    from sfumato.ledger.ledger import Ledger

    with Ledger.open() as ledger:
        recorded = {
            folder: ledger.import_folder(folder) or ledger.import_folder(folder / "state")
            for folder in folders
        }
    if as_json:
        echo_json(
            [{"folder": str(folder), "recorded": was_recorded} for folder, was_recorded in recorded.items()]
        )
        return
    for folder, was_recorded in recorded.items():
        click.echo(f"{folder}: {'recorded' if was_recorded else 'has no record of spending'}")


def _id_of(run: str) -> str:
    """The id of a run, out of its folder's own record if ``run`` is one."""
    from sfumato.ledger.receipt import read_receipt

    for folder in (Path(run), Path(run, "state")):
        receipt = read_receipt(folder) if folder.is_dir() else None
        if receipt is not None:
            return receipt.record.run_id
    return run


def _find(ledger: Ledger, data: str, patient_from: str | None = None) -> tuple[str, dict[str, Any]]:
    """A data set on record, by the start of its fingerprint; or one to be loaded, with its description."""
    matches = [
        (fingerprint, name)
        for fingerprint, name in ledger.datasets().items()
        if len(data) >= 6 and fingerprint.startswith(data)
    ]
    if len(matches) == 1:
        return matches[0][0], {}
    from sfumato.data import load_data

    splits = load_data(data, patient_from=patient_from)
    train = splits.train
    description = {
        "name": train.name,
        "image_ids": train.content_ids,
        "patient_names": splits.names_of(train),
    }
    return train.fingerprint, description


def _sheet(ledger: Ledger, fingerprint: str, delta: float | None) -> dict[str, Any]:
    from sfumato.ledger.totals import total_of, units_of

    records = ledger.records(fingerprint)
    caps = ledger.caps(fingerprint)
    plans = [record.plan for record in records if record.counted and record.plan is not None]
    at = delta or min([plan.delta for plan in plans] + [cap.delta for cap in caps], default=1e-5)
    totals = []
    for unit in units_of(records):
        total = total_of(ledger.records(fingerprint, unit=unit), unit=unit, delta=at)
        totals.append(
            {
                "unit": unit,
                "epsilon": total.epsilon if math.isfinite(total.epsilon) else None,
                "delta": at,
                "neighbouring": total.neighbouring,
                "accountant": total.accountant,
                "num_runs": total.num_runs,
            }
        )
    return {
        "fingerprint": fingerprint,
        "name": ledger.datasets().get(fingerprint, ""),
        "totals": totals,
        "caps": [{"unit": cap.unit, "epsilon": cap.epsilon, "delta": cap.delta} for cap in caps],
        "unknown": ledger.unknown(fingerprint),
        "runs": [_line(record, fingerprint) for record in records],
    }


def _line(record: Record, fingerprint: str) -> dict[str, object]:
    plan = record.plan
    epsilon = None
    if plan is not None and record.counted and record.reserved_steps:
        from dataclasses import replace

        epsilon = replace(plan, num_steps=record.reserved_steps).epsilon
    return {
        "run_id": record.run_id,
        "label": record.label,
        "started": record.started,
        "unit": plan.unit if plan is not None else None,
        "steps": record.reserved_steps,
        "planned_steps": plan.num_steps if plan is not None else None,
        "epsilon": epsilon,
        "delta": plan.delta if plan is not None else None,
        "finished": record.finished,
        "counted": record.counted,
        "kind": "private" if record.counted else ("seeded" if plan is not None else "without privacy"),
        "on_related_data": record.fingerprint != fingerprint,
    }


def _print(sheet: dict[str, Any]) -> None:
    from sfumato.privacy.statement import round_up

    click.echo(f"\n{sheet['name'] or 'unnamed'}  {sheet['fingerprint'][:16]}")
    for total in sheet["totals"]:
        epsilon = "no bound" if total["epsilon"] is None else round_up(total["epsilon"])
        click.echo(
            f"  spent per {total['unit']}: ε = {epsilon} at δ = {total['delta']:g} "
            f"({_runs(total['num_runs'])}, {total['neighbouring']}, {total['accountant']})"
        )
    for cap in sheet["caps"]:
        click.echo(f"  cap per {cap['unit']}: ε = {cap['epsilon']:g} at δ = {cap['delta']:g}")
    if sheet["unknown"]:
        click.echo(
            f"  its {' and '.join(sheet['unknown'])} are not known, so it counts together with every data "
            "set; training on it again tells them."
        )
    for run in sheet["runs"]:
        spent = f"ε = {round_up(run['epsilon'])}" if run["epsilon"] is not None else run["kind"]
        state = "finished" if run["finished"] else "open"
        related = ", on related data" if run["on_related_data"] else ""
        of = f" of {run['planned_steps']}" if run["planned_steps"] is not None else ""
        click.echo(
            f"  {run['run_id']}  {run['started']}  {run['steps']}{of} steps, {spent}, {state}{related}  "
            f"{run['label']}"
        )
    others = [run for run in sheet["runs"] if not run["counted"]]
    if others:
        click.echo(
            f"  {_runs(len(others))} seeded or without privacy, and so without ε: publish nothing of that, "
            "nor settings chosen by it."
        )


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
