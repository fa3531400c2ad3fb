"""The model zoo: one family per file, all reached by name; and two transformations of any model."""

from __future__ import annotations

from sfumato.models.change import Change
from sfumato.models.classifier import Classifier
from sfumato.models.private_ready import make_private_ready
from sfumato.models.registry import (
    VARIANTS,
    create_model,
    find_variant,
    list_feature_heads,
    list_models,
    weight_shapes,
)
from sfumato.models.scale_norm import add_scale_norm
from sfumato.models.summary import LayerSummary, ModelSummary, summarise
from sfumato.models.variant import Variant

__all__ = [
    "VARIANTS",
    "Change",
    "Classifier",
    "LayerSummary",
    "ModelSummary",
    "Variant",
    "add_scale_norm",
    "create_model",
    "find_variant",
    "list_feature_heads",
    "list_models",
    "make_private_ready",
    "summarise",
    "weight_shapes",
]
