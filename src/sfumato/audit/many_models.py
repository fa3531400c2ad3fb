"""Thousands of small models trained at once by the ordinary loop, each with its own batches and noise.

A stack of M models is one module whose parameters have a leading dimension of models, and its units are the
M * N pairs (model, example). So ``training.fit`` trains it as it trains anything else: the plan's sampler
draws every pair on its own toss, which is one Poisson sample of the N examples for each model; the plan's
noise gives every coordinate of every model its own; the plan's divisor and the optimizer act on each alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy

from sfumato.audit.lenet_passes import unit_gradients
from sfumato.data import ImageSet, normalise
from sfumato.gradients import ClippedSum, Clipping
from sfumato.gradients.clipped import FLAT
from sfumato.gradients.clipping import total_norms
from sfumato.gradients.summation import MARGIN_IN_EPS
from sfumato.privacy import Plan
from sfumato.randomness import RandomSource, UnitRandomness
from sfumato.training import fit
from sfumato.training.averaging import WeightAverage
from sfumato.training.inputs import Units, Views

ROWS_AT_ONCE = 1024  # enough that calls cost little beside the work


def stack(model: nn.Module, count: int) -> nn.Module:
    """``count`` copies of ``model`` as one module of the same parameter names, the first dimension the model.

    Its own ``forward`` means nothing: ``losses_of`` applies the models.
    """
    stacked = copy.deepcopy(model)
    for module in stacked.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            copies = value.detach().expand(count, *value.shape).clone()
            setattr(module, name, nn.Parameter(copies))
    return stacked


@torch.no_grad()
def losses_of(stacked: nn.Module, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """(models, rows): the loss of each model on each row, by ``model``'s own forward pass."""

    def losses(weights: dict[str, Tensor]) -> Tensor:
        outputs = functional_call(model, weights, (inputs,))
        return cross_entropy(outputs, targets, reduction="none")

    return vmap(losses)({name: value.detach() for name, value in stacked.named_parameters()})


def paired_units(data: ImageSet, num_models: int) -> Units:
    """The pairs of models and images as units: pair ``i * num_models + m`` is image i for model m.

    One image more at the end leaves the numbers of all other pairs, and so their draws, as they were.
    """
    rows = torch.arange(len(data)).repeat_interleave(num_models)
    return Units(data=data, rows=rows, offsets=torch.arange(len(rows) + 1), max_images=1)


@dataclass(frozen=True, kw_only=True)
class ManySums:
    """The clipped sums of a stack of LeNets, one of each model over its own units.

    Guarantee: adding or removing one pair moves the sum of its model by at most ``clip_norm``, up to the
    rounding of a sum of one batch in float32, and that of every other model not at all.
    """

    stacked: nn.Module
    data: ImageSet
    inputs: Views
    num_models: int
    clip_norm: float
    source: RandomSource
    clipping: Clipping = FLAT
    fixed: Tensor | None = field(init=False, default=None)  # all examples as inputs, if they have no views

    def __post_init__(self) -> None:
        if not self.inputs.count:
            images = self.data.images[torch.arange(len(self.data))]
            images = normalise(images, self.inputs.mean, self.inputs.std)
            object.__setattr__(self, "fixed", images[:, 0])

    @property
    def num_units(self) -> int:
        return self.num_models * len(self.data)

    def __call__(self, indices: Tensor, step: int) -> ClippedSum:
        trained = {name: value.detach() for name, value in self.stacked.named_parameters()}
        randomness = UnitRandomness(self.source, purpose="augmentation", step=step)
        units = paired_units(self.data, self.num_models)
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in trained.items()}
        norms, losses = [], []
        for models, pairs, present in self._blocks(indices):
            weights = {name: value[models] for name, value in trained.items()}
            images, image_of = self._images(units, pairs, present, randomness)
            found = unit_gradients(weights, images, image_of, self.data.labels[pairs // self.num_models])
            squares = found.squared_norms()
            margin = MARGIN_IN_EPS * torch.finfo(images.dtype).eps
            factors = self.clipping.factors(squares, self.clip_norm, margin)
            counted = {name: value.view(present.shape) * present for name, value in factors.items()}
            for name, value in found.weighted_sums(counted).items():
                sums[name][models].add_(value)
            norms.append(total_norms(squares)[present.flatten()])
            losses.append(found.losses[present])
        nothing = torch.zeros(0, dtype=torch.float64)
        return ClippedSum(
            gradients=sums,
            norms=torch.cat([nothing, *norms]),
            losses=torch.cat([nothing, *losses]),
            sensitivity=self.clipping.sensitivity(self.clip_norm),
            dtypes={name: value.dtype for name, value in trained.items()},
        )

    def _blocks(self, indices: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(models, pairs, present) of one pass: neighbouring models side by side.

        A shorter batch is filled up with pairs that are not ``present``, of whom nothing is counted.
        """
        owners = indices.numpy() % self.num_models
        indices = indices[torch.from_numpy(np.argsort(owners, kind="stable"))]
        sizes = np.bincount(owners, minlength=self.num_models)
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        at_once = max(1, ROWS_AT_ONCE // self.inputs.rows_per_image)  # pairs of one pass
        num_blocks = -(-self.num_models // max(1, at_once // max(1, sizes.max())))
        for models in np.array_split(np.arange(self.num_models), num_blocks):
            longest = sizes[models].max()
            for first in range(0, longest, at_once):
                places = np.arange(first, min(longest, first + at_once))
                present = places < sizes[models][:, None]
                taken = np.where(present, bounds[models][:, None] + places, 0)
                block = slice(models[0], models[-1] + 1)
                yield block, indices[torch.from_numpy(taken)], torch.from_numpy(present)

    def _images(
        self, units: Units, pairs: Tensor, present: Tensor, randomness: UnitRandomness
    ) -> tuple[Tensor, Tensor]:
        """Images (., 28, 28), and which the rows of ``pairs`` (models, units) are; -1: not present."""
        if self.fixed is not None:
            return self.fixed, torch.where(present, pairs // self.num_models, -1)[:, :, None]
        drawn = self._drawn(units, pairs.flatten(), randomness)
        rows = torch.arange(len(drawn)).view(*pairs.shape, -1)
        return drawn, torch.where(present[:, :, None], rows, -1)

    def _drawn(self, units: Units, pairs: Tensor, randomness: UnitRandomness) -> Tensor:
        """The rows of pairs, one pair's after another's, through the views of an ordinary training."""
        rows = self.inputs.rows_per_image
        parts = self.inputs.microbatches(
            units, pairs, max_rows=rows * len(pairs), randomness=randomness, device=torch.device("cpu")
        )
        return next(iter(parts)).inputs[:, 0]


def train_many(
    model: nn.Module,
    plan: Plan,
    data: ImageSet,
    inputs: Views,
    *,
    num_models: int,
    learning_rate: float,
    source: RandomSource,
) -> nn.Module:
    """A stack of models, all from ``model``'s weights, trained on ``data`` by ``fit`` with plain SGD.

    They differ in what ``source`` gives: their batches, noise and views.
    """
    stacked = stack(model, num_models)
    sums = ManySums(
        stacked=stacked,
        data=data,
        inputs=inputs,
        num_models=num_models,
        clip_norm=plan.clip_norm,
        source=source,
    )
    steps = fit(
        stacked,
        sums,
        plan,
        optimizer=torch.optim.SGD(stacked.parameters(), lr=learning_rate),
        learning_rate=lambda step: learning_rate,
        average=WeightAverage(decay=0.0, weights={}),  # the last weights are what is attacked
        source=source,
        spend=lambda step: None,  # an audit's data is public: no ledger
    )
    for _ in steps:
        pass
    return stacked
