"""One way to write, to lock and to find the user's folders.

Files and folders appear whole or not at all: they are written under another name, synced, then renamed.
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
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, TypeVar, cast

import filelock
import msgspec
import platformdirs
from safetensors import SafetensorError

from sfumato.errors import RunError

_PREFIX = ".sfumato-unfinished-"
_WRITING = "tmp"  # how the names of files end that are being written
DOCUMENT_LIMIT = 64 * 2**20  # bytes: metrics of a million steps; what is larger is none of our documents
Shape = TypeVar("Shape")


def cache_home(kind: Literal["decoded", "features"]) -> Path:
    """Where what can be computed again is kept: ``SFUMATO_CACHE``, else below the user's cache folder.

    In ``SFUMATO_CACHE`` decoded images lie at the top and features in ``features``.
    """
    given = os.environ.get("SFUMATO_CACHE")
    if not given:
        return _user_cache() / kind
    return Path(given).expanduser() / "features" if kind == "features" else Path(given).expanduser()


def data_home() -> Path:
    """Where known sets are looked for and written: ``SFUMATO_DATA``, else the user's cache folder."""
    given = os.environ.get("SFUMATO_DATA")
    return Path(given).expanduser() if given else _user_cache()


def ledger_home() -> Path:
    """The ledger's file: ``SFUMATO_LEDGER``, else ``ledger.sqlite`` in the user's data folder."""
    given = os.environ.get("SFUMATO_LEDGER")
    if given:
        return Path(given).expanduser()
    return platformdirs.user_data_path("sfumato", appauthor=False) / "ledger.sqlite"


def _user_cache() -> Path:
    return platformdirs.user_cache_path("sfumato", appauthor=False)  # ~/.cache/sfumato on Linux


def hold(path: Path) -> AbstractContextManager[object]:
    """Take the lock of the file ``path`` (made with mode 0600), to be released by the context's end.

    Guarantee: one process at a time; the operating system frees the lock of a process that died, in whatever
    way. BlockingIOError at once if another holds it, OSError where the file system has no such locks.
    """
    # A soft lock is a mere file, which a killed process would leave behind for ever.
    lock = filelock.FileLock(path, blocking=False, mode=0o600, fallback_to_soft=False, thread_local=False)
    try:
        return lock.acquire()
    except filelock.Timeout as error:
        raise BlockingIOError(f"another process holds {path}") from error


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """A new, empty file that becomes ``path`` when the block ends well, and vanishes when it does not.

    Guarantee: after a crash at any instant ``path`` holds its old content or the new one, complete, and is on
    the disk when the block has ended. ``mode`` is subject to the umask. RunError if the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{_WRITING}")
    try:
        temporary.unlink(missing_ok=True)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield temporary
        put(temporary, path)
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


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left of ``replacing``; only where no other process may be writing."""
    for leftover in folder.glob(f".*.{_WRITING}"):
        with suppress(OSError):
            leftover.unlink()


def put(ready: Path, place: Path) -> None:
    """Rename ``ready`` to ``place`` on the same disk, durably.

    A file is synced and replaces one that is there, at one instant. A folder must have synced files inside,
    and ``place`` must be free: OSError if it is not.
    """
    if ready.is_file():
        with open(ready, "rb+") as file:
            sync(file)
    os.replace(ready, place)
    sync_folder(place.parent)


def replace_folder(ready: Path, place: Path) -> None:
    """Rename the folder ``ready``, which lies in a workspace, to ``place``, in exchange for what is there.

    Guarantee: ``place`` never holds a mixture. Killed in between, a process leaves no ``place`` at all.
    """
    if place.exists():
        os.replace(place, ready.with_name(f"{ready.name}.replaced"))  # it vanishes with the workspace
    put(ready, place)


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write a JSON document whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def check_plain(path: Path) -> None:
    """ValueError for what is no plain file, OSError if it is not there: opening a pipe would wait for ever.

    Call it before a library opens a file that may come from a stranger.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path.name} is not a plain file")


def read_bytes(path: Path) -> bytes:
    """A document whole. OSError if it cannot be read, ValueError if it is no plain file or far too large."""
    check_plain(path)
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
    return cast(Shape, {**plain, **cast(dict[str, Any], checked)})


def sync(file: IO[bytes]) -> None:
    """Bring what was written to an open file onto the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename inside ``folder`` durable."""
    if os.name == "nt":  # Windows opens no folders; its file system keeps a journal of renames
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def workspace(beside: Path) -> Iterator[Path]:
    """A temporary folder (mode 0700) in ``beside``, on the same disk as what will be renamed into it.

    It is removed at the end. After kill -9 the next workspace in ``beside`` removes it, since the lock inside
    is then free.
    """
    beside.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_abandoned(beside)
    folder, lock = _locked_folder(beside)
    try:
        with lock:
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _locked_folder(beside: Path) -> tuple[Path, AbstractContextManager[object]]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=beside))
        try:
            return folder, hold(folder / "lock")
        except (BlockingIOError, FileNotFoundError):  # taken for abandoned before its lock was held
            continue
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _remove_abandoned(beside: Path) -> None:
    for leftover in beside.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # removed by another process, held by its owner, or of another user
            if not (leftover / "lock").exists() and time.time() - leftover.stat().st_mtime < 60.0:
                continue  # perhaps made just now, and about to be locked
            with hold(leftover / "lock"):
                shutil.rmtree(leftover, ignore_errors=True)
            shutil.rmtree(leftover, ignore_errors=True)  # Windows keeps an open file: the lock itself
