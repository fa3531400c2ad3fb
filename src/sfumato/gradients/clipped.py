"""The clipped sum: norms of all layers, then the factors, then the sum of what the factors leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.errors import ConfigError
from sfumato.gradients.choice import Choices
from sfumato.gradients.clipping import Clipping, FlatClipping, total_norms
from sfumato.gradients.piece import Piece
from sfumato.gradients.segments import Segments, check_unit_index, microbatches, singletons
from sfumato.gradients.tape import record

SMALLEST_CLIP_NORM = 1e-12
MARGIN_IN_EPS = 32  # covers the rounding of norms, factors and the sum: 4e-6 in float32

FLAT = FlatClipping()
_REMEMBERED = Choices()  # strategies of the layers met so far; a performance setting, not state


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """The sum over units of their clipped gradients, and by how much one unit can move it.

    Everything but ``sensitivity`` is computed from private data.
    """

    gradients: dict[str, Tensor]  # parameter name -> tensor
    norms: Tensor  # one per unit, before clipping, float64
    losses: Tensor  # one per unit, the mean over its rows
    sensitivity: float

    def __add__(self, other: ClippedSum) -> ClippedSum:
        """The sum over both sets of units, which must have no unit in common."""
        return ClippedSum(
            gradients={name: value + other.gradients[name] for name, value in self.gradients.items()},
            norms=torch.cat([self.norms, other.norms]),
            losses=torch.cat([self.losses, other.losses]),
            sensitivity=max(self.sensitivity, other.sensitivity),
        )


def clipped_sum(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    clip_norm: float,
    loss: Callable[..., Tensor] = cross_entropy,
    unit_index: Tensor | None = None,
    microbatch_size: int | None = None,
    clipping: Clipping = FLAT,
    choices: Choices | None = None,
) -> ClippedSum:
    """Sum over units of each unit's gradient, clipped.

    A unit's gradient is the mean over its rows: ``unit_index`` names the unit of each row (0, 1, 2, …), and
    each row is a unit of its own without it. At most ``microbatch_size`` rows are in memory at a time, but
    the rows of one unit always together. ``loss(outputs, targets)`` is applied to each row on its own.

    Guarantee: adding or removing one unit moves the sum by at most ``sensitivity`` (``clip_norm`` with flat
    clipping), over all trained parameters together, whatever its rows contain. A unit whose gradient is not
    finite counts as zero. The model must treat each row on its own: ``sfumato.doctor.check_model`` tells.
    """
    if not clip_norm >= SMALLEST_CLIP_NORM:
        raise ConfigError(
            "bad-clip-norm",
            f"clip_norm is {clip_norm}.",
            why="It must be positive, and not so small that squares of such numbers vanish.",
            fix="Give a positive number, such as 1.",
        )
    model = getattr(model, "_orig_mod", model)  # a compiled model: its layers are those of the original
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not trained:
        raise ConfigError(
            "nothing-to-train",
            "no parameter of the model requires a gradient.",
            fix="Unfreeze a part of it: parameter.requires_grad_(True).",
        )
    rows, device, choices = len(inputs), inputs.device, choices or _REMEMBERED
    max_rows = microbatch_size or choices.rows_per_pass(model, inputs)
    if unit_index is not None:
        check_unit_index(unit_index, rows)
    units = rows if unit_index is None else int(unit_index.max()) + 1 if rows else 0
    totals = {name: torch.zeros_like(value) for name, value in trained.items()}
    norms = torch.zeros(units, dtype=torch.float64, device=device)
    losses = torch.zeros(units, dtype=torch.float64, device=device)
    for chosen, which, segments in _passes(rows, unit_index, max_rows, device):
        pieces, values = record(model, inputs[chosen], targets[chosen], loss, segments, choices)
        with torch.autocast(device.type, enabled=False):  # half precision would round the sum past the bound
            norms[which] = _add_clipped(totals, pieces, segments, clip_norm, clipping)
        losses[which] = values.double()
    return ClippedSum(
        gradients=totals, norms=norms, losses=losses, sensitivity=clipping.sensitivity(clip_norm)
    )


def _passes(rows: int, unit_index: Tensor | None, max_rows: int, device: torch.device):
    """(rows, units, segments) of each pass."""
    if unit_index is not None:
        yield from microbatches(unit_index, max_rows) if rows else ()
        return
    for start in range(0, rows, max_rows):
        part = slice(start, min(start + max_rows, rows))
        yield part, part, singletons(part.stop - part.start, device)


def _add_clipped(
    totals: dict[str, Tensor],
    pieces: dict[str, Piece],
    segments: Segments,
    clip_norm: float,
    clipping: Clipping,
) -> Tensor:
    """Add the pieces' clipped sum to ``totals``, letting go of each piece; returns the units' norms."""
    if not pieces:
        return torch.zeros(segments.num_units, dtype=torch.float64, device=segments.sizes.device)
    squares = {name: piece.squared_norms for name, piece in pieces.items()}
    eps = max(torch.finfo(totals[name].dtype).eps for name in pieces)
    factors = clipping.factors(squares, clip_norm, MARGIN_IN_EPS * eps)
    for name in list(pieces):
        totals[name] += pieces.pop(name).weighted_sum(factors[name])
    return total_norms(squares)
