"""A labelled set of images in memory, and its train, validation and test parts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from sfumato.data.fingerprint import fingerprint_of, image_ids
from sfumato.data.pixels import Pixels, choose_rows
from sfumato.errors import ConfigError, DataError
from sfumato.ledger.links import one_spelling

if TYPE_CHECKING:
    from sfumato.data.survey import Survey

Unit = Literal["image", "patient"]
Task = Literal["single-label", "multi-label"]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images of one size with their labels; ``patients`` says whose image each one is.

    An image has one of the classes, or any number of them: labels are then a matrix of 0 and 1, one column
    for each class, which is called a finding.

    ``content_ids`` are 64-bit hashes of the decoded pixels before any resizing, and ``fingerprint``
    is the SHA-256 of their sorted list: moving, copying, renaming, reordering or resizing the
    files leaves both unchanged. Labels are not part of them, since relabelled images are still
    the same people's.
    """

    images: Pixels  # uint8 (N, C, H, W): a tensor, perhaps memory-mapped, or chosen rows of a large one
    labels: Tensor  # int64 (N,); with several findings per image float32 (N, findings) of 0 and 1
    classes: tuple[str, ...]
    patients: Tensor | None = None  # int64 (N,); equal numbers are the same patient in every split
    name: str = "images"
    fingerprint: str = ""
    content_ids: Tensor | None = None  # int64 (N,)

    def __post_init__(self) -> None:
        self._check_shapes()
        if self.multi_label:
            if not bool(((self.labels == 0) | (self.labels == 1)).all()):
                raise DataError(
                    "label-out-of-range",
                    f"{self.name}: the findings are not all 0 or 1.",
                    fix="Give 1 for a finding that is there, and 0 for one that is not.",
                )
        elif len(self.labels):
            low, high = int(self.labels.min()), int(self.labels.max())
            if low < 0 or high >= len(self.classes):
                raise DataError(
                    "label-out-of-range",
                    f"{self.name}: label {low if low < 0 else high} is not one of its classes.",
                    why=f"There are {len(self.classes)} classes, 0 to {len(self.classes) - 1}.",
                    fix="Correct the labels, or name every class.",
                )
        if self.content_ids is None:
            object.__setattr__(self, "content_ids", image_ids(self.images))
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", fingerprint_of(self.known_ids))

    @property
    def multi_label(self) -> bool:
        """Whether an image has any number of findings, not one class."""
        return self.labels.ndim == 2

    @property
    def task(self) -> Task:
        """What a model is to tell of an image: its one class, or all its findings."""
        return "multi-label" if self.multi_label else "single-label"

    @property
    def known_ids(self) -> Tensor:
        """``content_ids``, which every set has once it is made."""
        assert self.content_ids is not None
        return self.content_ids

    def _check_shapes(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise DataError(
                "bad-array",
                f"{self.name}: images are {self.images.dtype} of shape {tuple(self.images.shape)}.",
                why="An ImageSet holds uint8 images of shape (N, C, H, W).",
                fix="Convert them first, e.g. (images * 255).round().to(torch.uint8).",
            )
        columns: tuple[str, ...] = ("patients", "content_ids")
        if self.multi_label:
            if self.labels.dtype != torch.float32 or self.labels.shape != (
                len(self.images),
                len(self.classes),
            ):
                raise DataError(
                    "bad-array",
                    f"{self.name}: labels are {self.labels.dtype} of shape {tuple(self.labels.shape)}.",
                    why=f"There are {len(self.images)} images and {len(self.classes)} findings.",
                    fix="Give float32 values, 0 or 1, one row per image and one column per finding.",
                )
        else:
            columns = ("labels", *columns)
        for field in columns:
            column = getattr(self, field)
            if column is not None and (column.dtype != torch.int64 or column.shape != self.images.shape[:1]):
                raise DataError(
                    "bad-array",
                    f"{self.name}: {field} are {column.dtype} of shape {tuple(column.shape)}.",
                    why=f"There are {len(self.images)} images, each needs one int64 value.",
                    fix="Give one int64 value per image.",
                )

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Tensor) -> ImageSet:
        """The images at ``indices`` (int64, or a boolean mask), as a set of their own.

        Of a memory-mapped set more than 256 MiB are not copied, but read when they are asked for.
        """
        return replace(
            self,
            images=choose_rows(self.images, indices),
            labels=self.labels[indices],
            patients=None if self.patients is None else self.patients[indices],
            content_ids=self.known_ids[indices],
            fingerprint="",
        )

    def unit_index(self, unit: Unit = "image") -> Tensor:
        """The unit of each image, as int64 0..U-1: the image itself, or its patient."""
        if unit == "image":
            return torch.arange(len(self))
        if unit != "patient":
            raise ConfigError(
                "unknown-unit", f"unit is {unit!r}.", why="", fix="Use unit = 'image' or 'patient'."
            )
        if self.patients is None:
            raise DataError(
                "no-patients",
                f"{self.name} does not say whose images these are.",
                why="A patient-level guarantee needs every image's patient.",
                fix="Add a patient column to manifest.csv, or give --patient-from REGEX for the file names; "
                "DICOM files name their patients if all of them have a PatientID.",
            )
        return torch.unique(self.patients, return_inverse=True)[1]

    def num_units(self, unit: Unit = "image") -> int:
        """How many units ``unit_index`` counts."""
        index = self.unit_index(unit)
        return int(index.max()) + 1 if len(index) else 0


@dataclass(frozen=True, eq=False)
class DataSplits:
    """The parts of a data set. Validation images are private unless declared public."""

    train: ImageSet
    val: ImageSet | None = None
    test: ImageSet | None = None
    val_is_public: bool = False
    patient_names: tuple[str, ...] | None = None  # of the numbers in ImageSet.patients; sensitive
    notes: tuple[str, ...] = ()  # what was seen while loading, for those who may see the images
    classes_are_declared: bool = False  # listed beforehand: no image made a class exist
    survey: Survey | None = None  # of a folder's files; sensitive

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for name in self.patient_names or ():
            form = one_spelling(name)
            if form in seen:
                raise DataError(
                    "patient-named-twice",
                    f"{self.train.name}: two of the patients are called {seen[form]!r} and {name!r}.",
                    why="Case and blanks do not make another person: one counted as two is protected half as "
                    "well.",
                    fix="Give both the same number; load_data does so.",
                )
            seen[form] = name

    def names_of(self, images: ImageSet) -> tuple[str, ...] | None:
        """The names of the patients in ``images``, each once (sensitive); None if none are given."""
        if self.patient_names is None or images.patients is None:
            return None
        return tuple(self.patient_names[number] for number in torch.unique(images.patients).tolist())


def carve_validation(splits: DataSplits, *, fraction: float, public: bool = False) -> DataSplits:
    """Move about ``fraction`` of the training units (patients stay whole) into ``val``.

    Guarantee: whether a unit moves depends on that unit alone (a hash of its patient's name or its
    pixels), so adding or removing one unit moves no other. ``public=True`` declares that the moved
    images need no protection; only the user can know that.
    """
    if not 0.0 < fraction < 1.0:
        raise ConfigError(
            "bad-fraction", f"validation fraction is {fraction}.", fix="Give a number between 0 and 1."
        )
    if splits.val is not None:
        raise ConfigError(
            "val-exists",
            f"{splits.train.name} already has {len(splits.val)} validation images.",
            fix="Use them, or remove val/ before carving a new validation set.",
        )
    threshold = int(fraction * 2**32)
    moved = torch.tensor([_coin(key) < threshold for key in _unit_keys(splits)])
    if bool(moved.all()) or not bool(moved.any()):
        raise DataError(
            "empty-split",
            f"a validation fraction of {fraction} leaves one side of {len(moved)} images empty.",
            fix="Use more images, or a fraction nearer 0.5.",
        )
    train, val = splits.train.select(~moved), splits.train.select(moved)
    return replace(splits, train=train, val=val, val_is_public=public)


def _unit_keys(splits: DataSplits) -> list[bytes]:
    train = splits.train
    if train.patients is None:
        return [int(value).to_bytes(8, "little", signed=True) for value in train.known_ids.tolist()]
    if splits.patient_names is None:
        return [f"patient {number}".encode() for number in train.patients.tolist()]
    return [splits.patient_names[number].encode() for number in train.patients.tolist()]


def _coin(key: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"sfumato validation split " + key).digest()[:4], "little")
