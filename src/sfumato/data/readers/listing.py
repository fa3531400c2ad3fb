"""Which files are the images, of which class, split and patient: before anything is decoded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sfumato.data.readers.decode import EXTENSIONS, OnProgress, is_dicom, is_image, read_patients
from sfumato.data.readers.header import refuse_volume
from sfumato.data.readers.patients import find_patients
from sfumato.data.readers.splits import refuse_splits_inside, split_folders, unreadable
from sfumato.errors import ConfigError, DataError

OnListing = Callable[[int], None]  # is told how many files are listed so far
_TOLD_EVERY = 256  # files
# What operating systems and scanners' exports leave behind; everything else that is no image is refused.
_LEFT_BEHIND = frozenset(("thumbs.db", "desktop.ini", "__macosx", "dicomdir"))


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
        return self._of(patients)

    def with_dicom_patients(self, *, needed: bool, on_progress: OnProgress | None = None) -> Listing:
        """Patients by the PatientID in each file's header, if all files are DICOM and have one.

        ``needed``: a file without one is refused by its name. Else the listing is returned as it is.
        """
        others = [entry for entry in self.entries if not is_dicom(entry.path)]
        if others and not needed:
            return self
        patients = [] if others else read_patients([entry.path for entry in self.entries], on_progress)
        lacking = others or [
            entry for entry, patient in zip(self.entries, patients, strict=True) if not patient
        ]
        if not lacking:
            return self._of(patients)
        if not needed:
            return self
        raise DataError(
            "missing-patient",
            f"{lacking[0].where}: has no PatientID, and --patient-from is dicom.",
            why="A patient-level guarantee needs every image's patient.",
            fix="Write a manifest.csv with a patient column, or give an expression for the file names.",
        )

    def _of(self, patients: Sequence[str | None]) -> Listing:
        pairs = zip(self.entries, patients, strict=True)
        return replace(self, entries=tuple(replace(entry, patient=patient) for entry, patient in pairs))


class Tally:
    """Counts the files of a listing, and tells ``on_listing`` of it now and then."""

    def __init__(self, on_listing: OnListing | None) -> None:
        self.count, self.on_listing = 0, on_listing

    def of(self, files: Iterable[str]) -> Iterator[str]:
        for file in files:
            self.count += 1
            if self.on_listing is not None and self.count % _TOLD_EVERY == 0:
                self.on_listing(self.count)
            yield file


def list_folder(
    folder: Path, classes: Sequence[str] | None = None, on_listing: OnListing | None = None
) -> Listing:
    """``train/<class>/**``, optional ``val/`` and ``test/``; or class folders directly, all for training."""
    found, tally = split_folders(folder), Tally(on_listing)
    roots = found or {"train": folder}
    by_split = {split: _by_class(root, tally) for split, root in roots.items()}
    names = {name for classes in by_split.values() for name in classes}
    if not found:
        refuse_splits_inside(folder, sorted(names))
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
    above = len(os.path.join(folder, ""))  # characters before the path below the folder
    for split, by_class in by_split.items():
        for name, paths in by_class.items():
            if name not in classes:
                raise _not_a_class(roots[split] / name, classes, declared=declared is not None)
            if not paths and split == "train" and declared is None:
                raise empty_class(str(folder), name)
            label = classes.index(name)
            for path in paths:
                relative = path[above:].replace(os.sep, "/")
                entries.append(Entry(Path(path), relative, split, label, None, path))
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


def _by_class(root: Path, tally: Tally) -> dict[str, list[str]]:
    classes: dict[str, list[str]] = {}
    try:
        children = sorted(os.scandir(root), key=lambda child: child.name)
    except OSError as error:
        unreadable(error)
    for child in children:
        if _ignored(child.name):
            continue
        if child.is_dir():
            classes[child.name] = list(tally.of(image_files(child.path)))
        elif is_image(child.path):
            raise DataError(
                "image-without-class",
                f"{child.path}: lies beside the class folders.",
                why="An image's class is the folder it lies in.",
                fix="Move it into its class folder, or write a manifest.csv.",
            )
    return classes


def image_files(folder: str | Path) -> Iterable[str]:
    """All image files below ``folder``, sorted; a file that is no image is refused by name."""
    visited = set()
    for root, directories, files in os.walk(folder, followlinks=True, onerror=unreadable):
        here = os.path.realpath(root)
        if here in visited:
            unreadable(OSError(0, "a link leads back to a folder that was already read", root))
        visited.add(here)
        directories[:] = sorted(name for name in directories if not _ignored(name))
        for name in sorted(files):
            if _ignored(name):
                continue
            path = os.path.join(root, name)  # text: a Path for each of 100,000 names takes seconds
            if not is_image(path):
                refuse_volume(path)
                raise DataError(
                    "not-an-image",
                    f"{path}: lies among the images but is none.",
                    why="Nothing is skipped silently; it could be an image with an unusual name.",
                    fix=f"Remove it; or, if it is an image, give it its ending: {' '.join(EXTENSIONS)}.",
                )
            yield path


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
