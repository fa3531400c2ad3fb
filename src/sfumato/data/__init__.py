"""Images in, tensors out: known sets, folders and manifests, decoding, augmentation.

Names are imported on first use, so that ``sfumato data list`` does not wait for torch.
"""

from __future__ import annotations

import importlib

_PUBLIC = {
    "ImageSet": "images",
    "DataSplits": "images",
    "carve_validation": "images",
    "load_data": "loading",
    "augment": "augmentation",
    "crop_and_flip": "augmentation",
    "normalise": "augmentation",
    "normalisation_for": "augmentation",
    "duplicate_images": "overlap",
    "shared_images": "overlap",
    "shared_patients": "overlap",
    "KNOWN_SETS": "known",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"sfumato.data.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'sfumato.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
