"""Images in, tensors out: known sets, folders and manifests, decoding, augmentation.

Names are imported on first use, so that ``sfumato data list`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sfumato.data.augmentation import augment, crop_and_flip, mix_views, normalisation_for, normalise
    from sfumato.data.images import DataSplits, ImageSet, carve_validation
    from sfumato.data.known import KNOWN_SETS
    from sfumato.data.loading import load_data
    from sfumato.data.overlap import duplicate_images, shared_images, shared_patients

_HOMES = {
    "ImageSet": "images",
    "DataSplits": "images",
    "carve_validation": "images",
    "load_data": "loading",
    "augment": "augmentation",
    "crop_and_flip": "augmentation",
    "mix_views": "augmentation",
    "normalise": "augmentation",
    "normalisation_for": "augmentation",
    "duplicate_images": "overlap",
    "shared_images": "overlap",
    "shared_patients": "overlap",
    "KNOWN_SETS": "known",
}

__all__ = [
    "KNOWN_SETS",
    "DataSplits",
    "ImageSet",
    "augment",
    "carve_validation",
    "crop_and_flip",
    "duplicate_images",
    "load_data",
    "mix_views",
    "normalisation_for",
    "normalise",
    "shared_images",
    "shared_patients",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"sfumato.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'sfumato.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
