"""Decoding that goes on where it was interrupted, in memory that does not grow with the number of files.

What is decoded lies in a folder of its own, beside the cache's entries: the images one after the other, and
for each of them its file's checksum and its content id. Images are on the disk before their rows say so.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sfumato.errors import DataError
from sfumato.files import hold, put, sync

Chunks = Generator[
    tuple[np.ndarray, np.ndarray], None, None
]  # images uint8 (n, C, S, S), content ids int64 (n,)

_ROW = np.dtype([("digest", "V32"), ("id", "<i8")])
_PREFIX = ".decoding-"
_SYNC_BYTES = 64 * 2**20  # images between two syncs: what an interruption loses at most
_SPARE_BYTES = 64 * 2**20  # of the disk, for everybody else
_ABANDONED_SECONDS = 30 * 24 * 3600.0
_WAIT_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """What is to be decoded into one entry of the cache."""

    entry: Path
    how: str  # checksum of how files are decoded
    digests: np.ndarray  # V32 (N,), of the files' bytes, in their order
    image_bytes: int
    decode: Callable[[int], Chunks]  # from this file on

    @property
    def place(self) -> Path:
        """Where it lies until it is whole."""
        return self.entry.parent / f"{_PREFIX}{self.how[:16]}-{self.entry.name[:16]}"

    def complete(self, is_there: Callable[[], bool]) -> None:
        """Decode what is missing and put the whole entry into its place.

        Another process that decodes the same is waited for until ``is_there``; if it dies, this one goes on.
        """
        while not is_there():
            self.entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.place.mkdir(mode=0o700, exist_ok=True)
            try:
                lock = hold(self.place / "lock")
            except (BlockingIOError, FileNotFoundError):  # another's, or removed by another since
                time.sleep(_WAIT_SECONDS)
                continue
            with lock:
                if not is_there():  # another may have finished just now
                    self._go_on()
            shutil.rmtree(self.place, ignore_errors=True)
            return

    def _go_on(self) -> None:
        _remove_abandoned(self.entry.parent)
        inside = self.place / "entry"
        inside.mkdir(mode=0o700, exist_ok=True)
        done = self._common(self.place) or self._inherit()
        self._check_room(done)
        try:
            self._append(done)
        except BaseException:
            if not self._common(self.place):
                shutil.rmtree(self.place, ignore_errors=True)
            raise
        rows = _rows(self.place)
        with (inside / "ids.npy").open("wb") as file:
            np.save(file, np.ascontiguousarray(rows["id"], dtype=np.int64), allow_pickle=False)
            sync(file)
        try:
            put(inside, self.entry)
        except OSError:
            if not self.entry.is_dir():  # another process may have finished the same entry first
                raise

    def _append(self, done: int) -> None:
        """Write the images from number ``done`` on; however it ends, what was written whole is kept."""
        with ExitStack() as stack:
            images = stack.enter_context((self.place / "entry" / "images.u8").open("ab"))
            rows = stack.enter_context((self.place / "rows").open("ab"))
            images.truncate(done * self.image_bytes)
            rows.truncate(done * _ROW.itemsize)
            waiting: list[np.ndarray] = []

            def confirm() -> None:
                if waiting:
                    sync(images)  # before the rows that vouch for them
                    rows.write(np.concatenate(waiting).tobytes())
                    sync(rows)
                    waiting.clear()

            unsynced = 0
            with closing(self.decode(done)) as chunks:  # its threads end with it
                try:
                    for pixels, ids in chunks:
                        # Plain writes: a full disk is then an error here, not a dead process in a memory map.
                        images.write(np.ascontiguousarray(pixels).data)
                        images.flush()
                        part = np.empty(len(ids), dtype=_ROW)
                        part["digest"], part["id"] = self.digests[done : done + len(ids)], ids
                        waiting.append(part)
                        done, unsynced = done + len(ids), unsynced + pixels.nbytes
                        if unsynced >= _SYNC_BYTES:
                            confirm()
                            unsynced = 0
                finally:
                    confirm()

    def _common(self, place: Path) -> int:
        """How many of our files, from the first on, are decoded there."""
        rows = _rows(place)
        images = place / "entry" / "images.u8"
        there = images.stat().st_size // self.image_bytes if images.is_file() else 0
        length = min(len(rows), len(self.digests), there)
        other = np.flatnonzero(rows["digest"][:length] != self.digests[:length])
        return int(other[0]) if len(other) else length

    def _inherit(self) -> int:
        """Take over what an interrupted decoding of nearly the same files has in common with this one.

        A broken image is removed or repaired, and the files before it need not be decoded again.
        """
        found = [
            (count, place)
            for place in self.entry.parent.glob(f"{_PREFIX}{self.how[:16]}-*")
            if place != self.place and (count := self._common(place))
        ]
        for count, place in sorted(found, key=lambda item: -item[0]):
            with suppress(OSError), hold(place / "lock"):  # of a process that lives: left alone
                (place / "entry" / "images.u8").replace(self.place / "entry" / "images.u8")
                (place / "rows").replace(self.place / "rows")
                shutil.rmtree(place, ignore_errors=True)
                return count
        return 0

    def _check_room(self, done: int) -> None:
        folder, needed = self.entry.parent, (len(self.digests) - done) * self.image_bytes
        free = shutil.disk_usage(folder).free
        if needed + _SPARE_BYTES <= free:
            return
        if not done:
            shutil.rmtree(self.place, ignore_errors=True)
        raise DataError(
            "no-room-for-images",
            f"{folder}: decoded images need {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} are free.",
            why="Decoded copies of large folders are kept there, so that they need not fit into memory.",
            fix="Free some space, set SFUMATO_CACHE to a folder on another disk, or use a smaller "
            "data.image_size.",
        )


def _rows(place: Path) -> np.ndarray:
    """What is decoded whole."""
    try:
        content = (place / "rows").read_bytes()
    except OSError:
        return np.empty(0, dtype=_ROW)
    return np.frombuffer(content[: len(content) // _ROW.itemsize * _ROW.itemsize], dtype=_ROW)


def _remove_abandoned(folder: Path) -> None:
    """Remove what was interrupted a month ago and has not been gone on with."""
    for place in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # removed by another process, held by its owner, or of another user
            if time.time() - (place / "rows").stat().st_mtime > _ABANDONED_SECONDS:
                with hold(place / "lock"):
                    shutil.rmtree(place, ignore_errors=True)
