"""The seam of the loop: whatever gives the clipped sum over the units of a step.

``EngineSum`` is the gradient engine on images, with any loss and any clipping function; ``ClosedFormSum`` a
linear head in closed form. Sums over the ranks of a process group or over many models at once fit here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.gradients import Choices, ClippedSum, Clipping, clipped_sum
from sfumato.gradients.clipped import FLAT
from sfumato.gradients.row_losses import row_losses
from sfumato.models.fixed_features import FeatureClassifier
from sfumato.randomness import UnitRandomness
from sfumato.training.fixed_rows import ROWS_AT_ONCE, FeatureViews, in_closed_form
from sfumato.training.head import LinearHead, LogisticRegression, SoftmaxRegression
from sfumato.training.inputs import Inputs, Microbatch, Units
from sfumato.training.last_layer import LastLayerViews
from sfumato.training.losses import BinaryCrossEntropy

if TYPE_CHECKING:
    from sfumato.randomness import RandomSource

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) of one row -> its loss


class GradientSum(Protocol):
    """Gives the clipped sum over the units of a step, of the model as it is at that moment.

    Guarantee that an implementation gives: adding or removing one unit moves the sum by at most its
    ``sensitivity``, whatever the unit contains; what is drawn at random for a unit comes from the run's
    source and does not depend on other units. An empty step gives zeros of the same sensitivity.
    """

    @property
    def num_units(self) -> int:
        """Units that steps are drawn from."""

    def __call__(self, indices: Tensor, step: int) -> ClippedSum:
        """The sum over the units in ``indices``."""


@dataclass(frozen=True, kw_only=True)
class EngineSum:
    """The engine, one microbatch in memory at a time.

    ``clipping`` decides how a unit's gradient is bounded by ``clip_norm``; ``choices`` and ``in_bfloat16``
    are performance settings.
    """

    model: nn.Module
    units: Units
    inputs: Inputs
    clip_norm: float
    source: RandomSource
    max_rows: int
    loss: Loss = cross_entropy
    clipping: Clipping = FLAT
    choices: Choices | None = None
    in_bfloat16: bool = False  # the passes; norms and sums are in float32 or better all the same

    @property
    def num_units(self) -> int:
        return len(self.units)

    def __call__(self, indices: Tensor, step: int) -> ClippedSum:
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.in_bfloat16):
            return clipped_total(
                self.model,
                microbatches_of(self, indices, step),
                clip_norm=self.clip_norm,
                loss=self.loss,
                clipping=self.clipping,
                choices=self.choices,
                randomness=UnitRandomness(self.source, purpose="model", step=step),
            )


@dataclass(frozen=True, kw_only=True)
class ClosedFormSum:
    """A linear head on fixed rows: the same sums in closed form, five times as fast as the engine.

    Build it with ``head_gradients`` when everything before the head is final: its rows are computed once.
    """

    head: nn.Linear
    sums: LinearHead
    clip_norm: float
    num_units: int

    def __call__(self, indices: Tensor, step: int) -> ClippedSum:
        chosen = None if len(indices) == self.num_units else indices
        weight, bias = self.head.weight.detach(), self.head.bias.detach()
        total = self.sums(weight, bias, clip_norm=self.clip_norm, indices=chosen)
        return replace(total, gradients={f"head.{name}": value for name, value in total.gradients.items()})


@torch.no_grad()
def head_gradients(
    model: nn.Module,
    inputs: Inputs,
    units: Units,
    *,
    clip_norm: float,
    loss: Loss = cross_entropy,
    class_weights: tuple[float, ...] | None = None,
) -> ClosedFormSum | None:
    """The closed form for ``model``, or None if it is not a linear head on fixed rows, each row a unit.

    ``loss`` is one that ``has_closed_form``.
    """
    if not has_closed_form(loss):
        return None
    if not isinstance(inputs, FeatureViews | LastLayerViews) or not in_closed_form(model, inputs, units):
        return None
    head, rows = model.head, inputs.features
    assert isinstance(head, nn.Linear)  # else there is no closed form
    if isinstance(model, FeatureClassifier):
        rows = torch.empty(inputs.features.shape)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            rows[part] = model.features(inputs.features[part])
    sums = linear_head(
        rows, units.data.labels, loss=loss, num_classes=head.out_features, class_weights=class_weights
    )
    return ClosedFormSum(head=head, sums=sums, clip_norm=clip_norm, num_units=len(units))


def has_closed_form(loss: Loss) -> bool:
    """Whether the residuals of a linear head under this loss are known: softmax, or a sigmoid per finding."""
    return loss is cross_entropy or isinstance(loss, BinaryCrossEntropy)


def linear_head(
    rows: Tensor,
    targets: Tensor,
    *,
    loss: Loss,
    num_classes: int,
    class_weights: tuple[float, ...] | None = None,
) -> LinearHead:
    """The sums over ``rows`` under a loss that ``has_closed_form``; only classes have ``class_weights``."""
    if isinstance(loss, BinaryCrossEntropy):
        return LogisticRegression(rows, targets, loss=loss)
    return SoftmaxRegression(rows, targets, num_classes=num_classes, class_weights=class_weights)


@dataclass(frozen=True, kw_only=True)
class PlainSum:
    """Ordinary autograd: no clip, NO guarantee of any kind. For training without privacy only."""

    model: nn.Module
    units: Units
    inputs: Inputs
    source: RandomSource
    max_rows: int
    loss: Loss = cross_entropy

    @property
    def num_units(self) -> int:
        return len(self.units)

    def __call__(self, indices: Tensor, step: int) -> tuple[dict[str, Tensor], Tensor]:
        """The sum over units of their mean gradients, and the units' losses."""
        return plain_total(self.model, microbatches_of(self, indices, step), loss=self.loss)


def microbatches_of(gradient_sum: EngineSum | PlainSum, indices: Tensor, step: int) -> Iterable[Microbatch]:
    """The inputs of a step, drawn from the run's source for each unit by its number."""
    return gradient_sum.inputs.microbatches(
        gradient_sum.units,
        indices,
        max_rows=gradient_sum.max_rows,
        randomness=UnitRandomness(gradient_sum.source, purpose="augmentation", step=step),
        device=next(gradient_sum.model.parameters()).device,
    )


def clipped_total(
    model: nn.Module,
    microbatches: Iterable[Microbatch],
    *,
    clip_norm: float,
    loss: Loss = cross_entropy,
    clipping: Clipping = FLAT,
    choices: Choices | None = None,
    randomness: UnitRandomness | None = None,
) -> ClippedSum:
    """The clipped sum over all units of a batch, one microbatch in memory at a time.

    An empty batch gives zeros of the same sensitivity: an ordinary step of pure noise. What the model
    draws at random comes from ``randomness``, for each unit by its number.
    """
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    gradients = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in trained}
    # joined at the end: joining them at each microbatch would copy all those before it again
    norms: list[Tensor] = [torch.zeros(0, dtype=torch.float64, device=trained[0][1].device)]
    losses = list(norms)
    for part in microbatches:
        total = clipped_sum(
            model,
            part.inputs,
            part.targets,
            clip_norm=clip_norm,
            loss=loss,
            clipping=clipping,
            unit_index=part.unit_index if part.num_units < len(part.inputs) else None,
            microbatch_size=len(part.inputs),
            choices=choices,
            randomness=randomness,
            unit_ids=part.unit_ids,
        )
        for name, value in total.gradients.items():
            gradients[name] += value
        norms.append(total.norms)
        losses.append(total.losses)
    return ClippedSum(
        gradients=gradients,
        norms=torch.cat(norms),
        losses=torch.cat(losses),
        sensitivity=clipping.sensitivity(clip_norm),
        dtypes={name: value.dtype for name, value in trained},
    )


def plain_total(
    model: nn.Module, microbatches: Iterable[Microbatch], *, loss: Loss = cross_entropy
) -> tuple[dict[str, Tensor], Tensor]:
    """The sum over units of their mean gradients by ordinary autograd, and the units' losses."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    model.zero_grad(set_to_none=True)
    losses = []
    for part in microbatches:
        rows = row_losses(loss, model(part.inputs), part.targets)
        sizes = torch.bincount(part.unit_index, minlength=part.num_units)
        per_unit = torch.zeros(part.num_units, device=rows.device).index_add(0, part.unit_index, rows) / sizes
        per_unit.sum().backward()
        losses.append(per_unit.detach())
    gradients = {name: value.grad for name, value in trained.items() if value.grad is not None}
    return gradients, torch.cat(losses) if losses else torch.zeros(0)
