"""``load_data``: one function for known names, known layouts and folders of images."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sfumato.data.generated_set import load_generated
from sfumato.data.images import DataSplits, ImageSet
from sfumato.data.known import KNOWN_SETS
from sfumato.data.readers import binary
from sfumato.data.readers.decode import Fit
from sfumato.data.readers.findings import refuse_findings
from sfumato.data.readers.folder import load_folder
from sfumato.data.readers.listing import OnListing
from sfumato.data.readers.rendering import AS_THE_FILES_SAY, Rendering
from sfumato.errors import ConfigError, DataError, did_you_mean

_BINARY = (
    ("mnist", "train-images-idx3-ubyte.gz", binary.load_mnist),
    ("cifar10", "data_batch_1.bin", binary.load_cifar10),
    ("cifar100", "train.bin", binary.load_cifar100),
)


def load_data(
    spec: str | Path,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    patient_from: str | None = None,
    fit: Fit = "crop",
    classes: Sequence[str] | None = None,
    findings: Sequence[str] | None = None,
    rendering: Rendering = AS_THE_FILES_SAY,
    on_progress: Callable[[int, int], None] | None = None,
    on_listing: OnListing | None = None,
) -> DataSplits:
    """Load a known set by name, or a folder of images, as uint8 tensors of one size.

    ``image_size`` and ``channels`` (1 or 3) are public choices; without them a known set keeps its
    own and every folder becomes 64 px in 3 channels: nothing is read off the images, or one could decide it.
    ``classes`` declares the class names of a folder, in order; an image of any other class is refused.
    ``findings`` does so for a manifest whose images have any number of findings; labels are then a matrix.
    ``fit`` says how other shapes become square: "crop" the middle, "pad" with black, or "stretch".
    ``patient_from`` is a regular expression that finds the patient in each file's path; "dicom" takes the
    PatientID of DICOM headers, as is done by itself if all files are DICOM and nothing else names patients.
    ``rendering`` says, by public constants, how more than 8 bits become 8.
    ``on_progress(done, total)`` is called while headers are read, and again while images are decoded;
    ``on_listing(found)`` before, while a folder's files are listed.
    """
    _check_options(image_size, channels, fit)
    name = spec if isinstance(spec, str) and spec in KNOWN_SETS else None
    folder = existing_folder(spec) if name is None else _known_folder(name)
    read = binary_reader(name, folder)
    if name == "generated":  # drawn at the size that is wanted, not resized to it
        read = partial(
            load_generated, image_size=image_size or 32, channels=channels or 3, on_progress=on_progress
        )
    if read is not None:
        _refuse_file_options(spec, patient_from, findings, rendering)
        splits = _resized(read(), image_size, channels)
        _check_classes(splits.train, classes, spec)
        return splits
    if name is not None:
        image_size = image_size or KNOWN_SETS[name].image_size
        channels = channels or KNOWN_SETS[name].channels
    assert folder is not None  # what is built in has a reader of its own
    splits = load_folder(
        folder,
        image_size=image_size,
        channels=channels,
        patient_from=patient_from,
        fit=fit,
        rendering=rendering,
        on_progress=on_progress,
        on_listing=on_listing,
        name=name or folder.resolve().name,
        classes=classes,
        findings=findings,
    )
    if name is not None and splits.test is None:
        # ImageNette: its val images are what everybody reports on
        return replace(splits, val=None, test=splits.val)
    return splits


def _refuse_file_options(
    spec: str | Path, patient_from: str | None, findings: Sequence[str] | None, rendering: Rendering
) -> None:
    """Refuse what only image files or manifests can have."""
    if patient_from is not None:
        raise ConfigError(
            "no-file-names",
            f"{spec} has no file names in which to find --patient-from {patient_from!r}.",
            fix="Leave out --patient-from for this data set.",
        )
    refuse_findings(spec, findings)
    if rendering != AS_THE_FILES_SAY:
        raise ConfigError(
            "bad-rendering",
            f"{spec} is not made of image files: there is nothing for a window, range, bits or frame.",
            fix="Leave out data.window, data.range, data.bits and data.frame for this data set.",
        )


def _known_folder(name: str) -> Path | None:
    return None if KNOWN_SETS[name].is_built_in else KNOWN_SETS[name].require()


def binary_reader(name: str | None, folder: Path | None) -> Callable[[], DataSplits] | None:
    """The reader of a set that is not made of image files, known by its name or by its folder's content."""
    if name == "digits":
        return binary.load_digits
    for known, marker, load in _BINARY:
        if folder is not None and (name == known or (name is None and (folder / marker).is_file())):
            return partial(load, folder)
    return None


def _check_classes(train: ImageSet, declared: Sequence[str] | None, spec: str | Path) -> None:
    if declared is not None and tuple(declared) != train.classes:
        raise DataError(
            "other-classes",
            f"{spec} has the classes {', '.join(train.classes)}; wanted are {', '.join(declared)}.",
            fix="Leave out data.classes for this data set, or use a model that was trained for it.",
        )


def _check_options(image_size: int | None, channels: int | None, fit: str) -> None:
    if image_size is not None and not 4 <= image_size <= 1024:
        raise ConfigError(
            "bad-image-size", f"image_size is {image_size}.", fix="Give a number from 4 to 1024."
        )
    if channels not in (None, 1, 3):
        raise ConfigError("bad-channels", f"channels is {channels}.", fix="Use 1 (grey) or 3 (colour).")
    if fit not in ("crop", "pad", "stretch"):
        raise ConfigError("bad-fit", f"fit is {fit!r}.", fix="Use crop, pad or stretch.")


def existing_folder(spec: str | Path) -> Path:
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(spec, str) and os.sep not in spec and not folder.exists():
        hint = did_you_mean(spec, list(KNOWN_SETS))
        raise DataError(
            "unknown-data",
            f"there is no folder {spec!r} here and no known data set of that name. {hint}".rstrip(),
            why=f"Known sets: {', '.join(KNOWN_SETS)}.",
            fix="Give the path of a folder, or one of the known names.",
        )
    raise DataError(
        "missing-folder",
        f"{spec} is {'not a folder' if folder.exists() else 'missing'}.",
        why="DATA is a folder with train/<class>/*.png or manifest.csv, or a known name.",
        fix="A manifest is named manifest.csv, and DATA is the folder that it is in."
        if folder.suffix.lower() == ".csv"
        else "Check the path; for an archive run: sfumato data import FILE",
    )


def _resized(splits: DataSplits, image_size: int | None, channels: int | None) -> DataSplits:
    def part(images: ImageSet) -> ImageSet:
        return replace(images, images=_resize(_recolour(images.images[:], channels), image_size))

    return replace(
        splits,
        train=part(splits.train),
        val=None if splits.val is None else part(splits.val),
        test=None if splits.test is None else part(splits.test),
    )


def _recolour(images: Tensor, channels: int | None) -> Tensor:
    if channels is None or channels == images.shape[1]:
        return images
    if channels == 3:
        return images.expand(-1, 3, -1, -1).contiguous()
    grey = torch.empty_like(images[:, :1])
    for chunk, out in zip(images.split(2048), grey.split(2048), strict=True):
        red, green, blue = chunk.int().unbind(1)
        # ITU-R 601 luma in the integers that Pillow uses: the same grey as for image files
        out[:, 0] = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    return grey


def _resize(images: Tensor, image_size: int | None) -> Tensor:
    if image_size is None or images.shape[-2:] == (image_size, image_size):
        return images
    size = (image_size, image_size)
    chunks = []
    for chunk in images.split(2048):  # float copies of the whole set would need four times its memory
        resized = torch.nn.functional.interpolate(chunk.float(), size=size, mode="bilinear", antialias=True)
        chunks.append(resized.round_().clamp_(0, 255).to(torch.uint8))
    return torch.cat(chunks)
