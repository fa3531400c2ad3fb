"""Many image files through a released model: one that cannot be read is named, the others are classified."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sfumato.data.readers.decode import EXTENSIONS, is_image
from sfumato.errors import DataError
from sfumato.files import write_text
from sfumato.release.release import Prediction, ReleasedModel

_FILES_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class FileResult:
    """What became of one file: a prediction, or the error that says why there is none."""

    file: Path
    prediction: Prediction | None = None
    error: DataError | None = None


def find_images(places: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The files named and all image files below the folders named; and what else these folders hold.

    Hidden files are none of the images, as in training: other systems leave ``._scan.png`` beside scan.png.
    """
    images: list[Path] = []
    others: list[Path] = []
    for place in places:
        if not place.is_dir():
            images.append(place)  # named by the user: if it is no image, that is an error to be shown
            continue
        for path in sorted(path for path in place.rglob("*") if path.is_file()):
            hidden = any(part.startswith(".") for part in path.relative_to(place).parts)
            (images if not hidden and is_image(path) else others).append(path)
    if not images:
        held = f"; {len(others):,} other files are there" if others else ""
        raise DataError(
            "no-images",
            f"no image files in {', '.join(map(str, places))}{held}",
            fix=f"Give files that end in one of {', '.join(EXTENSIONS)}.",
        )
    return images, others


def classify_files(released: ReleasedModel, files: Sequence[Path]) -> Iterator[FileResult]:
    """A result for each file, in order; a broken one costs no other its prediction."""
    for start in range(0, len(files), _FILES_AT_ONCE):
        part = files[start : start + _FILES_AT_ONCE]
        decoded, errors = [], {}
        for file in part:
            try:
                decoded.append(released.decode([file]))
            except DataError as error:
                errors[file] = error
        predictions = iter(released.predict(torch.cat(decoded)) if decoded else [])
        for file in part:
            if file in errors:
                yield FileResult(file=file, error=errors[file])
            else:
                yield FileResult(file=file, prediction=next(predictions))


def ranked(prediction: Prediction, classes: Sequence[str], count: int) -> list[tuple[str, float]]:
    """The ``count`` most likely classes with their probabilities; ties in the order of the classes."""
    named = zip(classes, prediction.probabilities, strict=True)
    return sorted(named, key=lambda pair: -pair[1])[:count]


def write_csv(path: Path, results: Sequence[FileResult], classes: Sequence[str]) -> None:
    """One row per file: label, its probability, those of all classes, and the error of a broken file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["file", "label", "probability", *(f"probability of {name}" for name in classes), "error"]
    )
    for result in results:
        each = result.prediction
        if each is None:
            error = "" if result.error is None else f"[{result.error.code}] {result.error.what}"
            writer.writerow([result.file, "", "", *("" for _ in classes), error])
            continue
        chances = [f"{chance:.6f}" for chance in each.probabilities]
        writer.writerow([result.file, each.label, f"{each.probability:.6f}", *chances, ""])
    write_text(path, text.getvalue())
