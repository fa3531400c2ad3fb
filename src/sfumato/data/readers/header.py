"""What a file says about itself before any pixel is decoded, and the ways in which it can be bad."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from sfumato.errors import DataError

MAX_PIXELS = 89_478_485  # Pillow's own warning level: about 9,459 x 9,459


class Upload(io.BytesIO):
    """An image file in memory, which has no name and is never stored."""

    def __str__(self) -> str:
        return "the image"


@dataclass(frozen=True)
class Header:
    """The size of the picture, and how deep it is."""

    width: int
    height: int
    grey: bool
    bits: int = 8  # of one stored value; 16 says nothing about how many of them are used


def check_pixels(path: Path | Upload, pixels: int) -> None:
    """Refuse more pixels than are ever decoded."""
    if pixels > MAX_PIXELS:
        raise too_large(path, f"{pixels:,}")


def check_frame(path: Path | Upload, num_frames: int, frame: int | None) -> int:
    """The number of the frame that is the picture; refused if that is open, or if there is none."""
    if frame is None and num_frames > 1:
        raise DataError(
            "several-frames",
            f"{path}: holds {num_frames} frames.",
            why="One file is one image; choosing a frame for you could drop what matters.",
            fix="Save each frame as a file of its own, or set data.frame to the one that counts, from 0.",
        )
    if frame is not None and frame >= num_frames:
        raise DataError(
            "no-such-frame",
            f"{path}: has {num_frames} frames, and data.frame is {frame}.",
            why="Frames are counted from 0; another one in its place could be another picture.",
            fix="Set data.frame to one that every file has, or remove the file.",
        )
    return frame or 0


def too_large(path: Path | Upload, claimed: str) -> DataError:
    return DataError(
        "image-too-large",
        f"{path}: claims {claimed} pixels.",
        why=f"Images above {MAX_PIXELS:,} pixels are not decoded: a small file could fill the memory.",
        fix="Resize the image, or remove it if it does not belong there.",
    )


def corrupt(path: Path | Upload, reason: str) -> DataError:
    return DataError(
        "corrupt-image",
        f"{path}: {reason}.",
        why="Images are never skipped silently: the number of examples is part of the guarantee.",
        fix="Repair or remove the file, then start again.",
    )


def unsupported(path: Path | Upload, what: str) -> DataError:
    return DataError(
        "unsupported-pixels",
        f"{path}: holds {what}.",
        why="How to map such values to 8 bits is a choice that only you can make.",
        fix="Convert to 8-bit or 16-bit greyscale, or to RGB.",
    )


def refuse_volume(path: str | Path | Upload) -> None:
    """Refuse a NIfTI volume with what to do instead; other files pass."""
    if str(path).lower().endswith((".nii", ".nii.gz")):
        raise DataError(
            "nifti-volume",
            f"{path}: is a NIfTI volume, and images here have two dimensions.",
            why="Which slices stand for it, in which direction and grey values, decides what is learnt.",
            fix="Write its slices as 16-bit PNG and keep them one patient's; docs/data.md has the lines.",
        )


def missing_file(path: Path | Upload) -> DataError:
    return DataError(
        "missing-image", f"{path}: does not exist.", fix="Correct the path, or restore the file."
    )
