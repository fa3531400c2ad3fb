"""Content hashes: which image this is, and which data set, whatever the files are called."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import torch
from torch import Tensor

from sfumato.data.pixels import Pixels, in_parts

_NEAR = 0.002  # to a whole number, of 255: what float32 leaves of one that was divided and multiplied


def pixel_id(pixels: np.ndarray) -> int:
    """64-bit hash of one decoded image, uint8 (H, W) or (H, W, C), at its own resolution.

    A colour image whose channels are all equal is the same picture as its greyscale form and gets
    the same hash; so do lossless copies in other file formats.
    """
    # the first row first: of a colour image it is nearly always enough
    grey = pixels.ndim == 2 or (_is_grey(pixels[:1]) and _is_grey(pixels))
    return _hash(pixels if pixels.ndim == 2 or not grey else pixels[:, :, 0])


def _is_grey(pixels: np.ndarray) -> bool:
    return bool((pixels == pixels[:, :, :1]).all())


def _hash(pixels: np.ndarray) -> int:
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    digest = hashlib.sha256(struct.pack("<3I", *pixels.shape[:2], channels))
    digest.update(np.ascontiguousarray(pixels).data)  # no copy, and other threads go on meanwhile
    return int.from_bytes(digest.digest()[:8], "little", signed=True)


def image_ids(images: Pixels) -> Tensor:
    """``pixel_id`` of every one of the uint8 images (N, C, H, W), as int64 (N,)."""
    ids: list[int] = []
    for part in in_parts(images):
        chunk = part.permute(0, 2, 3, 1).contiguous().cpu().numpy()
        grey = (chunk == chunk[..., :1]).all(axis=(1, 2, 3))  # for all at once: one by one is slow
        ids += [
            _hash(pixels[:, :, 0] if is_grey else pixels)
            for pixels, is_grey in zip(chunk, grey.tolist(), strict=True)
        ]
    return torch.tensor(ids, dtype=torch.int64)


def raw_ids(pixels: np.ndarray) -> Tensor:
    """Content ids of pixels (N, H, W, C) of any numeric type, whatever range they are rendered with later.

    The same pixels have the same ids as whole numbers from 0 to 255, as floats of that range, or as floats
    from 0 to 1: those of ``image_ids``. An image with other values is hashed as float32.
    """
    if pixels.dtype == np.uint8:
        return image_ids(_channels_first(pixels))
    with np.errstate(over="ignore"):  # beyond float32 is infinite, and then its largest number
        values = np.nan_to_num(pixels.astype(np.float32), nan=0.0) + np.float32(0)  # -0.0 becomes 0.0
    if pixels.dtype.kind == "f":
        are_shares = ((values >= 0) & (values <= 1)).all(axis=(1, 2, 3))
        values[are_shares] *= 255
    nearest = values.round().clip(0, 255)
    are_bytes = (abs(values - nearest) < _NEAR).all(axis=(1, 2, 3))
    ids = torch.empty(len(pixels), dtype=torch.int64)
    ids[are_bytes] = image_ids(_channels_first(nearest[are_bytes].astype(np.uint8)))
    deep = np.ascontiguousarray(values[~are_bytes], dtype="<f4")
    ids[~are_bytes] = image_ids(_channels_first(deep.view(np.uint8)))
    return ids


def _channels_first(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels, 3, 1)))


def fingerprint_of(content_ids: Tensor) -> str:
    """SHA-256 of the sorted content ids: the data set as a multiset, in any order."""
    ordered = torch.sort(content_ids).values.cpu().numpy().astype("<i8")
    return hashlib.sha256(b"sfumato images 1 " + ordered.tobytes()).hexdigest()
