"""A folder of images, with or without manifest.csv, as image sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sfumato.data.cache import decode_all
from sfumato.data.images import DataSplits, ImageSet
from sfumato.data.pixels import choose_rows
from sfumato.data.readers.decode import Fit, Header, OnProgress, read_headers
from sfumato.data.readers.findings import refuse_findings
from sfumato.data.readers.listing import (
    Entry,
    Listing,
    OnListing,
    Tally,
    empty_class,
    image_files,
    list_folder,
)
from sfumato.data.readers.manifest import read_manifest
from sfumato.data.readers.rendering import AS_THE_FILES_SAY, Rendering
from sfumato.data.readers.splits import SPLITS
from sfumato.data.survey import survey
from sfumato.errors import DataError
from sfumato.ledger.links import one_spelling

# Fixed public choices: nothing about the images decides them, or one image could.
DEFAULT_SIZE = 64
DEFAULT_CHANNELS = 3
FROM_DICOM = "dicom"  # in place of an expression: the PatientID of each file's header


def load_folder(
    folder: Path,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    patient_from: str | None = None,
    fit: Fit = "crop",
    rendering: Rendering = AS_THE_FILES_SAY,
    on_progress: OnProgress | None = None,
    on_listing: OnListing | None = None,
    name: str = "images",
    classes: Sequence[str] | None = None,
    findings: Sequence[str] | None = None,
) -> DataSplits:
    """Every image that ``list_images`` finds, decoded to one size, as train, val and test."""
    listing = with_patients(list_images(folder, classes, findings, on_listing), patient_from, on_progress)
    paths = [entry.path for entry in listing.entries]
    headers = read_headers(paths, rendering, on_progress)
    notes = _suggestions(headers, image_size, channels)
    images, ids = decode_all(
        paths,
        image_size=image_size or DEFAULT_SIZE,
        channels=channels or DEFAULT_CHANNELS,
        fit=fit,
        rendering=rendering,
        on_progress=on_progress,
    )
    names, numbers = _number_patients(listing.entries)
    in_file_names = patient_from not in (None, FROM_DICOM)
    labels = _labels(listing)
    parts = {}
    for split in SPLITS:
        rows = [row for row, entry in enumerate(listing.entries) if entry.split == split]
        if not rows:
            continue
        parts[split] = ImageSet(
            images=choose_rows(images, torch.tensor(rows)),
            labels=labels[rows],
            classes=listing.classes,
            patients=None if numbers is None else numbers[rows],
            name=name,
            content_ids=torch.from_numpy(ids)[rows],
        )
    return DataSplits(
        train=parts["train"],
        val=parts.get("val"),
        test=parts.get("test"),
        patient_names=names,
        notes=notes,
        classes_are_declared=listing.declared,
        survey=survey(
            listing.entries,
            headers,
            None if numbers is None else numbers.tolist(),
            in_file_names=in_file_names,
        ),
    )


def with_patients(
    listing: Listing, patient_from: str | None, on_progress: OnProgress | None = None
) -> Listing:
    """By the expression; or by DICOM headers, if that is asked for or nothing else names patients."""
    named = any(entry.patient is not None for entry in listing.entries)
    if patient_from is None:
        return listing if named else listing.with_dicom_patients(needed=False, on_progress=on_progress)
    if patient_from == FROM_DICOM and not named:
        return listing.with_dicom_patients(needed=True, on_progress=on_progress)
    return listing.with_patients(patient_from)  # which refuses patients that are named twice


def list_images(
    folder: Path,
    classes: Sequence[str] | None = None,
    findings: Sequence[str] | None = None,
    on_listing: OnListing | None = None,
) -> Listing:
    """What ``manifest.csv`` lists; else Tiny ImageNet's own layout; else ``train/<class>/*.png``."""
    if (folder / "manifest.csv").is_file():
        return read_manifest(folder, classes, findings).check(str(folder))
    refuse_findings(folder, findings)
    if (folder / "wnids.txt").is_file():
        listing = _list_tiny_imagenet(folder, on_listing)
    else:
        listing = list_folder(folder, classes, on_listing)
    return listing.check(str(folder))


def _labels(listing: Listing) -> torch.Tensor:
    """The class of each image; with several findings per image a row of 0 and 1 for each."""
    if not listing.multi_label:
        return torch.tensor([entry.label for entry in listing.entries])
    labels = torch.zeros(len(listing.entries), len(listing.classes))
    found = [(row, number) for row, entry in enumerate(listing.entries) for number in entry.findings]
    if found:
        labels[tuple(torch.tensor(found).T)] = 1.0
    return labels


def _list_tiny_imagenet(folder: Path, on_listing: OnListing | None) -> Listing:
    """Its labelled val images become ``test``: the labels of its true test images are not public."""
    classes = tuple(_read_ascii(folder / "wnids.txt").split())
    numbers = {name: number for number, name in enumerate(classes)}
    entries, tally = [], Tally(on_listing)
    for class_name in classes:
        images = folder / "train" / class_name / "images"
        if not images.is_dir():
            raise empty_class(str(folder), class_name)
        for path in tally.of(image_files(images)):
            entries.append(_entry(folder, Path(path), "train", numbers[class_name]))
    annotations = folder / "val" / "val_annotations.txt"
    lines = _read_ascii(annotations).splitlines() if annotations.is_file() else []
    for line, text in enumerate(lines, start=1):
        fields = text.split("\t")
        if len(fields) < 2 or fields[1] not in numbers or "/" in fields[0]:
            raise DataError(
                "label-out-of-range",
                f"{annotations}, line {line}: {text!r} names no class of wnids.txt.",
                fix="Get the data again: sfumato data get tiny-imagenet",
            )
        entries.append(_entry(folder, folder / "val" / "images" / fields[0], "test", numbers[fields[1]]))
    return Listing(tuple(entries), classes)


def _read_ascii(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            "bad-classes",
            f"{path}: it cannot be read as plain text.",
            fix="Get the data again: sfumato data get tiny-imagenet",
        ) from error


def _entry(folder: Path, path: Path, split: str, label: int) -> Entry:
    return Entry(path, path.relative_to(folder).as_posix(), split, label, None, str(path))


def _suggestions(headers: Sequence[Header], image_size: int | None, channels: int | None) -> tuple[str, ...]:
    """What all files share where a fixed default stands instead; shown only to the user who has the files."""
    sizes = {(header.width, header.height) for header in headers}
    shared, settings = [], []
    width, height = next(iter(sizes))
    if image_size is None and len(sizes) == 1 and (width, height) != (DEFAULT_SIZE, DEFAULT_SIZE):
        shared.append(f"of {width}x{height} pixels")
        settings.append(f"data.image_size={min(width, height)}")
    if channels is None and all(header.grey for header in headers):
        shared.append("grey")
        settings.append("data.channels=1")
    if not shared:
        return ()
    return (
        f"sensitive: all files are {' and '.join(shared)}. Where nothing is set they become {DEFAULT_SIZE} "
        f"px in {DEFAULT_CHANNELS} channels, so that no single image decides it. If that is publicly known, "
        f"set {' and '.join(settings)}.",
    )


def _number_patients(entries: Sequence[Entry]) -> tuple[tuple[str, ...] | None, torch.Tensor | None]:
    named = [entry.patient for entry in entries if entry.patient is not None]
    if len(named) < len(entries):
        return None, None
    names, numbers = np.unique(np.array([one_spelling(name) for name in named]), return_inverse=True)
    return tuple(names.tolist()), torch.from_numpy(numbers.astype(np.int64))
