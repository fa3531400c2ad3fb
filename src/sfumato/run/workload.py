"""What a run has to compute, counted before any of it is: rows, multiply-adds, parameters, bytes.

Networks are built on torch's "meta" device, which has shapes and no numbers: neither images nor weights are
needed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from sfumato.data import KNOWN_SETS
from sfumato.errors import ConfigError, SfumatoError
from sfumato.gradients.memory import bytes_per_row
from sfumato.models import create_model
from sfumato.models.summary import summarise
from sfumato.run.planning import build_plan, planned_size
from sfumato.training.finetuning import Part, choose_trained, last_layer

if TYPE_CHECKING:
    from sfumato.recipes.recipe import Recipe
    from sfumato.run.prepare import Prepared

# Sets of the papers that are not shipped: training images and classes, as their authors state them.
PUBLIC_SETS = {"imagenet": (1_281_167, 1000), "imagenet32": (1_281_167, 1000), "places365": (1_803_460, 365)}
# Operations per multiply-add: 2 for the forward pass, 2 for gradients of inputs, 2 for those of weights.
_FORWARD, _WHOLE_STEP, _FROZEN_WEIGHTS = 2, 6, 4
_MODEL_COPIES_BYTES = 4 + 4 + 8 + 8 + 8  # weights, their average, the sum, its noise, the optimizer


@dataclass(frozen=True, kw_only=True)
class Network:
    """One network at one size of images."""

    multiply_adds: int  # per row
    head_multiply_adds: int
    num_parameters: int
    num_trained: int
    row_bytes: int  # in memory while its clipped gradient is computed


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one run computes in all."""

    rows_per_step: float
    rows_per_unit: float
    num_steps: int
    flops_per_row: float
    flops_once: float  # before the first step: what frozen layers make of each image
    num_trained: int
    num_noisy: int  # values that noise is drawn for in a step; 0 without privacy
    model_bytes: int
    row_bytes: int

    @property
    def flops(self) -> float:
        return self.flops_once + self.flops_per_row * self.rows_per_step * self.num_steps


def workload_of(recipe: Recipe) -> Workload:
    """Of a recipe on the set that it names, from public facts alone; no data are looked for."""
    name = recipe.data.name or ""
    known = KNOWN_SETS.get(name)
    if known is None and name not in PUBLIC_SETS:
        raise ConfigError(
            "unknown-size",
            f"how many images {name or 'the data'} has is not known beforehand.",
            fix="Use sfumato train DATA --dry-run --hardware …, which counts them.",
        )
    num_units = known.num_train if known is not None else PUBLIC_SETS[name][0]
    num_classes = known.num_classes if known is not None else PUBLIC_SETS[name][1]
    batch_size, num_steps = planned_size(recipe, num_units)
    if batch_size is None or num_steps is None:
        plan = build_plan(recipe, num_units=num_units)
        assert plan is not None  # without privacy both are given
        batch_size, num_steps = plan.batch_size, plan.num_steps
    size = recipe.data.image_size or (known.image_size if known is not None else 224)
    channels = recipe.data.channels or (known.channels if known is not None else 3)
    if recipe.features is not None:
        raise _fixed_features()
    settings = recipe.model
    options, shape = tuple(sorted(settings.options.items())), (channels, size, size)
    network = count_network(settings.name, options, num_classes, shape, settings.trained)
    views = recipe.augmentation.views
    rows_per_unit = max(1, views) + recipe.augmentation.mixed_views
    return _workload(
        network,
        settings.trained,
        rows_per_step=batch_size * rows_per_unit,
        rows_per_unit=rows_per_unit,
        num_steps=num_steps,
        num_images=num_units,
        fixed_rows=settings.trained == "last" and not views,
        private=recipe.privacy.enabled,
    )


def workload_of_prepared(prepared: Prepared, rows_per_step: float) -> Workload:
    """Of a run that was prepared: its own network at its own size, and the rows of its steps."""
    recipe, train = prepared.recipe, prepared.splits.train
    if recipe.features is not None:
        raise _fixed_features()
    trained: Part = recipe.model.trained
    network = _counted(prepared.model, tuple(train.images.shape[1:]))
    return _workload(
        network,
        trained,
        rows_per_step=rows_per_step,
        rows_per_unit=rows_per_step / prepared.batch_size,
        num_steps=prepared.num_steps,
        num_images=len(train),
        fixed_rows=prepared.in_closed_form,
        private=recipe.privacy.enabled,
    )


def _workload(
    network: Network,
    trained: Part,
    *,
    rows_per_step: float,
    rows_per_unit: float,
    num_steps: int,
    num_images: int,
    fixed_rows: bool,
    private: bool,
) -> Workload:
    flops_per_row = float(_WHOLE_STEP * network.multiply_adds)
    flops_once = 0.0
    if fixed_rows:
        flops_once = float(_FORWARD * network.multiply_adds * num_images)
        flops_per_row = float(_WHOLE_STEP * network.head_multiply_adds)
    elif trained != "all":  # gradients pass through frozen layers, which have none of their own
        flops_per_row = float(_FROZEN_WEIGHTS * network.multiply_adds + _FORWARD * network.head_multiply_adds)
    return Workload(
        rows_per_step=rows_per_step,
        rows_per_unit=rows_per_unit,
        num_steps=num_steps,
        flops_per_row=flops_per_row,
        flops_once=flops_once,
        num_trained=network.num_trained,
        num_noisy=network.num_trained if private else 0,
        model_bytes=4 * network.num_parameters + _MODEL_COPIES_BYTES * network.num_trained,
        row_bytes=network.row_bytes,
    )


@functools.cache
def count_network(
    name: str,
    options: tuple[tuple[str, object], ...],
    num_classes: int,
    shape: tuple[int, int, int],
    trained: Part,
) -> Network:
    """A network of the zoo, counted without its weights."""
    with torch.device("meta"):
        network = create_model(name, num_classes=num_classes, in_channels=shape[0], **dict(options))
        choose_trained(network, trained)
        return _counted(network, shape)


def _counted(network: nn.Module, shape: tuple[int, ...]) -> Network:
    summary = summarise(network, shape)
    head = last_layer(network)
    in_head = [layer for layer in summary.layers if f"{layer.name}.".startswith(f"{head}.")]
    example = torch.zeros(1, *shape, device=next(network.parameters()).device)
    return Network(
        multiply_adds=summary.multiply_adds,
        head_multiply_adds=sum(layer.multiply_adds for layer in in_head),
        num_parameters=summary.num_parameters,
        num_trained=sum(value.numel() for value in network.parameters() if value.requires_grad),
        row_bytes=bytes_per_row(network, example),
    )


def _fixed_features() -> SfumatoError:
    return ConfigError(
        "not-counted",
        "the multiply-adds of fixed features are not counted.",
        why="Their extractors are not made of layers alone; they take minutes on two cores.",
        fix="Leave out --hardware: sfumato train DATA --dry-run measures such a run here.",
    )
