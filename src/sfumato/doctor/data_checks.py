"""Checks on the images: what they share, and what about them would be published beside the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sfumato.data import DataSplits, ImageSet, normalisation_for
from sfumato.data.images import Unit
from sfumato.data.overlap import duplicate_images, shared_images, shared_patients
from sfumato.data.pixels import Pixels, choose_rows, in_parts
from sfumato.doctor.findings import Finding
from sfumato.doctor.plausibility import examine_plausibility

_LOOKED_AT = 20_000  # images whose mean and deviation are compared with the constants


def examine_data(
    splits: DataSplits,
    *,
    unit: Unit = "image",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    holdout: float = 0.0,
) -> list[Finding]:
    """Everything about the data that voids or weakens the guarantee, or that the release will make public."""
    return [
        *_normalisation(splits.train, mean, std),
        *_classes(splits, unit),
        *_duplicates(splits, unit),
        *_people(splits, unit),
        *_validation(splits, holdout),
        *_test(splits),
        *examine_plausibility(splits, unit),
    ]


def _normalisation(
    train: ImageSet, mean: Sequence[float] | None, std: Sequence[float] | None
) -> list[Finding]:
    """Constants that are the private images' own statistics."""
    public_mean, public_std = normalisation_for(train.name, train.images.shape[1])
    given_mean, given_std = tuple(mean or public_mean), tuple(std or public_std)
    if given_mean == tuple(public_mean) and given_std == tuple(public_std):
        return []
    image_mean, image_std = _statistics(choose_rows(train.images, torch.arange(min(len(train), _LOOKED_AT))))
    close = [
        torch.allclose(torch.tensor(given), measured, atol=0.003)
        for given, measured in ((given_mean, image_mean), (given_std, image_std))
        if len(given) == len(measured)
    ]
    if not any(close):
        return []
    return [
        Finding(
            severity="void",
            code="private-normalisation",
            sensitive=True,
            what="the normalisation constants are the training images' own mean or deviation.",
            cure="Use published constants, or 0.5 and 0.25; or release the mean with noise and count it.",
        )
    ]


def _statistics(images: Pixels) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each channel, of pixels from 0 to 1, a part of the images in memory at a time."""
    count, total, squares = 0, torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for part in in_parts(images):
        pixels = part.float() / 255
        count += pixels[:, 0].numel()
        total = total + pixels.sum(dim=(0, 2, 3), dtype=torch.float64)
        squares = squares + pixels.square_().sum(dim=(0, 2, 3), dtype=torch.float64)
    mean = total / count
    return mean.float(), (squares / count - mean**2).clamp_(min=0).sqrt().float()


def _classes(splits: DataSplits, unit: Unit) -> list[Finding]:
    train = splits.train
    kind, kind_file = ("finding", "findings.txt") if train.multi_label else ("class", "classes.txt")
    findings = [
        Finding(
            severity="note",
            code="public-class-names",
            what=f"the {len(train.classes)} {kind} names are published with it: {_some(train.classes)}.",
            cure="They must be known beforehand, not learnt from the private images.",
        )
    ]
    if splits.classes_are_declared:  # the list stands whoever has images of a class
        return findings
    units = (
        train.unit_index(unit) if unit == "image" or train.patients is not None else torch.arange(len(train))
    )
    for number, name in enumerate(train.classes):
        of_it = train.labels[:, number] > 0 if train.multi_label else train.labels == number
        owners = units[of_it].unique().numel()
        if owners == 1:
            findings.append(
                Finding(
                    severity="void",
                    code="class-of-one",
                    sensitive=True,
                    what=f"{kind} {name!r} exists only because of a single {unit}.",
                    cure=f"If the list is public, declare it: a file {kind_file} in the data's folder, one "
                    f"name a line, with this {kind} among them. If it is not, give these images to another "
                    f"{kind} or leave them out.",
                )
            )
    return findings


def _duplicates(splits: DataSplits, unit: str) -> list[Finding]:
    findings = []
    train = splits.train
    repeated = duplicate_images(train)
    if len(repeated) and unit == "image":
        copies = int(torch.unique(train.content_ids, return_counts=True)[1].max())
        findings.append(
            Finding(
                severity="weak",
                code="duplicate-images",
                sensitive=True,
                what=f"{len(repeated)} training images are copies of others; one occurs {copies} times.",
                cure=f"Remove copies; until then such an image is protected as a group of {copies}.",
            )
        )
    for name, other in (("val", splits.val), ("test", splits.test)):
        if other is not None and len(shared := shared_images(other, train)):
            findings.append(
                Finding(
                    severity="weak",
                    code="shared-images",
                    sensitive=True,
                    what=f"{len(shared)} {name} images are also training images.",
                    cure="Remove them from one side: their score overstates accuracy and tells of members.",
                )
            )
    return findings


def _people(splits: DataSplits, unit: str) -> list[Finding]:
    train, findings = splits.train, []
    if train.patients is None:
        return []
    order = torch.argsort(train.known_ids, stable=True)
    ids, patients = train.known_ids[order], train.patients[order]
    across = int(((ids[1:] == ids[:-1]) & (patients[1:] != patients[:-1])).sum())
    if across:
        findings.append(
            Finding(
                severity="weak",
                code="images-of-two-patients",
                sensitive=True,
                what=f"{across} images occur under two patients.",
                cure="Correct the patient column: one person under two names is protected as two units.",
            )
        )
    shared = shared_patients(splits)
    if shared:
        findings.append(
            Finding(
                severity="weak",
                code="shared-patients",
                sensitive=True,
                what=f"{len(shared)} patients have images both in training and in validation or test.",
                cure="Split by patient: the accuracy is overstated otherwise.",
            )
        )
    if unit == "image":
        largest = int(torch.unique(train.patients, return_counts=True)[1].max())
        findings.append(
            Finding(
                severity="weak",
                code="images-not-patients",
                sensitive=True,
                what=f"patients are known, but the unit is the image; one patient has {largest} images.",
                cure="Use --unit patient, so that the guarantee is about people.",
            )
        )
    return findings


def _validation(splits: DataSplits, holdout: float) -> list[Finding]:
    if splits.val is None or splits.val_is_public:
        return []
    carved = "carved from the private images" if holdout else "not declared public"
    return [
        Finding(
            severity="weak",
            code="private-validation-set",
            what=f"the {len(splits.val)} validation images are {carved}.",
            cure="Do not choose settings by their scores, or count the search; keep the scores local.",
        )
    ]


def _test(splits: DataSplits) -> list[Finding]:
    """Said before ε is spent: afterwards nothing could be put aside any more."""
    if splits.test is not None or splits.val is not None:
        return []
    return [
        Finding(
            severity="note",
            code="no-test-images",
            what="there are no test images: how well the model does will not be measured.",
            cure="Put some aside in test/<class>/, or set data.holdout=0.2.",
        )
    ]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown}, …"
