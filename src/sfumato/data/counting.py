"""How many units and classes a data set has: taken to be public, and counted without opening an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sfumato.data.images import Unit
from sfumato.data.known import KNOWN_SETS
from sfumato.data.loading import binary_reader, existing_folder
from sfumato.data.readers.decode import OnProgress
from sfumato.data.readers.folder import list_images, with_patients
from sfumato.data.readers.listing import Listing, OnListing
from sfumato.errors import DataError
from sfumato.ledger.links import one_spelling


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The public counts of a data set. The number of images is none of them where patients are protected."""

    num_units: int
    num_classes: int
    multi_label: bool = False  # the classes are findings, any number of them in an image


def count_units(
    spec: str,
    *,
    unit: Unit = "image",
    patient_from: str | None = None,
    classes: Sequence[str] | None = None,
    findings: Sequence[str] | None = None,
    on_progress: OnProgress | None = None,
    on_listing: OnListing | None = None,
) -> Counted:
    """Units and classes of the training images that ``load_data`` would load.

    ``on_listing(found)`` is called while files are listed, ``on_progress(done, total)`` while the patients in
    their headers are read.
    """
    if spec in KNOWN_SETS:
        known = KNOWN_SETS[spec]
        if unit == "patient":
            raise _no_patients(spec)
        return Counted(num_units=known.num_train, num_classes=known.num_classes)
    folder = existing_folder(spec)
    read = binary_reader(None, folder)
    if read is not None:
        train = read().train
        return Counted(num_units=train.num_units(unit), num_classes=len(train.classes))
    listing = list_images(folder, classes, findings, on_listing)
    if unit == "patient" or patient_from is not None:
        listing = with_patients(listing, patient_from, on_progress)
    return _count_files(folder, listing, unit=unit)


def _count_files(folder: Path, listing: Listing, *, unit: Unit) -> Counted:
    train = [entry for entry in listing.entries if entry.split == "train"]
    if unit == "image":
        return Counted(
            num_units=len(train), num_classes=len(listing.classes), multi_label=listing.multi_label
        )
    patients = {None if entry.patient is None else one_spelling(entry.patient) for entry in train}
    if None in patients:
        raise _no_patients(folder.name)
    return Counted(num_units=len(patients), num_classes=len(listing.classes), multi_label=listing.multi_label)


def _no_patients(name: str) -> DataError:
    return DataError(
        "no-patients",
        f"{name} does not say whose images these are.",
        why="A patient-level guarantee needs every image's patient.",
        fix="Add a patient column to manifest.csv, or give --patient-from REGEX for the file names; "
        "DICOM files name their patients if all of them have a PatientID.",
    )
