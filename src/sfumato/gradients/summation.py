"""The clipped sum, pass by pass: norms of all layers, then the factors, then the sum of what they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sfumato.gradients.choice import Choices
from sfumato.gradients.clipping import Clipping, bounded_factors, total_norms
from sfumato.gradients.passes import record
from sfumato.gradients.piece import Piece, working_dtype
from sfumato.gradients.segments import Segments, microbatches, singletons
from sfumato.gradients.shapes import Float, Float64, Int64, Shaped
from sfumato.gradients.stochastic import Generators, Randomness, RowDraws

MARGIN_IN_EPS = 64  # covers the rounding of norms and factors, and of sums of few units: 8e-6 in float32

Pass = tuple[Tensor | slice, Tensor | slice, Segments]  # rows, units, and how the rows lie


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """The sum over units of their clipped gradients, and by how much one unit can move it.

    Everything but ``sensitivity`` is computed from private data.
    """

    gradients: dict[str, Float[Tensor, "..."]]  # by the parameter's name; the engine's in float64
    norms: Float[Tensor, "units"]  # before clipping
    losses: Float[Tensor, "units"]  # the mean over a unit's rows
    sensitivity: float
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # of the parameters, for the noisy sum

    def __add__(self, other: ClippedSum) -> ClippedSum:
        """The sum over both sets of units, which must have no unit in common."""
        return ClippedSum(
            gradients={name: value + other.gradients[name] for name, value in self.gradients.items()},
            norms=torch.cat([self.norms, other.norms]),
            losses=torch.cat([self.losses, other.losses]),
            sensitivity=max(self.sensitivity, other.sensitivity),
            dtypes={**self.dtypes, **other.dtypes},
        )


def sum_over_passes(
    model: nn.Module,
    trained: Mapping[str, Tensor],
    inputs: Shaped[Tensor, "rows ..."],
    targets: Shaped[Tensor, "rows ..."],
    *,
    num_units: int,
    unit_index: Int64[Tensor, "rows"] | None,
    unit_ids: Int64[Tensor, "units"] | None,
    clip_norm: float,
    loss: Callable[..., Tensor],
    microbatch_size: int | None,
    clipping: Clipping,
    randomness: Randomness | None,
    choices: Choices,
) -> ClippedSum:
    """``clipped_sum`` for arguments that were checked, over the parameters in ``trained``."""
    generators = Generators(inputs.device)
    eps = max(torch.finfo(working_dtype(value.dtype)).eps for value in trained.values())
    with torch.inference_mode(False):
        inputs, targets = _plain(inputs), _plain(targets)
        totals: dict[str, Tensor] = {}
        norms = torch.zeros(num_units, dtype=torch.float64, device=inputs.device)
        losses = torch.zeros(num_units, dtype=torch.float64, device=inputs.device)
        try:
            max_rows = microbatch_size or choices.rows_per_pass(model, inputs)
            for rows, units, segments in _passes(len(inputs), unit_index, max_rows, inputs.device):
                draws = None
                if randomness is not None and unit_ids is not None:  # both or neither
                    draws = RowDraws.of(randomness, unit_ids[units], segments)
                pieces, values = record(model, inputs[rows], targets[rows], loss, segments, choices, draws)
                # half precision would round the sum past the bound
                with torch.autocast(inputs.device.type, enabled=False):
                    norms[units] = _add_clipped(totals, pieces, segments, clip_norm, clipping, eps)
                losses[units] = values.double()
        finally:
            generators.restore()  # measuring and probing leave no trace either
    return ClippedSum(
        gradients={
            name: totals[name] if name in totals else torch.zeros_like(value, dtype=torch.float64)
            for name, value in trained.items()
        },
        norms=norms,
        losses=losses,
        sensitivity=clipping.sensitivity(clip_norm),
        dtypes={name: value.dtype for name, value in trained.items()},
    )


def _plain(values: Tensor) -> Tensor:
    """Apart from any graph or inference mode that it came from."""
    return values.clone() if values.is_inference() else values.detach()


def _passes(rows: int, unit_index: Tensor | None, max_rows: int, device: torch.device) -> Iterator[Pass]:
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
    eps: float,
) -> Float64[Tensor, "units"]:
    """Add the pieces' clipped sum to ``totals``, letting go of each piece; returns the units' norms."""
    if not pieces:
        return torch.zeros(segments.num_units, dtype=torch.float64, device=segments.sizes.device)
    squares = {name: piece.squared_norms for name, piece in pieces.items()}
    factors = bounded_factors(clipping, squares, clip_norm, MARGIN_IN_EPS * eps)
    for name in list(pieces):
        part = pieces.pop(name).weighted_sum(factors[name])
        # in float64, so that no microbatch rounds those before it
        totals[name] = totals[name].add_(part) if name in totals else part.double()
    return total_norms(squares)
