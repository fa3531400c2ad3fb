"""The data in a few lines, so that a wrong layout or expression is seen: sensitive, shown, never stored."""

from __future__ import annotations

from typing import TypedDict

import torch

from sfumato.data import DataSplits
from sfumato.doctor.plausibility import class_counts

SENSITIVE = "sensitive: of the private images, keep it local"


class Patients(TypedDict):
    num_patients: int
    fewest_images: int
    median_images: int
    most_images: int


class Example(TypedDict):
    file: str
    patient: str | None


class Summary(TypedDict):
    """What ``sfumato doctor --data`` shows of the data. All of it is about private images."""

    sensitive: bool
    images: dict[str, dict[str, int]]  # split -> class -> images
    patients: Patients | None
    sizes: dict[str, int]  # "2000x1500" -> files, the most frequent first; empty where there are no files
    bits: dict[str, int]  # bits of a stored value -> files
    examples: list[Example]


def summarise(splits: DataSplits) -> Summary:
    """Images per class and split, patients, and what the files are like."""
    parts = {"train": splits.train, "val": splits.val, "test": splits.test}
    images = {
        name: dict(zip(part.classes, class_counts(part), strict=True))
        for name, part in parts.items()
        if part is not None
    }
    survey = splits.survey
    return Summary(
        sensitive=True,
        images=images,
        patients=_patients(splits),
        sizes={} if survey is None else {f"{w}x{h}": files for (w, h), files in survey.sizes},
        bits={} if survey is None else {str(bits): files for bits, files in survey.bits},
        examples=[]
        if survey is None
        else [Example(file=file, patient=patient) for file, patient in survey.examples],
    )


def _patients(splits: DataSplits) -> Patients | None:
    """Of the training images."""
    if splits.train.patients is None:
        return None
    counts = torch.unique(splits.train.patients, return_counts=True)[1]
    return Patients(
        num_patients=len(counts),
        fewest_images=int(counts.min()),
        median_images=int(counts.median()),
        most_images=int(counts.max()),
    )


def as_lines(summary: Summary) -> list[str]:
    """The summary for a terminal."""
    lines = [f"Data       {SENSITIVE}"]
    classes = list(summary["images"]["train"])
    width = min(40, max(map(len, classes), default=0))
    lines.append(f"  {'':<{width}}" + "".join(f"{split:>9}" for split in summary["images"]))
    for name in classes:
        counts = "".join(f"{by_class[name]:>9,}" for by_class in summary["images"].values())
        lines.append(f"  {_short(name, width):<{width}}{counts}")
    people = summary["patients"]
    if people is not None:
        each = f"{people['fewest_images']:,} to {people['most_images']:,}"
        lines.append(
            f"Patients   {people['num_patients']:,} in training, with {each} images each, "
            f"median {people['median_images']:,}"
        )
    for title, counted in (("Sizes", summary["sizes"]), ("Bits", summary["bits"])):
        if counted:
            shown = ", ".join(f"{what} ({files:,} files)" for what, files in list(counted.items())[:4])
            more = f", and {len(counted) - 4:,} others" if len(counted) > 4 else ""
            lines.append(f"{title:<11}{shown}{more}")
    if summary["examples"]:
        lines.append("Examples   file → patient")
        lines += [f"  {each['file']} → {each['patient'] or 'not known'}" for each in summary["examples"]]
    return lines


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"
