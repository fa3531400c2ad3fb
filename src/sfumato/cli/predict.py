"""``sfumato predict``: classify images with a released model."""

from __future__ import annotations

from pathlib import Path

import click

from sfumato.cli import echo_json
from sfumato.errors import DataError
from sfumato.release.escaping import one_line


@click.command("predict")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run: Path, images: tuple[Path, ...], as_json: bool) -> None:
    """Classify IMAGES, files or folders of files, with a finished RUN or a release folder."""
    from dataclasses import asdict

    from sfumato.release.release import load

    files = find_files(images)
    released = load(run)
    predictions = released.predict(files)
    if as_json:
        guarantee = {key: released.privacy.get(key) for key in ("epsilon", "releasable")}
        echo_json(
            [
                {"file": str(file), **asdict(each), **guarantee}
                for file, each in zip(files, predictions, strict=True)
            ]
        )
        return
    width = max(len(str(file)) for file in files)
    for file, each in zip(files, predictions, strict=True):
        click.echo(f"{one_line(str(file)):<{width}}  {one_line(each.label)}  {100 * each.probability:.1f} %")
    if not released.privacy.get("releasable"):
        from sfumato.release.card import headline

        click.secho(headline(released.privacy), fg="red", err=True)


def find_files(places: tuple[Path, ...]) -> list[Path]:
    """The files named, and all image files below the folders named."""
    from sfumato.data.readers.decode import EXTENSIONS

    files: list[Path] = []
    for place in places:
        if place.is_dir():
            files += sorted(path for path in place.rglob("*") if path.suffix.lower() in EXTENSIONS)
        else:
            files.append(place)
    if not files:
        raise DataError(
            "no-images", f"no image files in {', '.join(map(str, places))}", fix="Give image files."
        )
    return files
