"""Sfumato: image classifiers trained under differential privacy.

Names are imported on first use, so that ``import sfumato`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version

__version__ = version("sfumato")

_PUBLIC = {
    "clipped_sum": "gradients",
    "ClippedSum": "gradients",
    "create_model": "models",
    "list_models": "models",
    "make_private_ready": "models",
    "load_data": "data",
    "Plan": "privacy",
    "load": "release.release",
    "ConfigError": "errors",
    "DataError": "errors",
    "ModelError": "errors",
    "PrivacyError": "errors",
    "RunError": "errors",
    "SfumatoError": "errors",
}
_MODULES = ("accounting", "data", "doctor", "gradients", "layers", "models", "noise", "privacy", "sampling")

__all__ = [*_PUBLIC, *_MODULES, "__version__"]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"sfumato.{_PUBLIC[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"sfumato.{name}")
    raise AttributeError(f"module 'sfumato' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
