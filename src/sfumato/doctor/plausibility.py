"""What data that load without complaint still get wrong: an expression, a depth, a class hardly there."""

from __future__ import annotations

from statistics import median_low

import torch

from sfumato.data import DataSplits, ImageSet
from sfumato.data.images import Unit
from sfumato.data.pixels import choose_rows, in_parts
from sfumato.doctor.findings import Finding

_DARK = 64  # of 255: a picture whose brightest pixel is below came from fewer bits than were assumed
_IMBALANCE = 20
_FEW = 20
_LOOKED_AT = 2000  # images; more would tell the same


def examine_plausibility(splits: DataSplits, unit: Unit) -> list[Finding]:
    """What is worth a second look before any budget is spent; shown to those who have the images."""
    return [*_patients(splits, unit), *_darkness(splits.train), *_balance(splits.train)]


def class_counts(images: ImageSet) -> list[int]:
    """Images of each class, or with each finding."""
    if images.multi_label:
        return [int(count) for count in (images.labels > 0).sum(0)]
    return [int((images.labels == number).sum()) for number in range(len(images.classes))]


def _patients(splits: DataSplits, unit: Unit) -> list[Finding]:
    train = splits.train
    if unit != "patient" or train.patients is None or len(train) < 2:
        return []
    num_patients = train.num_units("patient")
    if num_patients == len(train):
        return [
            Finding(
                severity="weak",
                code="patient-per-image",
                sensitive=True,
                what="every training image is a patient of its own: perhaps --patient-from marks whole file "
                "names.",
                cure="Look at the examples of sfumato doctor --data. A person with several images is "
                "protected only if all of them name the same patient.",
            )
        ]
    if num_patients == 1:
        return [
            Finding(
                severity="weak",
                code="one-patient",
                sensitive=True,
                what="all training images belong to one patient: perhaps they were given one name for all.",
                cure="Look at the examples of sfumato doctor --data, and name patients apart.",
            )
        ]
    return []


def _darkness(train: ImageSet) -> list[Finding]:
    """Images that use a small part of the grey values, as 12 bits read as 16 do."""
    step = max(1, len(train) // _LOOKED_AT)
    looked_at = choose_rows(train.images, torch.arange(0, len(train), step))
    brightest = [value for part in in_parts(looked_at) for value in part.flatten(1).amax(1).tolist()]
    if not brightest or median_low(brightest) >= _DARK:
        return []
    return [
        Finding(
            severity="weak",
            code="dark-images",
            sensitive=True,
            what=f"most training images are nearly black: their brightest pixel is below {_DARK} of 255.",
            cure="If 16-bit files hold 12 bits, set data.bits=12; other depths: data.range or --window. They "
            "are public constants: take them from the scanner's manual, not from the images.",
        )
    ]


def _balance(train: ImageSet) -> list[Finding]:
    counts = class_counts(train)
    findings = []
    few = [name for name, count in zip(train.classes, counts, strict=True) if 0 < count < _FEW]
    if few:
        shown = ", ".join(few[:6]) + (", …" if len(few) > 6 else "")
        findings.append(
            Finding(
                severity="note",
                code="few-images",
                sensitive=True,
                what=f"fewer than {_FEW} training images: {shown}.",
                cure="The noise will hide so small a class: merge it with another, or find more images.",
            )
        )
    if max(counts) > _IMBALANCE * max(1, min(counts)):
        findings.append(
            Finding(
                severity="note",
                code="class-imbalance",
                sensitive=True,
                what=f"the largest class has more than {_IMBALANCE} times the images of the smallest.",
                cure="Accuracy will say little: look at sensitivity and specificity of each class.",
            )
        )
    return findings
