"""Per-example clipped gradient sums, exact, at the cost of ordinary training.

Read in this order: ``clipped`` (what is computed), ``summation`` (how), ``clipping`` (the bound), ``passes``
and ``tape`` (one forward and one backward pass), ``claims`` and ``probe`` (which layer computes which
parameter's gradient), ``piece`` (what a layer knows of its units' gradients), the rules: ``linear``,
``normalisation``, ``convolution`` with ``operands``, ``columns`` and ``gram``, ``weight_standardisation``,
``fallback``; and ``choice`` among their strategies. ``stochastic`` and ``random_operations`` give each unit
the random numbers that the model draws. ``suitability`` is what is refused before the first pass.
``segments`` says which rows make a unit; ``kernels`` holds the sums that are compiled.
"""

from __future__ import annotations

from sfumato.gradients.call import Call, Strategy
from sfumato.gradients.choice import Choices
from sfumato.gradients.clipped import clipped_sum
from sfumato.gradients.clipping import (
    CLIPPINGS,
    AutomaticClipping,
    Clipping,
    FlatClipping,
    PerLayerClipping,
    clip_factors,
)
from sfumato.gradients.piece import Deferred, Materialised, Piece
from sfumato.gradients.summation import ClippedSum

__all__ = [
    "CLIPPINGS",
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
    "Strategy",
    "clip_factors",
    "clipped_sum",
]
