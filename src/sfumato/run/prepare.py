"""Everything that happens before any budget is spent: data, model, plan and the checks of all three.

Nothing here writes into the run's folder, so that a refusal leaves none; features are kept in their cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sfumato.data import DataSplits, ImageSet, carve_validation, load_data
from sfumato.data.augmentation import check_normalisation, check_views
from sfumato.doctor import (
    Finding,
    check_forward,
    check_model,
    examine_data,
    examine_plan,
    examine_surroundings,
)
from sfumato.errors import ConfigError, PrivacyError
from sfumato.features.cache import OnProgress
from sfumato.gradients import Clipping, FlatClipping
from sfumato.gradients.memory import bytes_per_row, free_memory, rows_in_memory
from sfumato.models import create_model
from sfumato.privacy.plan import Plan
from sfumato.randomness import RandomSource, SecureSource, SeededSource
from sfumato.recipes.recipe import DataSettings, ModelSettings, Recipe
from sfumato.run.features import feature_views, fit_extractor, with_feature_settings
from sfumato.run.planning import build_plan, default_delta, plain_sampler
from sfumato.run.provenance import Beginning, find_beginning, normalisation, with_input_size
from sfumato.run.weights import Checkpoint, take_over
from sfumato.sampling import FullBatch, PoissonSampling
from sfumato.training.components import AS_THE_RECIPE_SAYS, Components
from sfumato.training.finetuning import choose_trained
from sfumato.training.fixed_rows import FeatureViews, in_closed_form
from sfumato.training.gradient_sums import Loss
from sfumato.training.inputs import Units, Views
from sfumato.training.last_layer import LastLayerViews, last_layer_views

WITHOUT_FLOAT64 = ("mps",)  # devices, by torch's names


class Watcher(Protocol):
    """Whoever waits while something long is computed before or between steps."""

    def noted(self, text: str) -> None:
        """Something worth a sentence happened."""

    def computed(self, what: str, done: int, total: int) -> None:
        """So many of ``total`` images are done, of what ``what`` names."""


@dataclass(frozen=True, kw_only=True)
class ScoredSet:
    """Images on which accuracy is measured; sensitive ones must not leave the state folder."""

    split: Literal["test", "val"]
    images: ImageSet
    sensitive: bool


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that passed every check and can begin."""

    recipe: Recipe
    splits: DataSplits
    units: Units
    model: nn.Module
    plan: Plan | None  # None: training without privacy
    sampler: PoissonSampling | FullBatch
    batch_size: float  # expected units per step
    views: Views | FeatureViews | LastLayerViews
    source: RandomSource
    device: torch.device
    max_rows: int
    components: Components = AS_THE_RECIPE_SAYS
    findings: tuple[Finding, ...] = ()  # what the doctor found worth knowing
    beginning: Beginning | None = None  # where the first weights come from; None: drawn at random

    @property
    def num_steps(self) -> int:
        return self.sampler.num_steps

    @property
    def loss(self) -> Loss:
        return self.components.loss_of(self.recipe)

    @property
    def clipping(self) -> Clipping:
        return self.components.clipping_of(self.recipe)

    @property
    def in_closed_form(self) -> bool:
        """Whether the clipped sums of this run have a closed form."""
        usual = self.loss is cross_entropy and self.clipping == FlatClipping()
        return usual and in_closed_form(self.model, self.views, self.units)

    @property
    def steps_per_epoch(self) -> float:
        return len(self.units) / self.batch_size

    @property
    def releasable(self) -> bool:
        return self.plan is not None and self.source.releasable

    @property
    def monitored(self) -> ScoredSet | None:
        """What is scored during training: images that may steer it, else the test images."""
        val = self.splits.val
        if val is not None and (self.recipe.data.val_is_public or self.recipe.data.holdout):
            return ScoredSet(split="val", images=val, sensitive=not self.recipe.data.val_is_public)
        return self.final

    @property
    def final(self) -> ScoredSet | None:
        """What the finished model is scored on."""
        public, held = self.recipe.data.val_is_public, self.recipe.data.holdout > 0
        if self.splits.test is not None and not held:
            return ScoredSet(split="test", images=self.splits.test, sensitive=False)
        if self.splits.val is not None:
            return ScoredSet(split="val", images=self.splits.val, sensitive=not public)
        return None


def prepare(
    recipe: Recipe,
    *,
    data: DataSplits | None = None,
    model: nn.Module | None = None,
    force: bool = False,
    pretrained: Path | None = None,
    components: Components = AS_THE_RECIPE_SAYS,
    watcher: Watcher | None = None,
) -> Prepared:
    """Load, build, plan and check; raises before any budget is spent.

    ``data`` and ``model`` replace what the recipe names, for callers with their own. ``force`` accepts a
    delta above 1 / (number of units), which the statement then says. ``pretrained`` is the finished
    first stage of a recipe with [pretraining]. ``components`` are loss, clipping, sampling and optimizer of
    the caller's own. ``watcher`` is told how far the computation of features is.
    """
    splits = data if data is not None else load_splits(recipe.data)
    check_constants(recipe, splits.train)
    check_steering(recipe, splits)
    units = group_units(recipe, splits.train)
    recipe, checkpoint, beginning = settle_beginning(
        recipe, splits, num_units=len(units), pretrained=pretrained, own_model=model is not None
    )
    source: RandomSource = (
        SecureSource() if recipe.training.seed is None else SeededSource(recipe.training.seed)
    )
    plan = build_plan(
        recipe, num_units=len(units), force=force, beginning=beginning, sampling=components.sampling
    )
    device = choose_device(recipe.performance.device)
    network = first_network(
        recipe, splits.train, source, checkpoint=checkpoint, device=device, model=model, watcher=watcher
    )
    components.optimizer_of(recipe, network)  # refuses a wrong name or option now; the run builds its own
    check_forward(network, tuple(splits.train.images.shape[1:]), num_classes=len(splits.train.classes))
    max_rows = recipe.performance.microbatch_size or fitting_rows(network, splits.train, device)
    findings = () if plan is None else examine(recipe, splits, network, plan, max_rows=max_rows)
    mean, std = normalisation(network, splits.train, beginning)
    counter = features_counter(watcher, "training")
    views = feature_views(network, recipe, splits.train, on_progress=counter) or Views(
        mean=recipe.data.mean or mean,
        std=recipe.data.std or std,
        count=recipe.augmentation.views,
        padding=recipe.augmentation.padding,
        flip=recipe.augmentation.flip,
    )
    weights_are_final = recipe.pretraining is None or checkpoint is not None
    if recipe.model.trained == "last" and plan is not None and weights_are_final:
        views = last_layer_views(network, splits.train, views, on_progress=counter)
    sampler = plan.sampler() if plan is not None else plain_sampler(recipe, len(units))
    return Prepared(
        recipe=recipe,
        splits=splits,
        units=units,
        model=network,
        plan=plan,
        sampler=sampler,
        batch_size=sampler.sampling_rate * len(units),
        views=views,
        source=source,
        device=device,
        max_rows=max_rows,
        components=components,
        findings=findings,
        beginning=beginning,
    )


def features_counter(watcher: Watcher | None, split: str) -> OnProgress | None:
    """Tells ``watcher`` how many of the split's images have their features."""
    return None if watcher is None else partial(watcher.computed, f"features of {split} images")


def load_splits(settings: DataSettings) -> DataSplits:
    """The data that [data] describes, with its holdout carved."""
    if settings.name is None:
        raise ConfigError("no-data", "no data set is named", fix="Give DATA, or data.name in the recipe.")
    splits = load_data(
        settings.name,
        image_size=settings.image_size,
        channels=settings.channels,
        patient_from=settings.patient_from,
        fit=settings.fit,
        classes=settings.classes,
    )
    if settings.holdout:
        splits = carve_validation(
            replace(splits, val=None), fraction=settings.holdout, public=settings.val_is_public
        )
    return splits


def check_constants(recipe: Recipe, train: ImageSet) -> None:
    """Refuse normalisation and views that do not fit the images, before a step would."""
    channels, *size = train.images.shape[1:]
    check_normalisation(recipe.data.mean, recipe.data.std, channels=channels)
    views = recipe.augmentation
    check_views(views=views.views, padding=views.padding, size=tuple(size))


def check_steering(recipe: Recipe, splits: DataSplits) -> None:
    """Refuse decisions during training that would read private images without being accounted."""
    wishes = []
    if recipe.schedule.name == "plateau":
        wishes.append('schedule.name = "plateau"')
    if recipe.training.early_stopping:
        wishes.append(f"training.early_stopping = {recipe.training.early_stopping}")
    if not wishes or not recipe.privacy.enabled:
        return
    if splits.val is None or not recipe.data.val_is_public:
        raise PrivacyError(
            "private-validation",
            f"{' and '.join(wishes)} would decide by scores on private images",
            why="Each such decision tells something about these images that epsilon does not count.",
            fix="Use a fixed schedule; or, if the val/ images are public, set data.val_is_public = true.",
        )


def group_units(recipe: Recipe, train: ImageSet) -> Units:
    """The training images as units of the guarantee."""
    if recipe.privacy.unit == "patient":
        return Units.patients(train, max_images=recipe.privacy.max_images_per_patient)
    return Units.images(train)


def settle_beginning(
    recipe: Recipe, splits: DataSplits, *, num_units: int, pretrained: Path | None, own_model: bool
) -> tuple[Recipe, Checkpoint | None, Beginning | None]:
    """The weights to begin with, judged, and the recipe with the settings that follow from them."""
    checkpoint, beginning = find_beginning(recipe, splits, pretrained=pretrained, own_model=own_model)
    delta = recipe.privacy.delta if recipe.privacy.delta is not None else default_delta(num_units)
    recipe = with_feature_settings(recipe, splits.train, num_units=num_units, delta=delta)
    return recipe if own_model else with_input_size(recipe, splits.train), checkpoint, beginning


def first_network(
    recipe: Recipe,
    train: ImageSet,
    source: RandomSource,
    *,
    checkpoint: Checkpoint | None,
    device: torch.device,
    model: nn.Module | None = None,
    watcher: Watcher | None = None,
) -> nn.Module:
    """The network as training begins with it: options, first weights, trained parts, fixed features."""
    network = model if model is not None else initial_model(recipe.model, train, source)
    if checkpoint is not None:
        new_head = take_over(network, checkpoint, classes=train.classes)
        if new_head and watcher is not None:
            watcher.noted(f"The last layer is new: {checkpoint.path} was trained for other classes.")
    choose_trained(network, recipe.model.trained)
    network = network.to(device)
    fit_extractor(network, recipe, on_note=None if watcher is None else watcher.noted)
    return network


def initial_model(settings: ModelSettings, train: ImageSet, source: RandomSource) -> nn.Module:
    """A model of the zoo with fresh weights drawn from ``source``; the global generator is left as it was."""
    for name in ("num_classes", "in_channels"):
        if name in settings.options:
            raise ConfigError(
                "unknown-model-option",
                f"model.options.{name} cannot be set: the images have it",
                fix="Leave it out; data.channels changes the images' channels.",
            )
    seed = source.torch_generator(purpose="init", step=0).initial_seed()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return create_model(
            settings.name,
            num_classes=len(train.classes),
            in_channels=train.images.shape[1],
            **settings.options,
        )


def examine_network(model: nn.Module, train: ImageSet, *, max_rows: int) -> list[Finding]:
    """What the doctor finds in the model, probed with noise: no private image is needed for that."""
    device = next(model.parameters()).device
    noise = torch.randn(4, *train.images.shape[1:], device=device)
    return check_model(model, noise, num_rows=max_rows)


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


def choose_device(name: str) -> torch.device:
    """``auto`` is the accelerator if there is one with float64, in which norms are added."""
    if name == "auto":
        found = torch.accelerator.current_accelerator()
        return torch.device("cpu") if found is None or found.type in WITHOUT_FLOAT64 else found
    try:
        device = torch.device(name)
        if device.type not in WITHOUT_FLOAT64:
            torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            "no-device", f"device {name!r} cannot be used: {reason}", fix="Use auto or cpu."
        ) from error
    if device.type in WITHOUT_FLOAT64:
        raise ConfigError(
            "device-without-float64",
            f"device {name!r} has no float64",
            why="Norms are added in float64, so that the bound holds in spite of rounding.",
            fix="Use cpu, or auto, which takes the CPU here.",
        )
    return device


def fitting_rows(model: nn.Module, train: ImageSet, device: torch.device) -> int:
    """Rows of a microbatch, from the memory that is free now."""
    example = torch.zeros(1, *train.images.shape[1:], device=device)
    row = bytes_per_row(model, example)
    return rows_in_memory(row, free_memory(device), on_accelerator=device.type != "cpu")
