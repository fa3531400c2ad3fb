"""``clipped_sum``: what is computed, what it guarantees, and which arguments are refused."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.errors import ConfigError
from sfumato.gradients.choice import Choices
from sfumato.gradients.clipping import Clipping, FlatClipping
from sfumato.gradients.contents import parameters_of
from sfumato.gradients.segments import check_unit_index
from sfumato.gradients.shapes import Int64, Shaped
from sfumato.gradients.stochastic import Randomness, check_unit_ids
from sfumato.gradients.suitability import check_suitable
from sfumato.gradients.summation import ClippedSum, sum_over_passes

SMALLEST_CLIP_NORM = 1e-12
FLAT = FlatClipping()
_REMEMBERED = Choices()  # strategies of the layers met so far; a performance setting, not state


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
    and "gram" add up to 128 units in one library call, whatever the microbatch. n units may add up to
    n * min(n, 128) * 2**-24 clip norms, 2e-4 for 64 units, where every rounding goes the same way; otherwise
    about sqrt(n) * 2**-24.
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model: its layers are those of the original
    trained = {name: value for name, value in parameters_of(model) if value.requires_grad}
    num_units = _check(model, trained, inputs, targets, clip_norm, unit_index, microbatch_size)
    if randomness is not None:
        check_unit_ids(unit_ids, num_units)
    return sum_over_passes(
        model,
        trained,
        inputs,
        targets,
        num_units=num_units,
        unit_index=unit_index,
        unit_ids=unit_ids,
        clip_norm=clip_norm,
        loss=loss,
        microbatch_size=microbatch_size,
        clipping=clipping,
        randomness=randomness,
        choices=choices or _REMEMBERED,
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
