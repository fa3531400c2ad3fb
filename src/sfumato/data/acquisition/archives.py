"""Unpacking archives from anywhere: only plain files, only inside the folder, only so many bytes."""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from sfumato.errors import DataError

MAX_FILES = 5_000_000
# Images are compressed already, so an archive that swells a hundredfold is no archive of images.
MAX_RATIO = 100
ALWAYS_ALLOWED_BYTES = 2**30


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar (plain, gzip, bzip2, xz) or zip archive into the existing, empty ``folder``.

    Guarantee: nothing is written outside ``folder``, no links or devices are made, no file is
    written twice, and the sum of all files stays below ``MAX_RATIO`` times the archive (and at
    least 1 GiB). A violation raises; the caller removes what was written until then.
    """
    try:
        if zipfile.is_zipfile(archive):
            members = _zip_members(archive)
        elif archive.stat().st_size and tarfile.is_tarfile(archive):
            members = _tar_members(archive)
        else:
            raise DataError(
                "not-an-archive",
                f"{archive}: is neither a tar nor a zip archive.",
                fix="Give a .tar, .tar.gz, .tgz or .zip file; a folder needs no import.",
            )
        _write(members, archive, folder)
    except FileNotFoundError as error:
        raise DataError(
            "missing-file", f"{archive}: does not exist.", fix="Check the path of the archive."
        ) from error
    except DataError:
        raise
    except Exception as error:  # the readers of seven formats, each with errors of its own for bad bytes
        raise DataError(
            "damaged-archive",
            f"{archive}: {error}.",
            why="The archive is damaged or cut short, or the disk is full.",
            fix="Get the archive again, and check the free space.",
        ) from error


def _write(members: Iterator[tuple[str, IO[bytes]]], archive: Path, folder: Path) -> None:
    budget = max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * archive.stat().st_size)
    budget = min(budget, shutil.disk_usage(folder).free)
    written = 0
    for count, (name, content) in enumerate(members, start=1):
        target = folder / _safe_path(name, archive)
        target.parent.mkdir(parents=True, exist_ok=True)
        if count > MAX_FILES:
            raise unsafe(archive, f"more than {MAX_FILES:,} files")
        try:
            out = target.open("xb")  # exclusive: a second file of that name would overwrite the first
        except FileExistsError:
            raise unsafe(archive, f"{name!r} occurs twice") from None
        with out:
            while block := content.read(1 << 20):
                written += len(block)
                if written > budget:
                    raise unsafe(archive, f"it unpacks to more than {budget:,} bytes")
                out.write(block)


def _tar_members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            if member.isdir():
                _safe_path(member.name, archive)
            elif member.isreg() and not member.issparse():
                content = tar.extractfile(member)
                assert content is not None  # only folders and the like have none
                yield member.name, content
            else:
                raise unsafe(archive, f"{member.name!r} is a link, a device or a sparse file")
            tar.members = []  # type: ignore[attr-defined]  # a list of five million headers would fill the memory


def _zip_members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as bundle:
        for member in bundle.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise unsafe(archive, f"{member.filename!r} is a link or a device")
            if member.flag_bits & 1:
                raise unsafe(archive, f"{member.filename!r} is encrypted")
            if member.is_dir():
                _safe_path(member.filename, archive)
                continue
            with bundle.open(member) as content:
                yield member.filename, content


def _safe_path(name: str, archive: Path) -> Path:
    """The member's place below the folder, or an error if it would lie anywhere else."""
    path = PurePosixPath(name)
    parts = [part for part in path.parts if part != "."]
    bad = not name or "\0" in name or "\\" in name or path.is_absolute() or ".." in parts
    if bad or any(":" in part for part in parts) or len(os.fsencode(name)) > 1000:
        raise unsafe(archive, f"{name[:200]!r} would be written outside its folder or has no portable name")
    return Path(*parts)


def unsafe(archive: Path, reason: str) -> DataError:
    return DataError(
        "unsafe-archive",
        f"{archive}: {reason}.",
        why="An archive may only hold plain files that stay inside its own folder.",
        fix="Do not unpack it; ask whoever made it for a plain archive.",
    )
