"""Decoded images: in memory when small, memory-mapped from a cache on disk when large.

A cache entry is a folder named by a checksum of the files' content and of how they are decoded.
It is written beside its place and renamed when whole, so a killed process leaves no half entry.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from sfumato.data.readers.decode import Fit, OnProgress, decode_files, num_threads
from sfumato.data.readers.rendering import AS_THE_FILES_SAY, Rendering
from sfumato.errors import DataError
from sfumato.files import cache_home, check_plain, put, sync, workspace

MEMORY_LIMIT_BYTES = 256 * 2**20  # above this, decoded images are memory-mapped
_VERSION = b"sfumato decoded 2"  # change it whenever decoding changes


def decode_all(
    paths: Sequence[Path],
    *,
    image_size: int,
    channels: int,
    fit: Fit,
    rendering: Rendering = AS_THE_FILES_SAY,
    on_progress: OnProgress | None = None,
    memory_limit_bytes: int | None = None,
) -> tuple[torch.Tensor, np.ndarray]:
    """All files as (uint8 images (N, C, S, S), content ids int64 (N,)).

    Above ``memory_limit_bytes`` (default 256 MiB) the images are memory-mapped from the cache.
    """
    shape = (len(paths), channels, image_size, image_size)
    limit = MEMORY_LIMIT_BYTES if memory_limit_bytes is None else memory_limit_bytes
    chunks = decode_files(
        paths,
        image_size=image_size,
        channels=channels,
        fit=fit,
        rendering=rendering,
        on_progress=on_progress,
    )
    if int(np.prod(shape)) <= limit:
        images, ids = np.empty(shape, dtype=np.uint8), np.empty(len(paths), dtype=np.int64)
        done = 0
        for part, part_ids in chunks:
            images[done : done + len(part)], ids[done : done + len(part)] = part, part_ids
            done += len(part)
        return torch.from_numpy(images), ids
    entry = cache_home("decoded") / _key(paths, f"{image_size} {channels} {fit} {rendering.described}")
    return kept_images(entry, shape, lambda: chunks)


def _key(paths: Sequence[Path], how: str) -> str:
    """Checksum of every file's bytes, in order, and of how they are decoded."""
    with ThreadPoolExecutor(num_threads()) as pool:
        digests = pool.map(lambda path: hashlib.sha256(path.read_bytes()).digest(), paths)
        whole = hashlib.sha256(_VERSION + how.encode())
        for digest in digests:
            whole.update(digest)
    return whole.hexdigest()[:40]


def kept_images(
    entry: Path, shape: tuple[int, ...], compute: Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
) -> tuple[torch.Tensor, np.ndarray]:
    """The entry's images and content ids; written first if it is not there, anew if it is damaged."""
    mapped = map_entry(entry, shape)
    if mapped is None:
        shutil.rmtree(entry, ignore_errors=True)
        write_entry(entry, compute())
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
        # "c": pages are private and copied on write, so nothing can change the file through the tensor.
        images = np.memmap(entry / "images.u8", dtype=np.uint8, mode="c", shape=shape)
        return torch.from_numpy(images), np.array(ids)
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
