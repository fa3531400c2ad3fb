"""The first of two stages: ordinary training on public images; the private stage starts from its weights.

De et al. 2022, appendix B.4, pre-train on CIFAR-100 and fine-tune privately on CIFAR-10.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sfumato.data import DataSplits, ImageSet, load_data, shared_images
from sfumato.errors import ConfigError
from sfumato.recipes.recipe import (
    AugmentationSettings,
    DataSettings,
    PretrainingSettings,
    PrivacySettings,
    Recipe,
    ScheduleSettings,
    TrainingSettings,
    differences,
)
from sfumato.release.run_folder import RunFolder
from sfumato.run.weights import Checkpoint, saw_these_images


def stage_recipe(recipe: Recipe, settings: PretrainingSettings, private: ImageSet) -> Recipe:
    """The first stage as a separate recipe: the same network, public images in the private ones' form."""
    size, channels = private.images.shape[-1], private.images.shape[1]
    return Recipe(
        data=DataSettings(name=settings.data, image_size=size, channels=channels, fit=recipe.data.fit),
        model=replace(recipe.model, weights=None, weights_are_public=False, trained="all"),
        privacy=PrivacySettings(enabled=False),
        training=TrainingSettings(
            batch_size=settings.batch_size,
            num_epochs=settings.num_epochs,
            optimizer=settings.optimizer,
            learning_rate=settings.learning_rate,
            optimizer_options=settings.optimizer_options,
            seed=settings.seed,
        ),
        schedule=ScheduleSettings(name=settings.schedule),
        augmentation=AugmentationSettings(views=settings.views, padding=settings.padding, flip=settings.flip),
        performance=recipe.performance,
    )


def check_public_data(settings: PretrainingSettings, private: DataSplits) -> ImageSet:
    """The images of the first stage; refuses those that hold a private training image.

    Leaving out what occurs in both sets would not do: which images were left out tells who is in the
    private set. Compared are decoded pixels; a resized or recompressed copy is not found.
    """
    if settings.data is None:
        raise ConfigError(
            "no-pretraining-data",
            "the recipe has a [pretraining] section that names no data",
            fix="Set pretraining.data to generated, cifar100, or a folder of PUBLIC images.",
        )
    size, channels = private.train.images.shape[-1], private.train.images.shape[1]
    public = load_data(settings.data, image_size=size, channels=channels).train
    shared = len(shared_images(private.train, public))
    if shared:
        raise saw_these_images(
            f"{shared:,} of the {len(private.train):,} private images also occur in {public.name}, the data "
            "of the pre-training"
        )
    return public


def check_same_stage(checkpoint: Checkpoint, stage: Recipe, public: ImageSet) -> None:
    """Refuse weights that are given as the recipe's first stage and are not."""
    folder = RunFolder(checkpoint.path.parent)
    wrong = ""
    if not folder.recipe.is_file():
        wrong = "its recipe.toml is not there"
    else:
        changed = differences(folder.stored_recipe(), stage)
        wrong = ", ".join(f"{key} was {old!r}, now {new!r}" for key, (old, new) in changed.items())
    if not wrong and checkpoint.fingerprint != public.fingerprint:
        wrong = f"{public.name} now holds other images"
    if wrong:
        raise ConfigError(
            "other-pretraining",
            f"{checkpoint.path} is not the [pretraining] of this recipe: {wrong}",
            why="The statement would name a pre-training that did not take place.",
            fix="Leave out --weights and pre-train anew; or use a recipe without [pretraining].",
        )


def finished_stage(folder: RunFolder) -> Path | None:
    """The release of the first stage in a run's folder, once it is there."""
    release = folder.pretraining.release
    return release if (release / "config.json").is_file() else None
