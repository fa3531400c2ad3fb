"""Per-example clipped gradient sums, exact, at the cost of ordinary training.

Read in this order: ``clipped`` (what is computed), ``clipping`` (the bound), ``tape`` (one forward and one
backward pass), ``claims`` (which layer answers for which parameter), then the rules (``convolution``,
``weight_standardisation``, ``linear``, ``normalisation``, ``fallback``) and ``choice`` among them.
"""

from __future__ import annotations

from sfumato.gradients.call import Call, Strategy
from sfumato.gradients.choice import Choices
from sfumato.gradients.clipped import ClippedSum, clipped_sum
from sfumato.gradients.clipping import (
    AutomaticClipping,
    Clipping,
    FlatClipping,
    PerLayerClipping,
    RescaledClipping,
    clip_factors,
)
from sfumato.gradients.piece import Deferred, Materialised, Piece

__all__ = [
    "AutomaticClipping",
    "Call",
    "Choices",
    "ClippedSum",
    "Clipping",
    "Deferred",
    "FlatClipping",
    "Materialised",
    "PerLayerClipping",
    "Piece",
    "RescaledClipping",
    "Strategy",
    "clip_factors",
    "clipped_sum",
]
