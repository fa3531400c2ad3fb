"""Differentially private SGD: one step after another, as in Algorithm 1 of De et al. 2022.

``fit`` is the whole method on one screen. It knows nothing of files, reports or recipes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.gradients import Choices, ClippedSum, clipped_sum
from sfumato.privacy.plan import Plan
from sfumato.randomness import RandomSource, UnitRandomness
from sfumato.sampling import FullBatch, PoissonSampling
from sfumato.training.averaging import WeightAverage
from sfumato.training.finetuning import training_mode
from sfumato.training.inputs import Microbatch, Units, Views


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step leaves behind. The last three fields are computed from private data: sensitive."""

    step: int  # steps done, this one included
    learning_rate: float
    seconds: float
    loss: float | None  # None for an empty batch
    median_norm: float | None
    clipped_share: float | None


def fit(
    model: nn.Module,
    units: Units,
    plan: Plan,
    *,
    views: Views,
    optimizer: torch.optim.Optimizer,
    learning_rate: Callable[[int], float],
    average: WeightAverage,
    source: RandomSource,
    spend: Callable[[int], None],
    max_rows: int,
    normalised_update: bool = True,
    choices: Choices | None = None,
    closed_form: Callable[[Tensor, float], ClippedSum] | None = None,
    start_step: int = 0,
) -> Iterator[StepRecord]:
    """Train ``model`` in place, yielding after every step.

    ``closed_form(indices, clip_norm)`` gives the clipped sum over those units where it is known without the
    engine, as for a linear head on fixed features.

    Guarantee: batches are drawn as the plan accounts them, each unit enters through one clipped gradient, its
    views and what the model draws for it come from ``source`` and do not depend on other units, noise is
    added once per step to the sum over all microbatches, and ``spend`` returns before the noisy sum is used.
    """
    device = next(model.parameters()).device
    divisor = plan.batch_size * (plan.clip_norm if normalised_update else 1.0)
    training_mode(model)
    batches = plan.sampler().batches(len(units), source, start_step=start_step)
    for step, indices in enumerate(batches, start=start_step):
        began = time.perf_counter()
        augmentation = UnitRandomness(source, purpose="augmentation", step=step)
        microbatches = views.microbatches(
            units, indices, max_rows=max_rows, randomness=augmentation, device=device
        )
        if closed_form is not None:
            total = closed_form(indices, plan.clip_norm)
        else:
            draws = UnitRandomness(source, purpose="model", step=step)
            total = clipped_total(
                model, microbatches, clip_norm=plan.clip_norm, choices=choices, randomness=draws
            )
        noisy = plan.noise(total, source=source, step=step)
        spend(step + 1)  # durable before the update is used
        rate = learning_rate(step)
        # The expected size, not len(indices): the true one is private.
        apply_gradient(model, optimizer, noisy, scale=1 / divisor, learning_rate=rate)
        average.update(model)
        yield _record(step, rate, began, losses=total.losses, norms=total.norms, clip_norm=plan.clip_norm)


def fit_without_privacy(
    model: nn.Module,
    units: Units,
    sampler: PoissonSampling | FullBatch,
    *,
    views: Views,
    optimizer: torch.optim.Optimizer,
    learning_rate: Callable[[int], float],
    average: WeightAverage,
    source: RandomSource,
    max_rows: int,
    start_step: int = 0,
) -> Iterator[StepRecord]:
    """The same loop through ordinary autograd: no clip, no noise, NO guarantee of any kind."""
    device = next(model.parameters()).device
    training_mode(model)
    for step, indices in enumerate(
        sampler.batches(len(units), source, start_step=start_step), start=start_step
    ):
        began = time.perf_counter()
        augmentation = UnitRandomness(source, purpose="augmentation", step=step)
        microbatches = views.microbatches(
            units, indices, max_rows=max_rows, randomness=augmentation, device=device
        )
        rate = learning_rate(step)
        gradients, losses = plain_total(model, microbatches)
        if len(indices):
            apply_gradient(model, optimizer, gradients, scale=1 / len(indices), learning_rate=rate)
            average.update(model)
        yield _record(step, rate, began, losses=losses, norms=None, clip_norm=None)


def clipped_total(
    model: nn.Module,
    microbatches: Iterable[Microbatch],
    *,
    clip_norm: float,
    choices: Choices | None = None,
    randomness: UnitRandomness | None = None,
) -> ClippedSum:
    """The clipped sum over all units of a batch, one microbatch in memory at a time.

    An empty batch gives zeros of the same sensitivity: an ordinary step of pure noise. What the model
    draws at random comes from ``randomness``, for each unit by its number.
    """
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    device = trained[0][1].device
    nothing = torch.zeros(0, dtype=torch.float64, device=device)
    total = ClippedSum(
        gradients={name: torch.zeros_like(value, dtype=torch.float64) for name, value in trained},
        norms=nothing,
        losses=nothing,
        sensitivity=clip_norm,
    )
    for part in microbatches:
        total += clipped_sum(
            model,
            part.inputs,
            part.targets,
            clip_norm=clip_norm,
            unit_index=part.unit_index if part.num_units < len(part.inputs) else None,
            microbatch_size=len(part.inputs),
            choices=choices,
            randomness=randomness,
            unit_ids=part.unit_ids,
        )
    return total


def plain_total(model: nn.Module, microbatches: Iterable[Microbatch]) -> tuple[dict[str, Tensor], Tensor]:
    """The sum over units of their mean gradients by ordinary autograd, and the units' losses."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    model.zero_grad(set_to_none=True)
    losses = []
    for part in microbatches:
        rows = cross_entropy(model(part.inputs), part.targets, reduction="none")
        sizes = torch.bincount(part.unit_index, minlength=part.num_units)
        per_unit = torch.zeros(part.num_units, device=rows.device).index_add(0, part.unit_index, rows) / sizes
        per_unit.sum().backward()
        losses.append(per_unit.detach())
    gradients = {name: value.grad for name, value in trained.items() if value.grad is not None}
    return gradients, torch.cat(losses) if losses else torch.zeros(0)


def apply_gradient(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients: dict[str, Tensor],
    *,
    scale: float,
    learning_rate: float,
) -> None:
    """One optimizer step on ``scale * gradients``."""
    parameters = dict(model.named_parameters())
    for name, gradient in gradients.items():
        parameters[name].grad = gradient.mul(scale).to(parameters[name].dtype)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _record(
    step: int, rate: float, began: float, *, losses: Tensor, norms: Tensor | None, clip_norm: float | None
) -> StepRecord:
    some = norms is not None and len(norms) > 0
    return StepRecord(
        step=step + 1,
        learning_rate=rate,
        seconds=time.perf_counter() - began,
        loss=losses.double().mean().item() if len(losses) else None,
        median_norm=norms.median().item() if some else None,
        clipped_share=(norms > clip_norm).double().mean().item() if some else None,
    )
