"""Differentially private SGD: one step after another, as in Algorithm 1 of De et al. 2022.

``fit`` is the whole method on one screen. It knows nothing of files, reports or recipes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sfumato.privacy.plan import Plan
from sfumato.privacy.sampling_schemes import Batches
from sfumato.randomness import RandomSource
from sfumato.training.averaging import WeightAverage
from sfumato.training.finetuning import training_mode
from sfumato.training.gradient_sums import GradientSum, PlainSum
from sfumato.training.kalman import KalmanFilter


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
    gradient_sum: GradientSum,
    plan: Plan,
    *,
    optimizer: torch.optim.Optimizer,
    learning_rate: Callable[[int], float],
    average: WeightAverage,
    source: RandomSource,
    spend: Callable[[int], None],
    normalised_update: bool = True,
    kalman: KalmanFilter | None = None,
    start_step: int = 0,
    on_noisy_sum: Callable[[int, dict[str, Tensor]], None] | None = None,
) -> Iterator[StepRecord]:
    """Train ``model`` in place, yielding after every step.

    ``gradient_sum(indices, step)`` gives the clipped sum over the units of a step: the engine with any loss
    and clipping function (``EngineSum``), a head in closed form, or one of your own. ``on_noisy_sum`` is
    shown each noisy sum, which is private by then.

    Guarantee: batches are drawn as the plan accounts them, noise for the sum's sensitivity is added once per
    step, and ``spend`` returns before the noisy sum is used. A sum that one unit can move further than the
    plan allows is refused. Whatever ``kalman`` and ``optimizer`` do, they get weights and noisy sums only.
    """
    divisor = divisor_of(plan, normalised_update)
    evaluation_point = nullcontext if kalman is None else kalman.ahead
    training_mode(model)
    batches = plan.sampler().batches(gradient_sum.num_units, source, start_step=start_step)
    for step, indices in enumerate(batches, start=start_step):
        began = time.perf_counter()
        with evaluation_point():
            total = gradient_sum(indices, step)
        noisy = plan.noise(total, source=source, step=step)
        spend(step + 1)  # durable before the update is used
        if on_noisy_sum is not None:
            on_noisy_sum(step, noisy)
        rate = learning_rate(step)
        # The expected size, not len(indices): the true one is private.
        apply_gradient(model, optimizer, noisy, scale=1 / divisor, learning_rate=rate, kalman=kalman)
        average.update(model)
        yield _record(step, rate, began, losses=total.losses, norms=total.norms, clip_norm=plan.clip_norm)


def divisor_of(plan: Plan, normalised_update: bool) -> float:
    """What noisy sums are divided by: the expected batch size, for a normalised update the clip norm too."""
    return plan.batch_size * (plan.clip_norm if normalised_update else 1.0)


def fit_without_privacy(
    model: nn.Module,
    gradient_sum: PlainSum,
    sampler: Batches,
    *,
    optimizer: torch.optim.Optimizer,
    learning_rate: Callable[[int], float],
    average: WeightAverage,
    source: RandomSource,
    start_step: int = 0,
) -> Iterator[StepRecord]:
    """The same loop through ordinary autograd: no clip, no noise, NO guarantee of any kind."""
    training_mode(model)
    batches = sampler.batches(gradient_sum.num_units, source, start_step=start_step)
    for step, indices in enumerate(batches, start=start_step):
        began = time.perf_counter()
        rate = learning_rate(step)
        gradients, losses = gradient_sum(indices, step)
        if len(indices):
            apply_gradient(model, optimizer, gradients, scale=1 / len(indices), learning_rate=rate)
            average.update(model)
        yield _record(step, rate, began, losses=losses, norms=None, clip_norm=None)


def apply_gradient(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients: dict[str, Tensor],
    *,
    scale: float,
    learning_rate: float,
    kalman: KalmanFilter | None = None,
) -> None:
    """One optimizer step on ``scale * gradients``, filtered if there is a filter."""
    parameters = dict(model.named_parameters())
    for name, gradient in gradients.items():
        parameters[name].grad = gradient.mul(scale).to(parameters[name].dtype)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if kalman is None:
        optimizer.step()
    else:
        kalman.step()
    optimizer.zero_grad(set_to_none=True)


def _record(
    step: int, rate: float, began: float, *, losses: Tensor, norms: Tensor | None, clip_norm: float | None
) -> StepRecord:
    clipped = norms if norms is not None and len(norms) else None  # of an empty step nothing is known
    return StepRecord(
        step=step + 1,
        learning_rate=rate,
        seconds=time.perf_counter() - began,
        loss=losses.double().mean().item() if len(losses) else None,
        median_norm=None if clipped is None else clipped.median().item(),
        clipped_share=None
        if clipped is None or clip_norm is None
        else clipped.gt(clip_norm).double().mean().item(),
    )
