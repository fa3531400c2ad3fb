"""Files and folders that appear whole or not at all: written under another name, synced, then renamed.

Documents are read with their types checked, whoever wrote them.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from safetensors import SafetensorError

from sfumato.errors import RunError

try:
    import fcntl
except ImportError:  # not on Windows: what killed processes leave there stays until somebody removes it
    fcntl = None

_PREFIX = ".sfumato-unfinished-"
DOCUMENT_LIMIT = 64 * 2**20  # bytes: metrics of a million steps; what is larger is none of our documents
Shape = TypeVar("Shape")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes ``path`` when the block ends well, and vanishes when it does not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        if not path.parent.is_dir():
            raise RunError(
                "cannot-save",
                f"{path} could not be written: there is no folder {path.parent}",
                fix="Create it, or choose another place.",
            ) from error
        raise RunError(
            "cannot-save",
            f"{path} could not be written: {error}",
            why="The disk may be full or read-only. What was saved before is untouched.",
            fix="Make room, then continue with --resume.",
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write a JSON document whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_bytes(path: Path) -> bytes:
    """A document whole. OSError if it cannot be read, ValueError if it is no plain file or far too large."""
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
        raise ValueError(f"{path.name} is not a plain file")
    with open(path, "rb") as file:
        data = file.read(DOCUMENT_LIMIT + 1)
    if len(data) > DOCUMENT_LIMIT:
        raise ValueError(f"{path.name} is larger than {DOCUMENT_LIMIT:,} bytes")
    return data


def read_json(path: Path, shape: type[Shape]) -> Shape:
    """The JSON document in a file; see ``parse_json``."""
    return parse_json(read_bytes(path), shape)


def parse_json(data: bytes | str, shape: type[Shape]) -> Shape:
    """A JSON object whose keys, types and ranges are those of ``shape``, a TypedDict; else ValueError.

    Guarantee: numbers are finite, text is Unicode, and whatever ``shape`` names is of its type. Keys that it
    does not name are kept unchecked, so that files of later versions can be read.
    """
    try:
        plain = msgspec.json.decode(data)
        checked = msgspec.convert(plain, shape)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return {**plain, **checked}


def sync_folder(folder: Path) -> None:
    """Make a rename inside ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def workspace(beside: Path) -> Iterator[Path]:
    """A temporary folder (mode 0700) in ``beside``, on the same disk as what will be renamed into it.

    It is removed at the end. After kill -9 the next workspace in ``beside`` removes it: the lock of
    a process that died, in whatever way, is freed by the operating system.
    """
    beside.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_abandoned(beside)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=beside))
    try:
        with _held(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(beside: Path) -> None:
    for leftover in beside.glob(f"{_PREFIX}*"):
        with suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime < 60.0:  # perhaps made, and about to be locked
                continue
        with _held(leftover) as held:
            if held:
                shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock while inside; yields whether it could be had."""
    descriptor, held = None, False
    try:
        if fcntl is not None:
            with suppress(FileNotFoundError, BlockingIOError, PermissionError):
                descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
        yield held
    finally:
        if descriptor is not None:
            os.close(descriptor)
