"""Images that need not fit into memory: a tensor, memory-mapped or not, or chosen rows of one."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

MEMORY_LIMIT_BYTES = 256 * 2**20  # above this, images are memory-mapped and never copied whole
_PART_BYTES = 32 * 2**20
_WITHOUT_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python names from 3.13 on


class Pixels(Protocol):
    """uint8 images (N, C, H, W). ``images[rows]`` is a tensor of these rows, ``images[:]`` of all."""

    @property
    def shape(self) -> torch.Size:
        """(N, C, H, W)."""

    @property
    def dtype(self) -> torch.dtype:
        """torch.uint8."""

    @property
    def ndim(self) -> int:
        """4."""

    def __len__(self) -> int:
        """N."""

    def __getitem__(self, rows: Any, /) -> Tensor:
        """The rows of a slice, of int64 indices, of a boolean mask; or one image."""


@dataclass(frozen=True, eq=False)
class ChosenRows:
    """Some rows of a tensor that is too large to copy them; each is read when it is asked for."""

    images: Pixels  # a tensor, usually memory-mapped
    rows: Tensor  # int64 (N,)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), *self.images.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.images.dtype

    @property
    def ndim(self) -> int:
        return self.images.ndim

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Any, /) -> Tensor:
        return self.images[self.rows[rows]]


def are_large(shape: tuple[int, ...]) -> bool:
    """Whether images of this shape are too many to be copied in memory."""
    return math.prod(shape) > MEMORY_LIMIT_BYTES


def choose_rows(images: Pixels, rows: Tensor) -> Pixels:
    """The images at ``rows`` (int64, or a boolean mask): a copy if they are few, else without one.

    Rows that lie together are always a view.
    """
    if rows.dtype == torch.bool:
        rows = rows.nonzero()[:, 0]
    whole = images
    if isinstance(images, ChosenRows):
        whole, rows = images.images, images.rows[rows]
    if bool((rows.diff() == 1).all()) and len(rows):
        return whole[int(rows[0]) : int(rows[-1]) + 1]
    return ChosenRows(whole, rows) if are_large((len(rows), *images.shape[1:])) else whole[rows]


def rows_at_once(shape: tuple[int, ...], max_bytes: int) -> int:
    """How many images of ``shape[1:]`` fit into so many bytes, at least one."""
    return max(1, max_bytes // max(1, math.prod(shape[1:])))


def in_parts(images: Pixels) -> Iterator[Tensor]:
    """All images in their order, 32 MiB in memory at a time."""
    size = rows_at_once(images.shape, _PART_BYTES)
    for start in range(0, len(images), size):
        yield images[start : start + size]


def map_bytes(path: Path) -> np.ndarray:
    """The file's bytes. Pages are private and copied on write: nothing changes the file through the array.

    No memory is set aside for such copies: a system that did would refuse files larger than its memory.
    """
    if sys.platform == "linux":
        flags = mmap.MAP_PRIVATE | _WITHOUT_RESERVE
        with path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return np.frombuffer(pages, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="c")
