"""Sfumato: image classifiers trained under differential privacy.

The front door: whatever a user needs is importable from here. Names are imported on first use, so that
``import sfumato`` does not wait for torch; editors and type checkers see them as ordinary imports.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sfumato import (
        accounting,
        audit,
        data,
        doctor,
        gradients,
        layers,
        ledger,
        models,
        noise,
        privacy,
        randomness,
        recipes,
        release,
        run,
        sampling,
        training,
    )
    from sfumato.data import load_data
    from sfumato.errors import ConfigError, DataError, ModelError, PrivacyError, RunError, SfumatoError
    from sfumato.gradients import ClippedSum, clipped_sum
    from sfumato.ledger import Ledger
    from sfumato.models import create_model, list_models, make_private_ready
    from sfumato.privacy import Plan
    from sfumato.randomness import SecureSource, SeededSource
    from sfumato.recipes import Recipe, load_recipe, with_settings
    from sfumato.release.release import load
    from sfumato.run import train
    from sfumato.run.estimator import PrivateImageClassifier
    from sfumato.run.own_release import write_release
    from sfumato.training import fit

__version__ = version("sfumato")

_HOMES = {
    "clipped_sum": "gradients",
    "ClippedSum": "gradients",
    "create_model": "models",
    "list_models": "models",
    "make_private_ready": "models",
    "load_data": "data",
    "load_recipe": "recipes",
    "Recipe": "recipes",
    "with_settings": "recipes",
    "Plan": "privacy",
    "Ledger": "ledger",
    "SecureSource": "randomness",
    "SeededSource": "randomness",
    "fit": "training",
    "train": "run",
    "PrivateImageClassifier": "run.estimator",
    "write_release": "run.own_release",
    "load": "release.release",
    "ConfigError": "errors",
    "DataError": "errors",
    "ModelError": "errors",
    "PrivacyError": "errors",
    "RunError": "errors",
    "SfumatoError": "errors",
}

__all__ = [
    "ClippedSum",
    "ConfigError",
    "DataError",
    "Ledger",
    "ModelError",
    "Plan",
    "PrivacyError",
    "PrivateImageClassifier",
    "Recipe",
    "RunError",
    "SecureSource",
    "SeededSource",
    "SfumatoError",
    "__version__",
    "accounting",
    "audit",
    "clipped_sum",
    "create_model",
    "data",
    "doctor",
    "fit",
    "gradients",
    "layers",
    "ledger",
    "list_models",
    "load",
    "load_data",
    "load_recipe",
    "make_private_ready",
    "models",
    "noise",
    "privacy",
    "randomness",
    "recipes",
    "release",
    "run",
    "sampling",
    "train",
    "training",
    "with_settings",
    "write_release",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"sfumato.{_HOMES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"sfumato.{name}")
    raise AttributeError(f"module 'sfumato' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
