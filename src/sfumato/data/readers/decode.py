"""Image files to uint8 arrays of one size, with Pillow, on all cores."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sfumato.data.fingerprint import pixel_id
from sfumato.errors import DataError
from sfumato.files import check_plain

Fit = Literal["crop", "pad", "stretch"]
OnProgress = Callable[[int, int], None]

# Only these are ever tried: Pillow's other readers (EPS runs Ghostscript) have no place in training data.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp")
MAX_PIXELS = 89_478_485  # Pillow's own warning level: about 9,459 x 9,459
_GREY_MODES = frozenset(("1", "L", "LA", "I", "I;16", "I;16L", "I;16B", "I;16N"))
_CHUNK = 1024


class Upload(io.BytesIO):
    """An image file in memory, which has no name and is never stored."""

    def __str__(self) -> str:
        return "the image"


@dataclass(frozen=True)
class Header:
    """What a file says about itself before any pixel is decoded."""

    width: int
    height: int
    grey: bool


def read_headers(paths: Sequence[Path | Upload]) -> list[Header]:
    """Headers of all files; a file that is no image, or too large to decode, is named and refused."""
    with _strict_pillow(), ThreadPoolExecutor(num_threads()) as pool:
        return list(pool.map(_read_header, paths))


def decode_files(
    paths: Sequence[Path | Upload],
    *,
    image_size: int,
    channels: int,
    fit: Fit,
    on_progress: OnProgress | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Chunks of (images uint8 (n, C, S, S), content ids int64 (n,)) in the order of ``paths``.

    A corrupt or truncated file is named and refused; nothing is skipped.
    """

    def one(path: Path | Upload) -> tuple[np.ndarray, int]:
        image = _decode(path)
        resized = _fit(image, image_size, channels, fit)
        pixels = np.asarray(resized)
        return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1), pixel_id(np.asarray(image))

    done = 0
    with _strict_pillow(), ThreadPoolExecutor(num_threads()) as pool:
        for start in range(0, len(paths), _CHUNK):
            part = paths[start : start + _CHUNK]
            images = np.empty((len(part), channels, image_size, image_size), dtype=np.uint8)
            ids = np.empty(len(part), dtype=np.int64)
            for row, (pixels, content_id) in enumerate(pool.map(one, part)):
                images[row], ids[row] = pixels, content_id
            done += len(part)
            if on_progress is not None:
                on_progress(done, len(paths))
            yield images, ids


def decode_image(path: Path | Upload, *, image_size: int, channels: int, fit: Fit = "crop") -> np.ndarray:
    """One file, on the disk or in memory, as uint8 (C, S, S), exactly as ``load_data`` would decode it."""
    read_headers([path])
    return next(decode_files([path], image_size=image_size, channels=channels, fit=fit))[0][0]


def _read_header(path: Path | Upload) -> Header:
    with _opened(path) as image:
        width, height = image.size
        num_frames = getattr(image, "n_frames", 1)
        if num_frames > 1:
            raise DataError(
                "several-frames",
                f"{path}: holds {num_frames} frames.",
                why="One file is one image; choosing a frame for you could drop what matters.",
                fix="Save each frame as a file of its own.",
            )
        return Header(width, height, image.mode in _GREY_MODES)


@contextmanager
def _opened(path: Path | Upload) -> Iterator[Image.Image]:
    """The file, opened lazily; every way in which it can be bad becomes one coded error."""
    try:
        if isinstance(path, Path):
            check_plain(path)
        with Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError(f"({image.width * image.height} pixels)")
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(
            "image-too-large",
            f"{path}: claims {_claimed_pixels(error)} pixels.",
            why=f"Images above {MAX_PIXELS:,} pixels are not decoded: a small file could fill the memory.",
            fix="Resize the image, or remove it if it does not belong there.",
        ) from error
    except UnidentifiedImageError as error:
        raise _corrupt(path, f"is not an image in any of {', '.join(FORMATS)}") from error
    except FileNotFoundError as error:
        raise DataError(
            "missing-image", f"{path}: does not exist.", fix="Correct the path, or restore the file."
        ) from error
    except DataError:
        raise
    except Exception as error:  # Pillow's readers answer bad bytes with almost any error
        raise _corrupt(path, str(error) or type(error).__name__) from error


def _claimed_pixels(error: Exception) -> str:
    """The number that Pillow's message gives in brackets."""
    match = re.search(r"\((\d+) pixels\)", str(error))
    return f"{int(match[1]):,}" if match else "too many"


def _corrupt(path: Path | Upload, reason: str) -> DataError:
    return DataError(
        "corrupt-image",
        f"{path}: {reason}.",
        why="Images are never skipped silently: the number of examples is part of the guarantee.",
        fix="Repair or remove the file, then start again.",
    )


def _decode(path: Path | Upload) -> Image.Image:
    """The whole picture upright, as mode L or RGB with 8 bits."""
    with _opened(path) as image:
        image.load()
        return _eight_bit(ImageOps.exif_transpose(image), path)


def _eight_bit(image: Image.Image, path: Path | Upload) -> Image.Image:
    mode = image.mode
    if mode in ("L", "RGB"):
        return image
    if mode == "1":
        return image.convert("L")
    if mode == "I" or mode.startswith("I;16"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise _unsupported(path, "32-bit integers")
        return Image.fromarray((values // 257).astype(np.uint8))  # the full 16-bit range, for every image
    if mode == "P":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    elif mode in ("LA", "La", "PA", "RGBa"):
        image = image.convert("RGBA")
    if image.mode == "RGBA":  # a transparent pixel's hidden colour is not part of the picture
        paper = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(paper, image).convert("RGB")
        return image.convert("L") if mode in ("LA", "La") else image
    if image.mode in ("CMYK", "YCbCr", "LAB", "HSV", "RGBX"):
        return image.convert("RGB")
    if image.mode != "RGB":
        raise _unsupported(path, f"mode {mode}")
    return image


def _unsupported(path: Path | Upload, what: str) -> DataError:
    return DataError(
        "unsupported-pixels",
        f"{path}: holds {what}.",
        why="How to map such values to 8 bits is a choice that only you can make.",
        fix="Convert to 8-bit or 16-bit greyscale, or to RGB.",
    )


def _fit(image: Image.Image, size: int, channels: int, fit: Fit) -> Image.Image:
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size == (size, size):
        return image
    if fit == "crop":
        return ImageOps.fit(image, (size, size), method=Image.Resampling.BILINEAR)
    if fit == "pad":
        return ImageOps.pad(image, (size, size), method=Image.Resampling.BILINEAR)
    return image.resize((size, size), resample=Image.Resampling.BILINEAR)


@contextmanager
def _strict_pillow() -> Iterator[None]:
    """Pillow's bomb warning is an error here; its remarks on odd metadata say nothing about pixels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def num_threads() -> int:
    """As many as this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
