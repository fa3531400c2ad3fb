"""What a run will take: time from a measured microbatch, memory from what is held. For ``--dry-run``."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

import torch

from sfumato.memory import bytes_per_row
from sfumato.preparation import Prepared
from sfumato.training import clipped_total, plain_total
from sfumato.units import Microbatch


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds and bytes, to within about a third."""

    seconds_per_step: float
    seconds: float
    memory_bytes: int
    rows_per_step: int
    microbatch_size: int


def estimate(prepared: Prepared) -> Estimate:
    """Measure one microbatch of noise images and scale it up; no private image is used."""
    views = max(1, prepared.views.count)
    held = float(prepared.units.offsets.diff().clamp(max=prepared.units.max_images).double().mean())
    rows_per_step = max(1, round(prepared.batch_size * held * views))
    rows = min(prepared.max_rows, rows_per_step)
    seconds = _seconds_of(prepared, rows)
    weights = sum(value.numel() * value.element_size() for value in prepared.model.parameters())
    images = prepared.splits.train.images
    example = torch.zeros(1, *images.shape[1:], device=prepared.device)
    # weights, their average, the sum, its noise in double precision, and the optimizer's memory
    memory = _resident() + 8 * weights + rows * bytes_per_row(prepared.model, example)
    per_step = seconds * rows_per_step / rows
    return Estimate(
        seconds_per_step=per_step,
        seconds=per_step * prepared.num_steps,
        memory_bytes=memory,
        rows_per_step=rows_per_step,
        microbatch_size=rows,
    )


def _seconds_of(prepared: Prepared, rows: int) -> float:
    shape, classes = prepared.splits.train.images.shape[1:], len(prepared.splits.train.classes)
    part = Microbatch(
        inputs=torch.randn(rows, *shape, device=prepared.device),
        targets=torch.arange(rows, device=prepared.device) % classes,
        unit_index=torch.arange(rows, device=prepared.device),
        num_units=rows,
    )
    for _ in range(2):  # the first call also chooses the engine's strategies
        began = time.perf_counter()
        if prepared.plan is None:
            plain_total(prepared.model, [part])
            prepared.model.zero_grad(set_to_none=True)
        else:
            clipped_total(prepared.model, [part], clip_norm=prepared.plan.clip_norm)
    return time.perf_counter() - began


def _resident() -> int:
    """Bytes this process holds at its peak so far: libraries and data."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
