"""Decoded images: in memory when small, memory-mapped from an atomic cache when large."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sfumato.data.decode import Fit, OnProgress, decode_files


def decode_all(
    paths: Sequence[Path], *, image_size: int, channels: int, fit: Fit, on_progress: OnProgress | None = None
) -> tuple[torch.Tensor, np.ndarray]:
    """All files as (uint8 images (N, C, S, S), content ids (N,))."""
    images = np.empty((len(paths), channels, image_size, image_size), dtype=np.uint8)
    ids = np.empty(len(paths), dtype=np.int64)
    done = 0
    chunks = decode_files(paths, image_size=image_size, channels=channels, fit=fit, on_progress=on_progress)
    for part, part_ids in chunks:
        images[done : done + len(part)], ids[done : done + len(part)] = part, part_ids
        done += len(part)
    return torch.from_numpy(images), ids
