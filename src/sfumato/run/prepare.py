"""What happens before any budget is spent: data, model and plan are built and checked.

Nothing here writes into the run's folder, so that a refusal leaves none; features are kept in their cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from sfumato.data import DataSplits, ImageSet
from sfumato.doctor import (
    Finding,
    check_forward,
    check_model,
    examine_data,
    examine_plan,
    examine_precision,
    examine_surroundings,
)
from sfumato.errors import PrivacyError
from sfumato.gradients import Clipping, FlatClipping
from sfumato.privacy.plan import Plan
from sfumato.privacy.sampling_schemes import Batches
from sfumato.randomness import RandomSource, SecureSource, SeededSource
from sfumato.recipes.recipe import Recipe
from sfumato.run.backbones import with_backbone
from sfumato.run.canaries import check_room
from sfumato.run.decision import declared_prior, first_decision
from sfumato.run.devices import choose_device, fitting_rows
from sfumato.run.features import feature_views
from sfumato.run.first_network import build_network, start_from
from sfumato.run.progress import ProgressObserver, features_counter, listing_counter, reading_counter
from sfumato.run.provenance import Provenance
from sfumato.run.resolve import Resolved, group_units, load_splits, resolve
from sfumato.run.task import probe_targets
from sfumato.run.weights import Checkpoint, read_checkpoint
from sfumato.sampling import PoissonSampling
from sfumato.training.component_checks import check_private_step
from sfumato.training.components import AS_THE_RECIPE_SAYS, Components, WeightedLoss
from sfumato.training.decision import Decision, Shares, weights_of_classes
from sfumato.training.fixed_rows import in_closed_form
from sfumato.training.gradient_sums import Loss, has_closed_form
from sfumato.training.inputs import Inputs, Units
from sfumato.training.kalman import KalmanFilter
from sfumato.training.last_layer import last_layer_views
from sfumato.training.losses import BinaryCrossEntropy
from sfumato.training.ranks import ALONE, Ranks, first_on_host


@dataclass(frozen=True, kw_only=True)
class ScoredSet:
    """Images on which accuracy is measured; sensitive ones must not leave the state folder."""

    split: Literal["test", "val"]
    images: ImageSet
    sensitive: bool


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that has passed every check: its resolved values, and what was built from them."""

    resolved: Resolved
    splits: DataSplits
    units: Units
    model: nn.Module
    optimizer: torch.optim.Optimizer
    views: Inputs
    source: RandomSource
    device: torch.device
    max_rows: int
    components: Components = AS_THE_RECIPE_SAYS
    prior: Shares | None = None  # of the classes among the units: declared, or released once the run begins
    findings: tuple[Finding, ...] = ()  # what the doctor found worth knowing
    ranks: Ranks = ALONE

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    @property
    def plan(self) -> Plan | None:
        return self.resolved.plan

    @property
    def provenance(self) -> Provenance | None:
        return self.resolved.provenance

    @property
    def num_steps(self) -> int:
        return self.resolved.num_steps

    @property
    def batch_size(self) -> float:
        return self.resolved.batch_size

    @property
    def sampler(self) -> Batches:
        if self.plan is not None:
            return self.plan.sampler()
        return PoissonSampling(sampling_rate=self.resolved.sampling_rate, num_steps=self.num_steps)

    @property
    def class_weights(self) -> Shares | None:
        """Of the loss; balanced ones are known once the run has begun, if the prior is released then."""
        wanted = self.recipe.training.class_weights
        return weights_of_classes(wanted, self.prior, num_classes=len(self.resolved.classes))

    @property
    def loss(self) -> Loss:
        loss, weights = self.components.loss_of(self.recipe), self.class_weights
        return loss if weights is None else WeightedLoss(loss=loss, class_weights=weights)

    @property
    def decision(self) -> Decision:
        """From outputs to a class, as far as it is known before the last step."""
        return first_decision(
            self.recipe, self.splits.train, prior=self.prior, class_weights=self.class_weights
        )

    @property
    def clipping(self) -> Clipping:
        return self.components.clipping_of(self.recipe)

    @property
    def kalman(self) -> KalmanFilter | None:
        """The filter over noisy gradients, if the recipe wants one; its memory is the optimizer's."""
        gain = self.recipe.training.kalman_gain
        return None if gain is None else KalmanFilter(self.optimizer, gain=gain)

    @property
    def in_closed_form(self) -> bool:
        """Whether the clipped sums of this run have a closed form."""
        loss = self.components.loss_of(self.recipe)  # class weights have a closed form too
        supported = has_closed_form(loss) and self.clipping == FlatClipping()
        return supported and in_closed_form(self.model, self.views, self.units)

    @property
    def in_bfloat16(self) -> bool:
        """Whether the engine's passes are; a closed form has none, and training without privacy asks not."""
        asked = self.recipe.performance.precision == "bfloat16"
        return asked and self.plan is not None and not self.in_closed_form

    @property
    def releasable(self) -> bool:
        return self.plan is not None and self.source.releasable

    @property
    def monitored(self) -> ScoredSet | None:
        """What is scored during training: validation images that may be used for it, else the final ones."""
        val = self.splits.val
        if val is not None and (self.recipe.data.val_is_public or self.recipe.data.holdout):
            return ScoredSet(split="val", images=val, sensitive=not self.recipe.data.val_is_public)
        return self.final

    @property
    def final(self) -> ScoredSet | None:
        """What the finished model is scored on."""
        settings = self.recipe.data
        if self.splits.test is not None and not settings.holdout:
            return ScoredSet(split="test", images=self.splits.test, sensitive=False)
        if self.splits.val is not None:
            return ScoredSet(split="val", images=self.splits.val, sensitive=not settings.val_is_public)
        return None


def prepare(
    recipe: Recipe,
    *,
    data: DataSplits | None = None,
    model: nn.Module | None = None,
    force: bool = False,
    pretrained: Path | None = None,
    components: Components = AS_THE_RECIPE_SAYS,
    observer: ProgressObserver | None = None,
    rows: bool = True,
    ranks: Ranks = ALONE,
) -> Prepared:
    """Load, build, plan and check; raises before any budget is spent.

    ``data``, ``model`` and ``components`` (loss, clipping, sampling, optimizer) replace what the recipe
    names. ``force`` accepts a delta above 1 / (number of units), which the statement then says.
    ``pretrained`` is the finished first stage of a recipe with [pretraining]. ``observer`` is told how far
    the computation of features is. Without ``rows`` no fixed feature is fitted or computed: they have their
    shape only, enough for an estimate and for nothing else. Of several ``ranks`` each prepares the same.
    """
    recipe = recipe if model is not None else with_backbone(recipe)
    splits = data
    if splits is None:
        on_progress, on_listing = reading_counter(observer), listing_counter(observer)
        splits = load_splits(recipe.data, on_progress=on_progress, on_listing=on_listing)
    resolved, checkpoint = resolve(
        recipe, splits, model=model, force=force, pretrained=pretrained, components=components
    )
    return _assemble(
        resolved,
        splits,
        checkpoint,
        model=model,
        components=components,
        observer=observer,
        rows=rows,
        ranks=ranks,
    )


def _assemble(
    resolved: Resolved,
    splits: DataSplits,
    checkpoint: Checkpoint | None,
    *,
    model: nn.Module | None,
    components: Components,
    observer: ProgressObserver | None,
    rows: bool,
    ranks: Ranks,
) -> Prepared:
    """Build and check what the resolved settings say."""
    recipe, plan, train = resolved.recipe, resolved.plan, splits.train
    source: RandomSource = (
        SecureSource() if recipe.training.seed is None else SeededSource(recipe.training.seed)
    )
    device = choose_device(recipe.performance.device, ranks)
    with first_on_host(ranks):  # fits the features, and the others find them in the cache
        network = build_network(
            recipe,
            train,
            source,
            checkpoint=checkpoint,
            device=device,
            model=model,
            observer=observer,
            fit=rows,
        )
    optimizer = components.optimizer_of(recipe, network, plan)
    check_forward(network, tuple(train.images.shape[1:]), num_classes=len(train.classes))
    check_room(recipe, network, train)
    max_rows = recipe.performance.microbatch_size or fitting_rows(network, train, device, ranks)
    findings = () if plan is None else examine(recipe, splits, network, plan, max_rows=max_rows)
    if plan is not None and not components.are_named:
        check_components(recipe, components, network, train, plan)
    counter = features_counter(observer, "training")
    prepared = Prepared(
        resolved=resolved,
        splits=splits,
        units=group_units(recipe, train),
        model=network,
        optimizer=optimizer,
        views=feature_views(network, recipe, train, on_progress=counter, compute=rows, ranks=ranks)
        or resolved.image_views(),
        source=source,
        device=device,
        max_rows=max_rows,
        components=components,
        prior=declared_prior(recipe, train),
        findings=findings,
        ranks=ranks,
    )
    weights_are_final = recipe.pretraining is None or checkpoint is not None or not rows
    if weights_are_final and ranks.is_first:  # other ranks get their weights from it, before the steps
        prepared = with_last_layer_rows(prepared, observer, compute=rows)
    slow = examine_precision(device) if prepared.in_bfloat16 else []
    return replace(prepared, findings=(*findings, *slow))


def with_pretrained_weights(prepared: Prepared, release: Path, observer: ProgressObserver | None) -> Prepared:
    """The run with the weights of its first stage, in the network that was checked."""
    checkpoint = read_checkpoint(release)
    start_from(prepared.model, checkpoint, prepared.splits.train, observer)
    return with_last_layer_rows(prepared, observer)


def with_last_layer_rows(
    prepared: Prepared, observer: ProgressObserver | None, *, compute: bool = True
) -> Prepared:
    """The run with the inputs of its last layer, computed once or as a shape, if it alone is trained."""
    if prepared.recipe.model.trained != "last" or prepared.plan is None:
        return prepared
    counter = features_counter(observer, "training")
    train = prepared.splits.train
    views = last_layer_views(prepared.model, train, prepared.views, on_progress=counter, compute=compute)
    return replace(prepared, views=views)


def examine_network(model: nn.Module, train: ImageSet, *, max_rows: int) -> list[Finding]:
    """What the doctor finds in the model, probed with noise: no private image is needed for that."""
    device = next(model.parameters()).device
    noise = torch.randn(4, *train.images.shape[1:], device=device)
    loss = BinaryCrossEntropy() if train.multi_label else None
    targets = probe_targets(train, len(noise), device)
    return check_model(model, noise, num_rows=max_rows, loss=loss, targets=targets)


def check_components(
    recipe: Recipe, components: Components, model: nn.Module, train: ImageSet, plan: Plan
) -> None:
    """Refuse a loss or clipping function of the caller's own that a step would refuse, probed with noise."""
    device = next(model.parameters()).device
    check_private_step(
        model,
        torch.randn(4, *train.images.shape[1:], device=device),
        probe_targets(train, 4, device),
        clip_norm=plan.clip_norm,
        loss=components.loss_of(recipe),
        clipping=components.clipping_of(recipe),
    )


def examine(
    recipe: Recipe, splits: DataSplits, model: nn.Module, plan: Plan, *, max_rows: int
) -> tuple[Finding, ...]:
    """What the doctor finds in model, data and plan; whatever would void the guarantee is refused."""
    settings = recipe.data
    findings = [
        *examine_network(model, splits.train, max_rows=max_rows),
        *examine_data(
            splits,
            unit=recipe.privacy.unit,
            mean=settings.mean,
            std=settings.std,
            holdout=settings.holdout,
        ),
        *examine_plan(plan),
        *examine_surroundings(),
    ]
    # A delta that large was refused by the plan already, unless it was forced.
    void = [item for item in findings if item.severity == "void" and item.code != "delta-too-large"]
    if void:
        raise PrivacyError(
            "void-guarantee",
            " ".join(item.what for item in void),
            why="The guarantee would not hold, whatever the figures say.",
            fix=" ".join(item.cure for item in void),
        )
    return tuple(findings)
