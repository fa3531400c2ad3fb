"""The folders of training, validation and test images, whatever people call them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sfumato.errors import DataError

SPLITS = ("train", "val", "test")
# How people call them; upper and lower case are the same.
SPLIT_NAMES = dict.fromkeys(("train", "training"), "train")
SPLIT_NAMES |= dict.fromkeys(("val", "valid", "validation"), "val")
SPLIT_NAMES |= dict.fromkeys(("test", "testing"), "test")


def split_folders(folder: Path) -> dict[str, Path]:
    """The folders of the splits, whichever of ``SPLIT_NAMES`` they have; none if there are only classes."""
    found: dict[str, Path] = {}
    for name in _folders_in(folder):
        split = SPLIT_NAMES.get(name.lower())
        if split in found:
            raise DataError(
                "split-named-twice",
                f"{folder}: {found[split].name} and {name} both are the {split} images.",
                why="Which of the two is meant decides what is trained on.",
                fix="Join them, or move one of them elsewhere.",
            )
        if split is not None:
            found[split] = folder / name
    if found and "train" not in found:
        raise DataError(
            "no-train-split",
            f"{folder}: has {' and '.join(place.name for place in found.values())} but no train.",
            fix="Put the training images into train/<class>/, also if a class has such a name.",
        )
    return {split: found[split] for split in SPLITS if split in found}


def refuse_splits_inside(folder: Path, classes: Sequence[str]) -> None:
    """Refuse ``classes`` of a ``folder`` without splits that hold some: they are none, or turned round."""
    for name in classes:
        inside = [child for child in _folders_in(folder / name) if child.lower() in SPLIT_NAMES]
        splits = {SPLIT_NAMES[child.lower()] for child in inside}
        if "train" in splits and len(splits) > 1:
            raise DataError(
                "split-inside-class",
                f"{folder / name}: is taken for a class, and holds {' and '.join(inside)}.",
                why="Its test images would be trained on, and the budget spent on classes that are none.",
                fix=f"If it is the data, give this folder. If it is a class, turn the folders round: "
                f"{inside[-1]}/{name}.",
            )


def _folders_in(folder: Path) -> list[str]:
    try:
        return sorted(child.name for child in os.scandir(folder) if child.is_dir())
    except OSError as error:
        unreadable(error)


def unreadable(error: OSError) -> NoReturn:
    raise DataError(
        "unreadable-folder",
        f"{error.filename}: {error.strerror}.",
        why="Nothing is skipped silently.",
        fix="Give yourself the permission to read it, or remove the link.",
    ) from error
