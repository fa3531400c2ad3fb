"""``sfumato export``: a release as one file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click

from sfumato.cli import echo_json


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--to", type=click.Choice(["onnx", "torch-export"]), default="onnx", show_default=True, help="The format."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file; by default RUN/model.onnx or .pt2.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run: Path, to: str, out: Path | None, as_json: bool) -> None:
    """Write the model of a finished RUN or a release folder as one file, its statement inside."""
    from sfumato.release.card import headline
    from sfumato.release.export import ENDINGS, Format, export
    from sfumato.release.release import load

    released, kind = load(run), cast(Format, to)
    path = out or run / f"model{ENDINGS[kind]}"
    difference = export(released, path, to=kind)
    if as_json:
        guarantee = {key: released.privacy.get(key) for key in ("epsilon", "releasable")}
        echo_json({"file": str(path), "format": to, "largest_difference": difference, **guarantee})
    else:
        click.echo(f"{path}   (outputs equal to {difference:.1g}; the statement is inside)")
    if not released.privacy["releasable"]:
        click.secho(headline(released.privacy), fg="red", err=True)
