"""Decoded images: in memory when small, memory-mapped from a cache on disk when large.

A cache entry is a folder named by a checksum of the files' content and of how they are decoded.
It is written beside its place and renamed when whole, so a killed process leaves no half entry; see
``decoding`` for what it leaves.
"""

from __future__ import annotations

import errno
import hashlib
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from sfumato.data.decoding import Chunks, Decoding
from sfumato.data.pixels import are_large, map_bytes
from sfumato.data.readers.decode import Fit, OnProgress, decode_files, in_order, num_threads
from sfumato.data.readers.rendering import AS_THE_FILES_SAY, Rendering
from sfumato.errors import DataError
from sfumato.files import cache_home, check_plain, put, sync, workspace

_VERSION = b"sfumato decoded 3"  # change it whenever decoding changes


def decode_all(
    paths: Sequence[Path],
    *,
    image_size: int,
    channels: int,
    fit: Fit,
    rendering: Rendering = AS_THE_FILES_SAY,
    on_progress: OnProgress | None = None,
) -> tuple[torch.Tensor, np.ndarray]:
    """All files as (uint8 images (N, C, S, S), content ids int64 (N,)).

    Above 256 MiB the images are memory-mapped from the cache; decoding that was interrupted goes on.
    """
    shape = (len(paths), channels, image_size, image_size)

    def decode(start: int) -> Chunks:
        return decode_files(
            paths,
            start=start,
            image_size=image_size,
            channels=channels,
            fit=fit,
            rendering=rendering,
            on_progress=on_progress,
        )

    if not are_large(shape):
        images, ids = np.empty(shape, dtype=np.uint8), np.empty(len(paths), dtype=np.int64)
        done = 0
        for part, part_ids in decode(0):
            images[done : done + len(part)], ids[done : done + len(part)] = part, part_ids
            done += len(part)
        return torch.from_numpy(images), ids
    digests = file_digests(paths)
    how = hashlib.sha256(_VERSION + f"{image_size} {channels} {fit} {rendering.described}".encode())
    key = hashlib.sha256(how.digest() + digests.tobytes()).hexdigest()[:40]
    entry = cache_home("decoded") / key
    return _mapped_or_written(
        entry,
        shape,
        lambda: Decoding(
            entry=entry, how=how.hexdigest(), digests=digests, image_bytes=math.prod(shape[1:]), decode=decode
        ).complete(lambda: map_entry(entry, shape) is not None),
    )


def file_digests(paths: Sequence[Path]) -> np.ndarray:
    """SHA-256 of every file's bytes, as V32 (N,): a clock would not notice every change."""
    found = bytearray()
    with ThreadPoolExecutor(num_threads()) as pool:
        for part in in_order(pool, lambda path: hashlib.sha256(path.read_bytes()).digest(), paths):
            found += b"".join(part)
    return np.frombuffer(bytes(found), dtype="V32")


def kept_images(
    entry: Path, shape: tuple[int, ...], compute: Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
) -> tuple[torch.Tensor, np.ndarray]:
    """The entry's images and content ids; written first if it is not there, anew if it is damaged."""
    return _mapped_or_written(entry, shape, lambda: write_entry(entry, compute()))


def _mapped_or_written(
    entry: Path, shape: tuple[int, ...], write: Callable[[], None]
) -> tuple[torch.Tensor, np.ndarray]:
    mapped = map_entry(entry, shape)
    if mapped is None:
        shutil.rmtree(entry, ignore_errors=True)
        with _disk_errors(entry.parent):
            write()
        mapped = map_entry(entry, shape)
    if mapped is None:
        with _disk_errors(entry.parent):
            raise OSError("what was written is not there, or was changed")
    return mapped


def map_entry(entry: Path, shape: tuple[int, ...]) -> tuple[torch.Tensor, np.ndarray] | None:
    """Images and content ids of an entry, memory-mapped; None if it is missing, cut off, or another's."""
    try:
        # Mapped too: an array that claims to be larger than its file is found before any memory is taken.
        check_plain(entry / "ids.npy")
        check_plain(entry / "images.u8")
        ids = np.load(entry / "ids.npy", mmap_mode="r", allow_pickle=False)
        size = (entry / "images.u8").stat().st_size
        if size != np.prod(shape) or ids.shape != shape[:1] or ids.dtype != np.int64:
            return None
        return torch.from_numpy(map_bytes(entry / "images.u8").reshape(shape)), np.array(ids)
    except Exception:  # whatever NumPy's parser says of bytes that are no array
        return None


def write_entry(entry: Path, chunks: Iterator[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write (images, content ids) as one entry, whole or not at all."""
    with _disk_errors(entry.parent), workspace(entry.parent) as work:
        unfinished, ids = work / "entry", []
        unfinished.mkdir(mode=0o700)
        with (unfinished / "images.u8").open("wb") as file:
            # Plain writes: a full disk is then an error here, and not a dead process in a memory map.
            for images, part_ids in chunks:
                file.write(images.tobytes())
                ids.append(part_ids)
            sync(file)
        with (unfinished / "ids.npy").open("wb") as file:
            np.save(file, np.concatenate(ids), allow_pickle=False)
            sync(file)
        try:
            put(unfinished, entry)
        except OSError:
            if not entry.is_dir():  # another process may have finished the same entry first
                raise


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            "cache-not-writable",
            f"{folder}: {'the disk is full' if full else error.strerror or error}.",
            why="Decoded copies of large folders are kept there, so that they need not fit into memory.",
            fix="Free some space, or set SFUMATO_CACHE to another folder.",
        ) from error
