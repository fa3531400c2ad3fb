"""``sfumato report``: one page for a run, or a comparison of several."""

from __future__ import annotations

from pathlib import Path

import click

from sfumato.cli import echo_json


@click.command("report")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The page's file.")
@click.option("--json", "as_json", is_flag=True, help="Print what the page shows as JSON.")
def command(runs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Write report.html for one RUN, or comparison.html for several."""
    from sfumato.files import write_text
    from sfumato.reporting.records import read_run
    from sfumato.reporting.report import render

    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html"))
    records = [read_run(path) for path in runs]
    write_text(target, render(records))
    if as_json:
        shown = [
            {
                "name": record.name,
                "model": record.config["model"]["name"],
                "data": record.config["data"],
                "accuracy": None if record.scores is None else record.scores["accuracy"],
                "epsilon": record.privacy["epsilon"],
                "delta": record.privacy["delta"],
                "unit": record.privacy["unit"],
                "num_steps": record.privacy.get("num_steps"),
                "releasable": record.privacy["releasable"],
                "seconds": record.environment["seconds"],
            }
            for record in records
        ]
        echo_json({"report": str(target), "runs": shown})
        return
    click.echo(target)
