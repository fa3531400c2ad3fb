"""Recipe and data → every value of a run, once, with nothing left open.

``train``, ``--dry-run``, ``doctor`` and the report read the same ``Resolved``. It holds public values only:
what follows from the recipe, from the number of units, and from what is publicly known of the data.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from sfumato.data import DataSplits, ImageSet, carve_validation, load_data
from sfumato.data.augmentation import check_mixing, check_normalisation, check_views
from sfumato.data.distortion import Distortion, check_distortion
from sfumato.data.images import Task
from sfumato.data.readers.decode import OnProgress
from sfumato.data.readers.listing import OnListing
from sfumato.data.readers.rendering import Rendering
from sfumato.errors import ConfigError, PrivacyError, RunError
from sfumato.files import read_json, write_json
from sfumato.privacy.plan import Plan
from sfumato.recipes.recipe import DISTORTIONS, AugmentationSettings, DataSettings, Recipe
from sfumato.release.documents import ResolvedDocument
from sfumato.release.run_folder import RunFolder
from sfumato.run.canaries import check_canaries
from sfumato.run.decision import check_decision
from sfumato.run.features import with_feature_settings
from sfumato.run.networks import zoo_network
from sfumato.run.planning import build_plan, check_holdout, plain_sampler, with_delta
from sfumato.run.provenance import Constants, Provenance, find_provenance, normalisation, with_input_size
from sfumato.run.task import with_task_settings
from sfumato.run.weights import Checkpoint
from sfumato.training.components import AS_THE_RECIPE_SAYS, Components
from sfumato.training.fixed_rows import FeatureViews
from sfumato.training.inputs import Units, Views
from sfumato.training.optimizers import ADAM_BC, Schedule, no_noise_to_remove

_MAY_CHANGE = ("microbatch_size",)  # performance settings: see recipes.differences


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A run, completely. ``recipe`` has all that was left open in it filled in."""

    recipe: Recipe
    plan: Plan | None  # None: training without privacy
    provenance: Provenance | None  # where the first weights come from; None: drawn at random
    custom_model: bool  # the network was passed by the caller, not built from the zoo
    data: str
    task: Task
    classes: tuple[str, ...]
    image_size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_units: int
    sampling_rate: float
    num_steps: int

    @property
    def batch_size(self) -> float:
        """Expected units per step."""
        return self.sampling_rate * self.num_units

    @property
    def learning_rate(self) -> float:
        """The first one."""
        rate = self.recipe.training.learning_rate
        assert rate is not None  # filled in by ``resolve``
        return rate

    @property
    def steps_per_epoch(self) -> float:
        return self.num_units / self.batch_size

    @property
    def evaluate_every(self) -> int:
        """Steps between two evaluations."""
        if self.recipe.training.evaluate_every:
            return self.recipe.training.evaluate_every
        if self.recipe.schedule.name == "plateau":
            return max(1, round(self.steps_per_epoch))
        return max(1, math.ceil(self.num_steps / 10))

    def schedule(self) -> Schedule:
        """The learning rate over time, before the first step."""
        return Schedule(
            self.recipe.schedule,
            learning_rate=self.learning_rate,
            num_steps=self.num_steps,
            steps_per_epoch=self.steps_per_epoch,
            evaluate_every=self.evaluate_every,
        )

    def image_views(self) -> Views:
        """The images as a step sees them."""
        settings = self.recipe.augmentation
        return Views(
            mean=self.mean,
            std=self.std,
            count=settings.views,
            padding=settings.padding,
            flip=settings.flip,
            mixed=settings.mixed_views,
            alpha=settings.mix_alpha,
            distortion=distortion_of(settings),
        )

    def document(self) -> ResolvedDocument:
        """resolved.json, as JSON reads it back."""
        recipe, plan = self.recipe, self.plan
        document = {
            "data": self.data,
            "task": self.task,
            "classes": self.classes,
            "image_size": self.image_size,
            "channels": self.channels,
            "mean": self.mean,
            "std": self.std,
            "model": {
                "name": None if self.custom_model else recipe.model.name,
                "options": dict(recipe.model.options),
            },
            "features": None if recipe.features is None else asdict(recipe.features),
            "unit": recipe.privacy.unit,
            "num_units": self.num_units,
            "delta": None if plan is None else plan.delta,
            "noise_multiplier": None if plan is None else plan.noise_multiplier,
            "batch_size": self.batch_size,
            "sampling_rate": self.sampling_rate,
            "num_steps": self.num_steps,
            "loss": recipe.training.loss,
            "learning_rate": self.learning_rate,
            "evaluate_every": self.evaluate_every,
            "microbatch_size": recipe.performance.microbatch_size,
        }
        return json.loads(json.dumps(document))


def resolve(
    recipe: Recipe,
    splits: DataSplits,
    *,
    model: nn.Module | None = None,
    force: bool = False,
    pretrained: Path | None = None,
    components: Components = AS_THE_RECIPE_SAYS,
) -> tuple[Resolved, Checkpoint | None]:
    """All values of the run, and the weights that it starts from, if there are any yet.

    The arguments are those of ``prepare``. Nothing is built; private pixels are read only to find images
    that are public too.
    """
    train = splits.train
    check_constants(recipe, train)
    check_steering(recipe, splits)
    check_filter(recipe)
    check_holdout(recipe, recipe.data.holdout)
    check_canaries(recipe)
    recipe = with_task_settings(recipe, train, own_loss=components.loss)
    check_decision(recipe, splits)
    num_units = len(group_units(recipe, train))
    recipe = with_delta(recipe, num_units)
    recipe = with_feature_settings(recipe, train, num_units=num_units)
    recipe = recipe if model is not None else with_input_size(recipe, train)
    checkpoint, provenance = find_provenance(
        recipe, splits, pretrained=pretrained, custom_model=model is not None
    )
    plan = build_plan(
        recipe,
        num_units=num_units,
        force=force,
        provenance=provenance,
        sampling=components.sampling,
        searched=components.searched,
    )
    sampler = plan.sampler() if plan is not None else plain_sampler(recipe, num_units)
    mean, std = _constants(recipe, train, provenance, model)
    return Resolved(
        recipe=recipe,
        plan=plan,
        provenance=provenance,
        custom_model=model is not None,
        data=train.name,
        task=train.task,
        classes=train.classes,
        image_size=train.images.shape[-1],
        channels=train.images.shape[1],
        mean=mean,
        std=std,
        num_units=num_units,
        sampling_rate=sampler.sampling_rate,
        num_steps=sampler.num_steps,
    ), checkpoint


def record_resolved(resolved: Resolved, folder: RunFolder, *, resuming: bool) -> None:
    """Write resolved.json; when ``resuming``, refuse values other than those in it."""
    now = resolved.document()
    if not resuming:
        write_json(folder.resolved, now)
        return
    try:
        stored = read_json(folder.resolved, ResolvedDocument)
    except (OSError, ValueError) as error:
        raise RunError(
            "damaged-run",
            f"{folder.resolved} cannot be read: {error}",
            why="It holds the values that the run began with; earlier versions did not write it.",
            fix="Restore the file, resume with the version that began the run, or start anew with another "
            "--out.",
        ) from error
    changed = [
        f"{key} was {stored.get(key)!r}, now {now.get(key)!r}"
        for key in dict.fromkeys((*now, *stored))
        if key not in _MAY_CHANGE and stored.get(key) != now.get(key)
    ]
    if changed:
        raise RunError(
            "changed-values",
            f"{folder.path}: {', '.join(changed)}",
            why="The same recipe and images give other values than when the run began.",
            fix="Resume with the version that began the run, or start a new one with another --out.",
        )


def load_splits(
    settings: DataSettings, *, on_progress: OnProgress | None = None, on_listing: OnListing | None = None
) -> DataSplits:
    """The data that [data] describes, with its holdout set apart."""
    if settings.name is None:
        raise ConfigError("no-data", "no data set is named", fix="Give DATA, or data.name in the recipe.")
    splits = load_data(
        settings.name,
        image_size=settings.image_size,
        channels=settings.channels,
        patient_from=settings.patient_from,
        fit=settings.fit,
        classes=settings.classes,
        findings=settings.findings,
        rendering=Rendering(
            window=settings.window, range=settings.range, bits=settings.bits, frame=settings.frame
        ),
        on_progress=on_progress,
        on_listing=on_listing,
    )
    if settings.holdout:
        splits = carve_validation(
            replace(splits, val=None), fraction=settings.holdout, public=settings.val_is_public
        )
    return splits


def check_constants(recipe: Recipe, train: ImageSet) -> None:
    """Refuse normalisation, views and schedules that cannot be applied to the images."""
    channels, height, width = train.images.shape[1:]
    check_normalisation(recipe.data.mean, recipe.data.std, channels=channels)
    views = recipe.augmentation
    check_views(views=views.views, padding=views.padding, size=(height, width))
    check_mixing(views=views.views, mixed=views.mixed_views, alpha=views.mix_alpha)
    check_distortion(distortion_of(views), views=views.views)
    if recipe.schedule.name == "step" and not recipe.schedule.every_epochs:
        raise ConfigError(
            "bad-value",
            "schedule.every_epochs is 0: the learning rate would change all the time",
            fix="Give a number above 0, or another schedule.",
        )


def distortion_of(settings: AugmentationSettings) -> Distortion:
    """What views are changed by beyond crops and flips."""
    return Distortion(**{name: getattr(settings, name) for name in DISTORTIONS})


def check_steering(recipe: Recipe, splits: DataSplits) -> None:
    """Refuse decisions during training that would read private images without being accounted."""
    decisions = []
    if recipe.schedule.name == "plateau":
        decisions.append('schedule.name = "plateau"')
    if recipe.training.early_stopping:
        decisions.append(f"training.early_stopping = {recipe.training.early_stopping}")
    if not decisions or not recipe.privacy.enabled:
        return
    if splits.val is None or not recipe.data.val_is_public:
        raise PrivacyError(
            "private-validation",
            f"{' and '.join(decisions)} would decide by scores on private images",
            why="Each such decision tells something about these images that epsilon does not count.",
            fix="Use a fixed schedule; or, if the val/ images are public, set data.val_is_public = true.",
        )


def check_filter(recipe: Recipe) -> None:
    """Refuse the Kalman filter where there is no noise, or where its noise would be mistaken."""
    gain = recipe.training.kalman_gain
    if gain is None:
        return
    if not recipe.privacy.enabled:
        raise no_noise_to_remove(f"training.kalman_gain = {gain:g} filters")
    if recipe.training.optimizer == ADAM_BC:
        raise ConfigError(
            "filtered-noise",
            f"training.kalman_gain = {gain:g} with training.optimizer = {ADAM_BC!r}",
            why="AdamBC subtracts the variance of the planned noise; behind the filter it is smaller.",
            fix="Use the filter with another optimizer, or AdamBC without it.",
        )


def group_units(recipe: Recipe, train: ImageSet) -> Units:
    """The training images as units of the guarantee."""
    if recipe.privacy.unit == "patient":
        return Units.patients(train, max_images=recipe.privacy.max_images_per_patient)
    return Units.images(train)


def _constants(
    recipe: Recipe, train: ImageSet, provenance: Provenance | None, model: nn.Module | None
) -> Constants:
    """Public mean and deviation: the recipe's, else those of the weights, else those of the data's name."""
    if recipe.features is not None:
        return FeatureViews.mean, FeatureViews.std  # the extractor has its own
    if model is None and provenance is not None:
        with torch.device("meta"):  # constants and shapes, no weights
            model = zoo_network(recipe.model, train)
    mean, std = normalisation(model, train, provenance)
    return recipe.data.mean or mean, recipe.data.std or std
