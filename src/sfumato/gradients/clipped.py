"""The clipped sum: norms of all layers, then the factors, then the sum of what the factors leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.errors import ConfigError
from sfumato.gradients.choice import Choices
from sfumato.gradients.clipping import Clipping, FlatClipping, bounded_factors, total_norms
from sfumato.gradients.passes import record
from sfumato.gradients.piece import Piece, working_dtype
from sfumato.gradients.segments import Segments, check_unit_index, microbatches, singletons
from sfumato.gradients.shapes import Float, Float64, Int64, Shaped
from sfumato.gradients.stochastic import Generators, Randomness, RowDraws, check_unit_ids
from sfumato.gradients.suitability import check_suitable

SMALLEST_CLIP_NORM = 1e-12
MARGIN_IN_EPS = 64  # covers the rounding of norms and factors, and of sums of few units: 8e-6 in float32

FLAT = FlatClipping()
Pass = tuple[Tensor | slice, Tensor | slice, Segments]  # rows, units, and how the rows lie
_REMEMBERED = Choices()  # strategies of the layers met so far; a performance setting, not state


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """The sum over units of their clipped gradients, and by how much one unit can move it.

    Everything but ``sensitivity`` is computed from private data.
    """

    gradients: dict[str, Float64[Tensor, "..."]]  # by the parameter's name, in its shape
    norms: Float64[Tensor, "units"]  # before clipping
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


def clipped_sum(
    model: nn.Module,
    inputs: Shaped[Tensor, "rows ..."],
    targets: Shaped[Tensor, "rows ..."],
    *,
    clip_norm: float,
    loss: Callable[..., Tensor] = cross_entropy,
    unit_index: Int64[Tensor, "rows"] | None = None,
    microbatch_size: int | None = None,
    clipping: Clipping = FLAT,
    randomness: Randomness | None = None,
    unit_ids: Int64[Tensor, "units"] | None = None,
    choices: Choices | None = None,
) -> ClippedSum:
    """Sum over units of each unit's gradient, clipped.

    A unit's gradient is the mean over its rows: ``unit_index`` names the unit of each row (0, 1, 2, …), and
    each row is a unit of its own without it. At most ``microbatch_size`` rows are in memory at a time, but
    the rows of one unit always together. ``loss(outputs, targets)`` is applied to each row on its own.

    Guarantee: adding or removing one unit moves the sum by at most ``sensitivity`` (``clip_norm`` with flat
    clipping), over all trained parameters together, whatever its rows contain. A unit whose gradient is not
    finite counts as zero. The model must treat each row on its own: ``sfumato.doctor.check_model`` tells.

    A model that draws random numbers (dropout) needs ``randomness``, a ``UnitRandomness`` of this step, and
    ``unit_ids``, the units' numbers in the data set: what a unit draws then does not depend on its place.
    Without it such a model is refused. PyTorch's own generators are left as they were.

    Rounding: units are added in float64, so that the bound holds for any number of units and microbatches,
    with two exceptions in the working precision (float32, also for weights in half precision). Eight
    neighbouring units at a time are added in it, which the clip's margin covers; and the strategies "outer"
    and "gram" add the n units of a microbatch in one library call, which may add up to n**2 * 2**-24 clip
    norms, 2e-4 for 64 units, if all of them conspire; otherwise about sqrt(n) * 2**-24.
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model: its layers are those of the original
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    units = _check(model, trained, inputs, targets, clip_norm, unit_index, microbatch_size)
    if randomness is not None:
        check_unit_ids(unit_ids, units)
    generators, choices = Generators(inputs.device), choices or _REMEMBERED
    eps = max(torch.finfo(working_dtype(value.dtype)).eps for value in trained.values())
    with torch.inference_mode(False):
        inputs, targets = _plain(inputs), _plain(targets)
        # in float64, so that no microbatch rounds those before it
        totals = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in trained.items()}
        norms = torch.zeros(units, dtype=torch.float64, device=inputs.device)
        losses = torch.zeros(units, dtype=torch.float64, device=inputs.device)
        try:
            max_rows = microbatch_size or choices.rows_per_pass(model, inputs)
            for chosen, which, segments in _passes(len(inputs), unit_index, max_rows, inputs.device):
                draws = None
                if randomness is not None and unit_ids is not None:  # checked above: both or neither
                    draws = RowDraws.of(randomness, unit_ids[which], segments)
                pieces, values = record(
                    model, inputs[chosen], targets[chosen], loss, segments, choices, draws
                )
                # half precision would round the sum past the bound
                with torch.autocast(inputs.device.type, enabled=False):
                    norms[which] = _add_clipped(totals, pieces, segments, clip_norm, clipping, eps)
                losses[which] = values.double()
        finally:
            generators.restore()  # measuring and probing leave no trace either
    return ClippedSum(
        gradients=totals,
        norms=norms,
        losses=losses,
        sensitivity=clipping.sensitivity(clip_norm),
        dtypes={name: value.dtype for name, value in trained.items()},
    )


def _check(
    model: nn.Module,
    trained: dict[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    clip_norm: float,
    unit_index: Tensor | None,
    microbatch_size: int | None,
) -> int:
    """Refuse arguments that cannot be meant; the number of units."""
    if not clip_norm >= SMALLEST_CLIP_NORM:
        raise ConfigError(
            "bad-clip-norm",
            f"clip_norm is {clip_norm}.",
            why="It must be positive, and not so small that squares of such numbers vanish.",
            fix="Give a positive number, such as 1.",
        )
    if microbatch_size is not None and (
        isinstance(microbatch_size, bool) or not isinstance(microbatch_size, int) or microbatch_size < 1
    ):
        raise ConfigError(
            "bad-microbatch-size",
            f"microbatch_size is {microbatch_size!r}.",
            fix="Give a whole number of rows of 1 or more, or None to choose it by memory.",
        )
    if not trained:
        raise ConfigError(
            "nothing-to-train",
            "no parameter of the model requires a gradient.",
            fix="Unfreeze a part of it: parameter.requires_grad_(True).",
        )
    rows = len(inputs)
    if not isinstance(targets, Tensor) or targets.dim() == 0 or len(targets) != rows:
        given = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        raise ConfigError(
            "bad-targets",
            f"targets are {given} for {rows} rows.",
            why="Each row has one target; others would be ignored, or go to another row.",
            fix=f"Pass a tensor of {rows} targets, in the order of the rows.",
        )
    check_suitable(model)
    if unit_index is None:
        return rows
    check_unit_index(unit_index, rows)
    return int(unit_index.max()) + 1 if rows else 0


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
        totals[name] += pieces.pop(name).weighted_sum(factors[name])
    return total_norms(squares)
