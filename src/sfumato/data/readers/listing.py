"""Which files are the images, of which class, split and patient: before anything is decoded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from sfumato.data.readers.decode import EXTENSIONS
from sfumato.data.readers.patients import find_patients
from sfumato.errors import ConfigError, DataError

SPLITS = ("train", "val", "test")
# What operating systems leave behind in folders of images; everything else that is no image is refused.
_LEFT_BEHIND = frozenset(("thumbs.db", "desktop.ini", "__macosx"))


@dataclass(frozen=True)
class Entry:
    """One image file."""

    path: Path
    relative: str  # below the folder, with forward slashes
    split: str
    label: int  # its class; -1 where an image has findings instead
    patient: str | None = None
    where: str = ""  # for complaints: the file, or the manifest's line
    findings: tuple[int, ...] = ()


@dataclass(frozen=True)
class Listing:
    """All image files of a data set and its class names."""

    entries: tuple[Entry, ...]
    classes: tuple[str, ...]
    declared: bool = False  # the classes were listed beforehand, and not found among the images
    multi_label: bool = False  # the classes are findings, any number of them in an image

    def check(self, name: str) -> Listing:
        """Refuse a class without training images, and a class that only val or test have.

        Not so for declared classes: whether one of them has images must decide nothing.
        """
        if not self.declared and not self.multi_label:
            self._check_trained(name)
        if len(self.classes) < 2 and not self.multi_label:
            raise DataError(
                "one-class",
                f"{name}: there is only the class {self.classes[0]!r}.",
                why="Classification needs at least two classes.",
                fix="Put each class into a folder of its own: train/<class>/*.png.",
            )
        if not any(entry.split == "train" for entry in self.entries):
            raise DataError("no-images", f"{name}: there are no training images.", fix="Add some to train/.")
        return self

    def _check_trained(self, name: str) -> None:
        trained = {entry.label for entry in self.entries if entry.split == "train"}
        for entry in self.entries:
            if entry.label not in trained:
                raise DataError(
                    "class-not-in-train",
                    f"{entry.where}: class {self.classes[entry.label]!r} has no training images.",
                    why="A model cannot learn a class that it never sees.",
                    fix="Add training images of the class, or remove it from val and test.",
                )
        for number, class_name in enumerate(self.classes):
            if number not in trained:
                raise empty_class(name, class_name)

    def with_patients(self, pattern: str) -> Listing:
        """Patients found in each file's path by a regular expression.

        The patient is the group named ``patient`` if there is one, else all groups joined, else
        the whole match. It is searched in the path below the folder, e.g. ``train/NORMAL/IM-0115-0001.jpeg``.
        """
        if any(entry.patient is not None for entry in self.entries):
            raise ConfigError(
                "patients-twice",
                f"the manifest has a patient column, and --patient-from {pattern!r} is given too.",
                fix="Use one of the two.",
            )
        patients = find_patients(pattern, [entry.relative for entry in self.entries])
        for entry, patient in zip(self.entries, patients, strict=True):
            if not patient:
                raise DataError(
                    "missing-patient",
                    f"{entry.where}: --patient-from {pattern!r} finds no patient in {entry.relative!r}.",
                    why="A patient-level guarantee needs every image's patient.",
                    fix="Widen the expression, e.g. with | for a second way of naming files.",
                )
        pairs = zip(self.entries, patients, strict=True)
        return replace(self, entries=tuple(replace(entry, patient=patient) for entry, patient in pairs))


def list_folder(folder: Path, classes: Sequence[str] | None = None) -> Listing:
    """``train/<class>/**``, optional ``val/`` and ``test/``; or class folders directly, all for training."""
    splits = {split: folder / split for split in SPLITS if (folder / split).is_dir()}
    if splits and "train" not in splits:
        raise DataError(
            "no-train-split",
            f"{folder}: has {' and '.join(splits)} but no train.",
            fix="Put the training images into train/<class>/.",
        )
    roots = splits or {"train": folder}
    by_split: dict[str, dict[str, list[Path]]] = {split: _by_class(root) for split, root in roots.items()}
    names = {name for classes in by_split.values() for name in classes}
    if not names:
        raise DataError(
            "no-images",
            f"{folder}: there are no class folders with images.",
            why="DATA is a folder with train/<class>/*.png, or one with manifest.csv.",
            fix="Put each class into a folder of its own, or write a manifest.csv.",
        )
    declared = declared_classes(folder, classes)
    classes = declared or sorted_classes(by_split["train"])
    if not classes:
        raise empty_class(str(folder), "train")
    entries = []
    for split, by_class in by_split.items():
        for name, paths in by_class.items():
            if name not in classes:
                raise _not_a_class(roots[split] / name, classes, declared=declared is not None)
            if not paths and split == "train" and declared is None:
                raise empty_class(str(folder), name)
            label = classes.index(name)
            for path in paths:
                relative = path.relative_to(folder).as_posix()
                entries.append(Entry(path, relative, split, label, None, str(path)))
    return Listing(tuple(entries), classes, declared is not None)


def _not_a_class(folder: Path, classes: Sequence[str], *, declared: bool) -> DataError:
    if declared:
        return DataError(
            "label-out-of-range",
            f"{folder}: class {folder.name!r} is not one of the declared classes, {', '.join(classes)}.",
            why="The list was declared beforehand; images cannot add to it.",
            fix="Rename or remove the folder, or declare the class in data.classes or classes.txt.",
        )
    return DataError(
        "class-not-in-train",
        f"{folder}: class {folder.name!r} is not one of {', '.join(classes)}.",
        why="The classes are the folders in train/.",
        fix="Rename the folder, or add training images of the class.",
    )


def _by_class(root: Path) -> dict[str, list[Path]]:
    classes = {}
    try:
        children = sorted(root.iterdir())
    except OSError as error:
        _unreadable(error)
    for child in children:
        if _ignored(child.name):
            continue
        if child.is_dir():
            classes[child.name] = list(image_files(child))
        elif child.suffix.lower() in EXTENSIONS:
            raise DataError(
                "image-without-class",
                f"{child}: lies beside the class folders.",
                why="An image's class is the folder it lies in.",
                fix="Move it into its class folder, or write a manifest.csv.",
            )
    return classes


def image_files(folder: Path) -> Iterable[Path]:
    """All image files below ``folder``, sorted; a file that is no image is refused by name."""
    visited = set()
    for root, directories, files in os.walk(folder, followlinks=True, onerror=_unreadable):
        here = os.path.realpath(root)
        if here in visited:
            _unreadable(OSError(0, "a link leads back to a folder that was already read", root))
        visited.add(here)
        directories[:] = sorted(name for name in directories if not _ignored(name))
        for name in sorted(files):
            if _ignored(name):
                continue
            path = Path(root, name)
            if path.suffix.lower() not in EXTENSIONS:
                raise DataError(
                    "not-an-image",
                    f"{path}: lies among the images but is none.",
                    why="Nothing is skipped silently; it could be an image with an unusual name.",
                    fix=f"Remove it, or give it one of the endings {' '.join(EXTENSIONS)}.",
                )
            yield path


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(
        "unreadable-folder",
        f"{error.filename}: {error.strerror}.",
        why="Nothing is skipped silently.",
        fix="Give yourself the permission to read it, or remove the link.",
    ) from error


def declared_classes(folder: Path, given: Sequence[str] | None) -> tuple[str, ...] | None:
    """The public class names in order: ``given``, or the lines of ``classes.txt``; None if there are none."""
    file = folder / "classes.txt"
    written = None
    if file.is_file():
        written = _distinct(read_names(file), file)
    if given is None:
        return written
    named = _distinct(tuple(given), "data.classes")
    if written is not None and written != named:
        raise _bad_classes(file, "it lists other classes than data.classes, or in another order")
    return named


def read_names(file: Path) -> tuple[str, ...]:
    """The names in a file, one a line."""
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _bad_classes(file, "it cannot be read as UTF-8") from error
    return tuple(line.strip() for line in lines if line.strip())


def _distinct(names: tuple[str, ...], where: object) -> tuple[str, ...]:
    if len(set(names)) != len(names) or not all(names) or not names:
        raise _bad_classes(where, "it is empty or names a class twice")
    return names


def _bad_classes(where: object, what: str) -> DataError:
    return DataError(
        "bad-classes", f"{where}: {what}.", fix="Name each class once; in classes.txt, one a line."
    )


def sorted_classes(names: Iterable[str]) -> tuple[str, ...]:
    """Class names in order: by number if all are whole numbers, else alphabetically."""
    unique = set(names)
    for name in unique:
        if any("\ud800" <= letter <= "\udfff" for letter in name):  # how Python keeps bytes that are no text
            raise _bad_classes(repr(name), "the folder's name is not UTF-8 and cannot be published")
    if all(whole_number(name) is not None for name in unique):
        return tuple(sorted(unique, key=lambda name: (whole_number(name), name)))
    return tuple(sorted(unique))


def whole_number(text: str) -> int | None:
    """The number that ``text`` writes in at most 18 plain digits; None for all else, such as ``²``."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def empty_class(where: str, name: str) -> DataError:
    return DataError(
        "empty-class",
        f"{where}: class {name!r} has no training images.",
        why="The model would have an output that is never trained.",
        fix="Add images of the class, or remove its folder.",
    )


def _ignored(name: str) -> bool:
    return name.startswith(".") or name.lower() in _LEFT_BEHIND
