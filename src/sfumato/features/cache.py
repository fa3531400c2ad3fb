"""Features computed once: in parallel, kept on disk under a checksum, read through a memory map.

Features of private images are as sensitive as the images: files are readable by their owner only.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.data.workspace import workspace
from sfumato.errors import DataError
from sfumato.features.workers import one_per_core

OnProgress = Callable[[int, int], None]  # rows done, rows in all

_VERSION = "sfumato features 1"  # change it whenever features of the same module change
_ROWS_AT_ONCE = 256  # rows of one task: enough for an efficient projection, few enough for an even load


def cache_home() -> Path:
    """``SFUMATO_CACHE``/features, else ``~/.cache/sfumato/features``."""
    base = os.environ.get("SFUMATO_CACHE")
    return Path(base) / "features" if base else Path("~/.cache/sfumato/features").expanduser()


def features_of(
    module: nn.Module,
    images: Tensor,
    *,
    folder: Path | None = None,
    on_progress: OnProgress | None = None,
) -> Tensor:
    """Features (N, d) float32 of uint8 images, memory-mapped from the cache; computed if they are not there.

    ``module.described`` holds, in JSON values, what its weights do not tell of its preprocessing. The entry's
    name is a checksum of it, of the weights and of the images in order: a change of any is another entry.
    """
    entry = (folder or cache_home()) / f"{checksum(module, images)}.npy"
    try:
        rows = _mapped(entry) if entry.is_file() else torch.empty(0)
        if rows.ndim == 2 and len(rows) == len(images) and rows.dtype == torch.float32:
            return rows
    except (OSError, ValueError, TypeError, EOFError):
        pass  # missing, cut off, or something else altogether
    _write(entry, compute_features(module, images, on_progress=on_progress))
    return _mapped(entry)


def _mapped(entry: Path) -> Tensor:
    # "c": pages are copied on write, so nothing changes the file through the tensor
    return torch.from_numpy(np.load(entry, mmap_mode="c", allow_pickle=False))


def checksum(module: nn.Module, images: Tensor) -> str:
    """40 hexadecimal digits that change with the weights, the images, their order or the description."""
    digest = hashlib.sha256(f"{_VERSION} {type(module).__name__}".encode())
    digest.update(json.dumps(module.described, sort_keys=True).encode())
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().numpy())
    digest.update(f"{tuple(images.shape)}".encode())
    for start in range(0, len(images), 4096):
        digest.update(images[start : start + 4096].contiguous().numpy())
    return digest.hexdigest()[:40]


@torch.no_grad()
def compute_features(
    module: nn.Module, images: Tensor, *, on_progress: OnProgress | None = None
) -> np.ndarray:
    """Features (N, d) of uint8 images (N, C, H, W), which the module sees as float32 from 0 to 1."""
    device = next((value.device for value in module.state_dict().values()), torch.device("cpu"))
    module.eval()
    result: np.ndarray | None = None
    done = 0
    for start, rows in _in_order(module, images, device):
        if result is None:
            result = np.empty((len(images), rows.shape[1]), dtype=np.float32)
        result[start : start + len(rows)] = rows
        done += len(rows)
        if on_progress:
            on_progress(done, len(images))
    return np.empty((0, 0), dtype=np.float32) if result is None else result


def _in_order(module: nn.Module, images: Tensor, device: torch.device) -> Iterator[tuple[int, np.ndarray]]:
    @torch.no_grad()  # gradient mode belongs to a thread
    def task(start: int) -> tuple[int, np.ndarray]:
        pixels = images[start : start + _ROWS_AT_ONCE].to(device).float() / 255
        return start, module(pixels).float().cpu().numpy()

    starts = range(0, len(images), _ROWS_AT_ONCE)
    if device.type != "cpu":
        yield from map(task, starts)
        return
    with one_per_core() as pool:
        yield from pool.map(task, starts)


def _write(entry: Path, features: np.ndarray) -> None:
    """The whole entry or none: it is renamed into place when it is on disk."""
    try:
        with workspace(entry.parent) as work:
            unfinished = work / entry.name
            private = os.open(unfinished, os.O_WRONLY | os.O_CREAT, 0o600)
            with os.fdopen(private, "wb") as file:
                np.save(file, features, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(entry)
    except OSError as error:
        raise not_writable(entry.parent, error) from error


def not_writable(folder: Path, error: Exception) -> DataError:
    """What to tell when something that was computed cannot be kept."""
    number, reason = getattr(error, "errno", None), getattr(error, "strerror", None) or error
    full = number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    return DataError(
        "cache-not-writable",
        f"{folder}: {'the disk is full' if full else reason}.",
        why="Features are kept there, so that they are computed once.",
        fix="Free some space, or set SFUMATO_CACHE to another folder.",
    )
