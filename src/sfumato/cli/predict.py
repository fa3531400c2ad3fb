"""``sfumato predict``: classify images with a released model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sfumato.cli import echo_json
from sfumato.release.escaping import one_line

if TYPE_CHECKING:
    from sfumato.release.image_files import FileResult
    from sfumato.release.release import Prediction, ReleasedModel

_NAMED = 10  # skipped files that are listed by name


@click.command("predict")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--top", type=click.IntRange(1), default=3, show_default=True, help="Classes shown per image.")
@click.option(
    "--csv", "table", type=click.Path(path_type=Path, dir_okay=False), help="Write a table to this file."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run: Path, images: tuple[Path, ...], top: int, table: Path | None, as_json: bool) -> None:
    """Classify IMAGES, files or folders of files, with a finished RUN or a release folder.

    Files that cannot be read are listed at the end, and the exit code is then 1.
    """
    from sfumato.release.card import headline
    from sfumato.release.image_files import classify_files, find_images, write_csv
    from sfumato.release.release import load

    released = load(run)
    files, skipped = find_images(images)
    results = []
    for result in classify_files(released, files):
        results.append(result)
        if not as_json:
            _echo(result, released, top)
    if as_json:
        echo_json([_as_dict(result, released) for result in results])
    if table is not None:
        write_csv(table, results, released.classes)
        click.echo(f"{len(results):,} rows in {one_line(str(table))}", err=True)
    if not released.privacy.get("releasable"):
        click.secho(headline(released.privacy), fg="red", err=True)
    _note_skipped(skipped)
    _end_with_broken([result for result in results if result.error is not None], len(results))


def _echo(result: FileResult, released: ReleasedModel, top: int) -> None:
    """A line for a file that was classified."""
    from sfumato.release.image_files import ranked

    if result.prediction is None:
        return
    if result.prediction.findings is not None:
        click.echo(_findings_line(result.file, result.prediction, released, top))
        return
    label, best = result.prediction.label, result.prediction.probability
    others = ranked(result.prediction, released.classes, top)
    also = [f"{one_line(name)} {100 * chance:.1f} %" for name, chance in others if name != label]
    line = f"{one_line(str(result.file))}  {one_line(label)} {100 * best:.1f} %"
    click.echo(f"{line}  ({', '.join(also[: top - 1])})" if also[: top - 1] else line)


def _findings_line(file: Path, each: Prediction, released: ReleasedModel, top: int) -> str:
    """The findings that are called, each with its probability, then the likeliest of the others."""
    from sfumato.release.image_files import ranked

    every = ranked(each, released.classes, len(released.classes))
    shown = [f"{one_line(name)} {100 * chance:.1f} %" for name, chance in every]
    count = len(each.findings or ())
    called, others = shown[:count], shown[count:][:top]
    line = f"{one_line(str(file))}  {', '.join(called) or 'no finding'}"
    return f"{line}  ({', '.join(others)})" if others else line


def _as_dict(result: FileResult, released: ReleasedModel) -> dict[str, Any]:
    guarantee = {key: released.privacy.get(key) for key in ("epsilon", "releasable")}
    each = result.prediction
    if each is None:
        error = None if result.error is None else result.error.as_dict()
        return {"file": str(result.file), "label": None, "error": error, **guarantee}
    return {
        "file": str(result.file),
        "label": each.label,
        "probability": each.probability,
        "index": each.index,
        "probabilities": dict(zip(released.classes, each.probabilities, strict=True)),
        **({} if each.findings is None else {"findings": list(each.findings)}),
        **guarantee,
    }


def _note_skipped(skipped: Sequence[Path]) -> None:
    """Say which files of the folders were left out for their ending."""
    if not skipped:
        return
    named = ", ".join(one_line(str(path)) for path in skipped[:_NAMED])
    more = f" and {len(skipped) - _NAMED:,} more" if len(skipped) > _NAMED else ""
    files = "1 file" if len(skipped) == 1 else f"{len(skipped):,} files"
    click.echo(f"Skipped {files}, hidden or without the ending of an image: {named}{more}", err=True)


def _end_with_broken(broken: Sequence[FileResult], total: int) -> None:
    """List the files that could not be read, and end with 1 if there are any."""
    if not broken:
        return
    click.secho(f"{len(broken):,} of {total:,} files could not be read:", fg="red", err=True)
    for result in broken:
        if result.error is not None:
            click.echo(f"  [{result.error.code}] {one_line(result.error.what)}", err=True)
    sys.exit(1)
