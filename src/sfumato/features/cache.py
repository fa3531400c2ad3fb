"""Features computed once: in parallel, kept on disk under a checksum, read through a memory map.

Features of private images are as sensitive as the images: files are readable by their owner only.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.data.pixels import Pixels, in_parts, map_bytes, rows_at_once
from sfumato.errors import DataError
from sfumato.features.precision import bfloat16_is_faster, wants_low_precision
from sfumato.features.workers import one_per_core
from sfumato.files import cache_home, check_plain, put, workspace

OnProgress = Callable[[int, int], None]  # rows done, rows in all

_VERSION = "sfumato features 1"  # change it whenever features of the same module change
_ROWS_AT_ONCE = 256  # rows of one task: enough for an efficient projection, few enough for an even load
_PIXELS_AT_ONCE = 16 * 2**20  # bytes: 256 images of 146 px
_HEADER = 128  # bytes before the rows
_ROWS_PER_PART = 16 * _ROWS_AT_ONCE  # rows kept at once: minutes of the slowest network on two cores


def features_of(
    module: nn.Module,
    images: Pixels,
    *,
    folder: Path | None = None,
    on_progress: OnProgress | None = None,
) -> Tensor:
    """Features (N, d) float32 of uint8 images, memory-mapped from the cache; computed if they are not there.

    ``module.described`` holds, in JSON values, what its weights do not tell of its preprocessing. The entry's
    name is a checksum of it, of the weights and of the images in order: a change of any is another entry, and
    so is another precision.
    Parts are kept as they are done, so that an interruption loses no more than one.
    """
    entry = _entry(module, images, folder)
    if _mapped(entry, len(images)) is None:
        parts = _parts(entry, len(images))
        _complete(parts, module, images, on_progress)
        found = [_mapped(file, len(rows)) for file, rows in parts.items()]
        kept = [part for part in found if part is not None]
        widths = {part.shape[1] for part in kept}
        if (
            len(kept) == len(found) and len(widths) == 1 and 0 not in widths
        ):  # else another process was faster, and has removed some
            _write(entry, kept)
        del found, kept  # what is mapped cannot be removed everywhere
    rows = _mapped(entry, len(images))
    for file in entry.parent.glob(f"{entry.stem}-*.part"):  # of this call, or of one that was interrupted
        file.unlink(missing_ok=True)
    if rows is None:
        raise not_writable(entry.parent, OSError("what was written is not there, or was changed"))
    return torch.from_numpy(rows)


def keep_rows(module: nn.Module, images: Pixels, rows: Tensor, *, folder: Path | None = None) -> None:
    """Put features that are known already into the cache as those of ``images``, such as a part of a set."""
    entry = _entry(module, images, folder)
    if _mapped(entry, len(images)) is None:
        _write(entry, [rows.numpy()])


def complete_parts(
    module: nn.Module,
    images: Pixels,
    *,
    worker: tuple[int, int],
    folder: Path | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Compute this worker's share of the parts that are missing: worker (2, 4) the third of four.

    When all workers have done so, ``features_of`` has nothing left to compute.
    """
    entry, (number, count) = _entry(module, images, folder), worker
    if _mapped(entry, len(images)) is None:
        parts = _parts(entry, len(images))
        _complete(dict(list(parts.items())[number::count]), module, images, on_progress)


def _entry(module: nn.Module, images: Pixels, folder: Path | None) -> Path:
    # Not in the checksum: extractors are kept by that too, and fitted ones serve in either precision. A dot,
    # so that the parts of one are not those of the other, where several machines have one cache.
    plain = wants_low_precision(module) and not bfloat16_is_faster(_device(module))
    name = f"{checksum(module, images)}{'.float32' if plain else ''}.npy"
    return (folder or cache_home("features")) / name


def _device(module: nn.Module) -> torch.device:
    return next((value.device for value in module.state_dict().values()), torch.device("cpu"))


def _parts(entry: Path, num_rows: int) -> dict[Path, range]:
    """The files that an entry is made of, with their rows."""
    every = range(num_rows)
    return {
        entry.with_name(f"{entry.stem}-{start}.part"): every[start : start + _ROWS_PER_PART]
        for start in every[::_ROWS_PER_PART]
    }


def _mapped(entry: Path, num_rows: int) -> np.ndarray | None:
    """So many rows, mapped from the file; None if it is missing, cut off, or not such a file.

    Its first bytes must be those that ``_write`` writes: what is not ours is not even parsed.
    """
    try:
        check_plain(entry)
        with entry.open("rb") as file:
            start, size = file.read(_HEADER), os.fstat(file.fileno()).st_size
    except (OSError, ValueError):
        return None
    width, rest = divmod(size - _HEADER, 4 * num_rows)
    if width < 1 or rest or start != _header(num_rows, width):
        return None
    return map_bytes(entry)[_HEADER:].view("<f4").reshape(num_rows, width)


def _header(num_rows: int, width: int) -> bytes:
    """How a file of so many rows begins, as a .npy file does."""
    description = {"descr": "<f4", "fortran_order": False, "shape": (num_rows, width)}
    written = io.BytesIO()
    np.lib.format.write_array_header_1_0(written, description)
    return written.getvalue()


def _complete(
    parts: Mapping[Path, range], module: nn.Module, images: Pixels, on_progress: OnProgress | None
) -> None:
    """Compute the rows of every part whose file is not there yet, and put them into it."""
    missing = {file: rows for file, rows in parts.items() if _mapped(file, len(rows)) is None}
    starts = [start for rows in missing.values() for start in rows[::_ROWS_AT_ONCE]]
    done = len(images) - sum(map(len, missing.values()))
    with closing(_blocks(module, images, starts)) as blocks:  # its workers stop if something fails
        for file, rows in missing.items():
            computed = []
            for block in islice(blocks, len(rows[::_ROWS_AT_ONCE])):
                computed.append(block)
                done += len(block)
                if on_progress:
                    on_progress(done, len(images))
            _write(file, computed)


def checksum(module: nn.Module, images: Pixels) -> str:
    """40 hexadecimal digits that change with the weights, the images, their order or the description."""
    digest = hashlib.sha256(f"{_VERSION} {type(module).__name__}".encode())
    digest.update(json.dumps(module.described, sort_keys=True).encode())
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().numpy().data)
    digest.update(f"{tuple(images.shape)}".encode())
    for part in in_parts(images):
        digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()[:40]


def compute_features(module: nn.Module, images: Pixels) -> np.ndarray:
    """Features (N, d) of uint8 images (N, C, H, W), which the module sees as float32 from 0 to 1."""
    return np.concatenate(list(_blocks(module, images, range(0, len(images), _ROWS_AT_ONCE))))


def _blocks(module: nn.Module, images: Pixels, starts: Sequence[int]) -> Generator[np.ndarray, None, None]:
    """The features of ``_ROWS_AT_ONCE`` images from each start on, in this order."""
    device = _device(module)
    few = rows_at_once(images.shape, _PIXELS_AT_ONCE)  # of large images less than a task's
    module.eval()

    @torch.no_grad()  # gradient mode belongs to a thread
    def task(start: int) -> np.ndarray:
        rows = images[start : start + _ROWS_AT_ONCE].split(few)
        return np.concatenate([module(part.to(device).float() / 255).float().cpu().numpy() for part in rows])

    if device.type != "cpu":
        yield from map(task, starts)
        return
    with one_per_core() as pool:
        yield from pool.map(task, starts)


def _write(entry: Path, blocks: Sequence[np.ndarray]) -> None:
    """The rows of all blocks as one array, whole or not at all: it is renamed into place when on disk."""
    try:
        with workspace(entry.parent) as work:
            unfinished = work / entry.name
            private = os.open(unfinished, os.O_WRONLY | os.O_CREAT, 0o600)
            with os.fdopen(private, "wb") as file:
                file.write(_header(sum(map(len, blocks)), blocks[0].shape[1]))
                for rows in blocks:
                    file.write(np.ascontiguousarray(rows, dtype="<f4").data)
            put(unfinished, entry)
    except OSError as error:
        raise not_writable(entry.parent, error) from error


def not_writable(folder: Path, error: Exception) -> DataError:
    """The error for results that cannot be kept."""
    number, reason = getattr(error, "errno", None), getattr(error, "strerror", None) or error
    full = number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    return DataError(
        "cache-not-writable",
        f"{folder}: {'the disk is full' if full else reason}.",
        why="Features are kept there, so that they are computed once.",
        fix="Free some space, or set SFUMATO_CACHE to another folder.",
    )
