"""What computes the clipped sums of a run: in closed form or by the engine, in one process or over ranks."""

from __future__ import annotations

from dataclasses import replace

from sfumato.gradients import Choices
from sfumato.privacy.plan import Plan
from sfumato.run.prepare import Prepared
from sfumato.training.gradient_sums import EngineSum, GradientSum, head_gradients
from sfumato.training.ranked_sum import RankedSum, StepKeys


def ranked_sum(prepared: Prepared, plan: Plan, *, max_rows: int) -> GradientSum:
    """The sums of this run over all its ranks; of a process alone its own."""
    if prepared.ranks.size == 1:
        return gradient_sum(prepared, plan, max_rows=max_rows)
    keys, units = StepKeys(), prepared.units
    return RankedSum(
        ranks=prepared.ranks,
        own=gradient_sum(replace(prepared, source=keys), plan, max_rows=max_rows),
        keys=keys,
        model=prepared.model,
        source=prepared.source,
        unit_sizes=units.offsets.diff().clamp(max=units.max_images),
    )


def gradient_sum(prepared: Prepared, plan: Plan, *, max_rows: int) -> GradientSum:
    """Computes the clipped sums of this run: in closed form where there is one, else by the engine."""
    if prepared.in_closed_form:
        closed_form = head_gradients(
            prepared.model,
            prepared.views,
            prepared.units,
            clip_norm=plan.clip_norm,
            loss=prepared.components.loss_of(prepared.recipe),
            class_weights=prepared.class_weights,
        )
        if closed_form is not None:
            return closed_form
    # timing the engine's strategies would make a seeded run round differently each time
    seeded = prepared.recipe.training.seed is not None
    return EngineSum(
        model=prepared.model,
        units=prepared.units,
        inputs=prepared.views,
        clip_norm=plan.clip_norm,
        source=prepared.source,
        max_rows=max_rows,
        loss=prepared.loss,
        clipping=prepared.clipping,
        choices=Choices(deterministic=True) if seeded else None,
        in_bfloat16=prepared.in_bfloat16,
    )
