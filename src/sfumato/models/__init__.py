"""The model zoo: one family per file, all reached by name."""

from __future__ import annotations

from sfumato.models.classifier import Classifier
from sfumato.models.registry import VARIANTS, create_model, find_variant, list_models
from sfumato.models.variant import Variant

__all__ = ["VARIANTS", "Classifier", "Variant", "create_model", "find_variant", "list_models"]
