"""What a run will take: time from a measured microbatch, memory from what is held. For ``--dry-run``."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn

from sfumato.features.precision import bfloat16_is_faster
from sfumato.gradients.memory import bytes_per_row
from sfumato.gradients.modes import evaluation_mode
from sfumato.models.fixed_features import FixedFeatures
from sfumato.randomness import SeededSource, UnitRandomness
from sfumato.run.prepare import Prepared
from sfumato.run.task import probe_targets
from sfumato.training.fixed_rows import FeatureViews
from sfumato.training.gradient_sums import clipped_total, linear_head, plain_total
from sfumato.training.head import piece_rows
from sfumato.training.inputs import Microbatch
from sfumato.training.last_layer import LastLayerViews

_ROWS_TIMED = 8192  # of a head in closed form
_IMAGES_TIMED = 16  # of an extractor of features
_ROWS_TIMED_IF_SLOW = 4  # of a microbatch in bfloat16, where that takes many times as long


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds and bytes, to within about a third."""

    seconds_per_step: float
    seconds: float  # features and steps
    feature_seconds: float  # of them for the features of all images; 0 without fixed features
    memory_bytes: int
    rows_per_step: int
    microbatch_size: int


def estimate(prepared: Prepared) -> Estimate:
    """Measure one microbatch of random inputs and scale it up; no private image is used."""
    images_per_unit = (
        prepared.units.offsets.diff().clamp(max=prepared.units.max_images).double().mean().item()
    )
    rows_per_step = max(1, round(prepared.batch_size * images_per_unit * prepared.views.rows_per_image))
    weights = sum(value.numel() * value.element_size() for value in prepared.model.parameters())
    # what is loaded; weights, their average, the sum, its noise in double precision, the optimizer's memory
    memory = psutil.Process().memory_info().rss + 8 * weights
    if prepared.plan is not None and prepared.in_closed_form:
        head, features = _head_and_features(prepared)
        rows = min(_ROWS_TIMED, rows_per_step)
        seconds = _head_seconds(prepared, head, rows, clip_norm=prepared.plan.clip_norm)
        microbatch_size = min(rows, piece_rows(head.in_features))
        memory += features.numel() * features.element_size()
    else:
        views = prepared.views
        at_once = views.rows_at_once if isinstance(views, FeatureViews) else 1
        microbatch_size = rows = min(max(prepared.max_rows, at_once), rows_per_step)
        if prepared.in_bfloat16 and not bfloat16_is_faster(prepared.device):
            rows = min(rows, _ROWS_TIMED_IF_SLOW)
        inputs = _random_inputs(prepared, rows)
        seconds = _microbatch_seconds(prepared, inputs)
        memory += microbatch_size * bytes_per_row(prepared.model, inputs[:1])
    seconds_per_step = seconds * rows_per_step / rows
    feature_seconds = _feature_seconds(prepared)
    return Estimate(
        seconds_per_step=seconds_per_step,
        seconds=feature_seconds + seconds_per_step * prepared.num_steps,
        feature_seconds=feature_seconds,
        memory_bytes=memory,
        rows_per_step=rows_per_step,
        microbatch_size=microbatch_size,
    )


@torch.inference_mode()
def _feature_seconds(prepared: Prepared) -> float:
    """Of all images, from a few random ones; features that are in the cache take nothing, unlike here."""
    if not isinstance(prepared.views, FeatureViews | LastLayerViews):
        return 0.0
    model, images = prepared.model, prepared.splits.train.images
    scored = 0 if prepared.final is None else len(prepared.final.images)
    few = torch.rand(_IMAGES_TIMED, *images.shape[1:], device=prepared.device)
    extract = model.extractor if isinstance(model, FixedFeatures) else model
    with evaluation_mode(model):
        for _ in range(2):
            start = time.perf_counter()
            extract(few)
    each = (time.perf_counter() - start) / len(few)
    return each * (len(images) + scored)


def _head_and_features(prepared: Prepared) -> tuple[nn.Linear, Tensor]:
    """What a run in closed form consists of."""
    head, views = prepared.model.head, prepared.views
    assert isinstance(head, nn.Linear)  # else there is no closed form
    assert isinstance(views, FeatureViews | LastLayerViews)
    return head, views.features


def _random_inputs(prepared: Prepared, rows: int) -> Tensor:
    """A microbatch of the run's shape: images, or rows of fixed features."""
    views, images = prepared.views, prepared.splits.train.images
    shape = views.features.shape[1:] if isinstance(views, FeatureViews) else images.shape[1:]
    return torch.randn(rows, *shape, device=prepared.device)


def _head_seconds(prepared: Prepared, head: nn.Linear, rows: int, *, clip_norm: float) -> float:
    features, targets = torch.randn(rows, head.in_features), probe_targets(prepared.splits.train, rows)
    sums = linear_head(features, targets, loss=prepared.loss, num_classes=head.out_features)
    for _ in range(2):
        start = time.perf_counter()
        sums(head.weight.detach(), head.bias.detach(), clip_norm=clip_norm)
    return time.perf_counter() - start


def _microbatch_seconds(prepared: Prepared, inputs: Tensor) -> float:
    rows = len(inputs)
    microbatch = Microbatch(
        inputs=inputs,
        targets=probe_targets(prepared.splits.train, rows, prepared.device),
        unit_index=torch.arange(rows, device=prepared.device),
        num_units=rows,
        unit_ids=torch.arange(rows),
    )
    randomness = UnitRandomness(SeededSource(0), purpose="model", step=0)  # only the time is wanted
    for _ in range(2):  # the first call also chooses the engine's strategies
        start = time.perf_counter()
        if prepared.plan is None:
            plain_total(prepared.model, [microbatch], loss=prepared.loss)
            prepared.model.zero_grad(set_to_none=True)
        else:
            with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=prepared.in_bfloat16):
                clipped_total(
                    prepared.model,
                    [microbatch],
                    clip_norm=prepared.plan.clip_norm,
                    loss=prepared.loss,
                    clipping=prepared.clipping,
                    randomness=randomness,
                )
    return time.perf_counter() - start
