"""What all studies share on the command line: options, progress, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sfumato.cli import echo_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sfumato.study.documents import StudyResult

Command = TypeVar("Command", bound=Callable[..., Any])


def writes(function: Command) -> Command:
    """The options of every study."""
    out = click.option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("studies"),
        show_default=True,
        help="Folder for NAME.json, NAME.csv, NAME.png and NAME.pdf.",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print the document as JSON.")
    return out(as_json(function))


@contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    from sfumato.cli.progress import make_progress

    progress = make_progress(quiet=quiet)
    try:
        yield partial(progress.computed, what)
    finally:
        progress.close()


def finish(result: StudyResult, figure: Figure, out: Path, as_json: bool, *, columns: Sequence[str]) -> None:
    """Write the files; then the document, or the chosen columns and where the files are."""
    from sfumato.study.documents import write_study

    places = write_study(result, figure, out)
    if as_json:
        echo_json(result.as_dict())
    else:
        table = [list(columns), *([_cell(name, row[name]) for name in columns] for row in result.rows)]
        widths = [max(len(line[index]) for line in table) for index in range(len(columns))]
        for line in table if columns else ():
            click.echo(
                "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            )
        click.echo("written: " + ", ".join(str(place) for place in places))
    if result.notice is not None:
        click.secho(result.notice, fg="red", bold=True, err=True)


def _cell(name: str, value: object) -> str:
    from sfumato.privacy.statement import round_up
    from sfumato.release.escaping import one_line

    if name == "epsilon" and isinstance(value, float):
        return round_up(value)
    return f"{value:.4g}" if isinstance(value, float) else one_line(str(value))
