"""The images that a released model is looked at with, and whether what they show is sensitive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sfumato.data import DataSplits, ImageSet, carve_validation, load_data
from sfumato.data.known import KNOWN_SETS
from sfumato.errors import ConfigError, DataError
from sfumato.recipes.recipe import DataSettings
from sfumato.release.release import ReleasedModel
from sfumato.release.run_folder import RunFolder

_ORDER = ("test", "val", "train")


def is_sensitive(run: Path, split: str, *, own_data: bool) -> bool:
    """Whether the scored images count as private: all but test images, and val images declared public."""
    if split == "test":
        return False
    if split == "val" and own_data and (run / "recipe.toml").is_file():
        return not RunFolder(run).stored_recipe().data.val_is_public
    return True


def data_of(run: Path, released: ReleasedModel, data: str | None) -> str:
    """The data to score on: as given, else the run's own, else the known set that the release names."""
    if data is not None:
        return data
    if (run / "recipe.toml").is_file():
        stored = RunFolder(run).stored_recipe().data.name
        if stored is not None:
            return stored
    if released.config["data"] in KNOWN_SETS:
        return released.config["data"]
    raise ConfigError(
        "no-data", "the release does not say where its test images are", fix="Give DATA: a folder with test/."
    )


def with_one_class(images: ImageSet) -> ImageSet:
    """The same images; refuses those with findings where only one class per image makes sense."""
    if images.multi_label:
        raise ConfigError(
            "findings-not-studied",
            f"each image of {images.name} has any number of findings.",
            why="This study compares the loss or the right answers of images with one class.",
            fix="Use sfumato evaluate, which scores each finding.",
        )
    return images


def settings_of(run: Path) -> DataSettings | None:
    """[data] of the run's recipe; None for a release alone."""
    return RunFolder(run).stored_recipe().data if (run / "recipe.toml").is_file() else None


def images_of(
    released: ReleasedModel, data: str, split: str | None, *, settings: DataSettings | None = None
) -> tuple[str, ImageSet]:
    """The images of a split, at the model's size; without one the first there is of test, val and train.

    ``settings`` are those of the run, if ``data`` is its own: they say whose the images are, and which of
    the training images were held out. Those are the split val, and are not among train.
    """
    config = released.config
    splits = load_data(
        data,
        image_size=config["image_size"],
        channels=config["channels"],
        fit=config["fit"],
        classes=None if released.task == "multi-label" else released.classes,
        findings=released.classes if released.task == "multi-label" else None,
        rendering=released.rendering,
        patient_from=None if settings is None else settings.patient_from,
    )
    if settings is not None and settings.holdout:
        splits = carve_validation(replace(splits, val=None), fraction=settings.holdout)
        order = ("val", "test", "train") if split is None else (split,)  # what the run itself was scored on
    else:
        order = _ORDER if split is None else (split,)
    return _first(splits, order, data)


def _first(splits: DataSplits, order: tuple[str, ...], data: str) -> tuple[str, ImageSet]:
    by_name = {"test": splits.test, "val": splits.val, "train": splits.train}
    for name in order:
        images = by_name[name]
        if images is not None:
            return name, images
    there = [name for name, images in by_name.items() if images is not None]
    raise DataError(
        "no-split", f"{data} has no {order[0]} images", fix=f"Name a split that it has: {', '.join(there)}."
    )
