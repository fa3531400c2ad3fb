"""Content hashes: which image this is, and which data set, whatever the files are called."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import torch
from torch import Tensor


def pixel_id(pixels: np.ndarray) -> int:
    """64-bit hash of one decoded image, uint8 (H, W) or (H, W, C), at its own resolution.

    A colour image whose channels are all equal is the same picture as its greyscale form and gets
    the same hash; so do lossless copies in other file formats.
    """
    grey = pixels.ndim == 2 or bool((pixels == pixels[:, :, :1]).all())
    return _hash(pixels if pixels.ndim == 2 or not grey else pixels[:, :, 0])


def _hash(pixels: np.ndarray) -> int:
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    digest = hashlib.sha256(struct.pack("<3I", *pixels.shape[:2], channels) + pixels.tobytes()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def image_ids(images: Tensor) -> Tensor:
    """``pixel_id`` of every image of a uint8 tensor (N, C, H, W), as int64 (N,)."""
    ids = np.empty(len(images), dtype=np.int64)
    for start in range(0, len(images), 4096):  # bounded memory for memory-mapped sets
        chunk = images[start : start + 4096].permute(0, 2, 3, 1).contiguous().cpu().numpy()
        grey = (chunk == chunk[..., :1]).all(axis=(1, 2, 3))  # for all at once: one by one is slow
        ids[start : start + len(chunk)] = [
            _hash(pixels[:, :, 0] if is_grey else pixels)
            for pixels, is_grey in zip(chunk, grey.tolist(), strict=True)
        ]
    return torch.from_numpy(ids)


def fingerprint_of(content_ids: Tensor) -> str:
    """SHA-256 of the sorted content ids: the data set as a multiset, in any order."""
    ordered = torch.sort(content_ids).values.cpu().numpy().astype("<i8")
    return hashlib.sha256(b"sfumato images 1 " + ordered.tobytes()).hexdigest()
