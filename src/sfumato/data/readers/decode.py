"""Image files to uint8 arrays of one size, with Pillow or pydicom, on all cores."""

from __future__ import annotations

import os
import re
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import Literal, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sfumato.data.fingerprint import pixel_id
from sfumato.data.readers import dicom
from sfumato.data.readers.header import (
    MAX_PIXELS,
    Header,
    Upload,
    check_frame,
    corrupt,
    missing_file,
    refuse_volume,
    too_large,
    unsupported,
)
from sfumato.data.readers.rendering import AS_THE_FILES_SAY, Rendering, identity
from sfumato.errors import DataError
from sfumato.files import check_plain

Fit = Literal["crop", "pad", "stretch"]
OnProgress = Callable[[int, int], None]
File = TypeVar("File", bound=Path | Upload)
Result = TypeVar("Result")

# Only these are ever tried: Pillow's other readers (EPS runs Ghostscript) have no place in training data.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp")
_GREY_MODES = frozenset(("1", "L", "LA", "I", "I;16", "I;16L", "I;16B", "I;16N"))
_CHUNK_BYTES = 8 * 2**20  # decoded pixels of one task
_TASKS_AHEAD = 3  # for each thread
_AT_ONCE = 32  # files of one task: one by one, handing them out takes longer than reading a header


def is_image(path: str | Path) -> bool:
    """By its ending; or, for DICOM files, which often have none, by their first bytes."""
    return _ending(path) in EXTENSIONS or is_dicom(path)


def is_dicom(path: str | Path | Upload) -> bool:
    """By its ending; or by its first bytes, if the ending is not that of another format."""
    ending = "" if isinstance(path, Upload) else _ending(path)
    return ending in dicom.ENDINGS or (ending not in EXTENSIONS and dicom.has_magic(path))


def _ending(path: str | Path) -> str:
    return os.path.splitext(path)[1].lower()


def read_headers(
    paths: Sequence[Path | Upload],
    rendering: Rendering = AS_THE_FILES_SAY,
    on_progress: OnProgress | None = None,
) -> list[Header]:
    """Headers of all files; a file that is no image, or too large to decode, is named and refused."""
    headers: list[Header] = []
    with _strict_readers(), ThreadPoolExecutor(num_threads()) as pool:
        for part in in_order(pool, lambda path: _read_header(path, rendering), paths):
            headers += part
            if on_progress is not None:
                on_progress(len(headers), len(paths))
    return headers


def read_patients(paths: Sequence[Path], on_progress: OnProgress | None = None) -> list[str]:
    """The PatientID of each DICOM file, sensitive; the empty text where there is none."""
    patients: list[str] = []
    with _strict_readers(), ThreadPoolExecutor(num_threads()) as pool:
        for part in in_order(pool, dicom.read_patient, paths):
            patients += part
            if on_progress is not None:
                on_progress(len(patients), len(paths))
    return patients


def in_order(
    pool: ThreadPoolExecutor,
    work: Callable[[File], Result],
    paths: Sequence[File],
    *,
    at_once: int = _AT_ONCE,
) -> Iterator[list[Result]]:
    """``work`` for all files, in their order, ``at_once`` to a task; few tasks are ahead of what is used."""
    waiting: deque[Future[list[Result]]] = deque()

    def some(start: int) -> list[Result]:
        return [work(path) for path in paths[start : start + at_once]]

    try:
        for start in range(0, len(paths), at_once):
            waiting.append(pool.submit(some, start))
            if len(waiting) > _TASKS_AHEAD * num_threads():
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def decode_files(
    paths: Sequence[Path | Upload],
    *,
    image_size: int,
    channels: int,
    fit: Fit,
    rendering: Rendering = AS_THE_FILES_SAY,
    on_progress: OnProgress | None = None,
    start: int = 0,
) -> Generator[tuple[np.ndarray, np.ndarray], None, None]:
    """Chunks of (images uint8 (n, C, S, S), content ids int64 (n,)) of the files from ``start`` on, in order.

    A corrupt or truncated file is named and refused; nothing is skipped. Chunks are small, and few of them
    are decoded ahead of what is used.
    """

    def one(path: Path | Upload) -> tuple[np.ndarray, int]:
        image, identified_by = _decode(path, rendering)
        pixels = np.asarray(_fit(image, image_size, channels, fit))
        return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1), pixel_id(identified_by)

    at_once = max(1, min(_AT_ONCE, _CHUNK_BYTES // (channels * image_size**2)))
    done = start
    with _strict_readers(), ThreadPoolExecutor(num_threads()) as pool:
        for decoded in in_order(pool, one, paths[start:], at_once=at_once):
            images = np.empty((len(decoded), channels, image_size, image_size), dtype=np.uint8)
            ids = np.empty(len(decoded), dtype=np.int64)
            for row, (pixels, content_id) in enumerate(decoded):
                images[row], ids[row] = pixels, content_id
            done += len(decoded)
            if on_progress is not None:
                on_progress(done, len(paths))
            yield images, ids


def decode_image(
    path: Path | Upload,
    *,
    image_size: int,
    channels: int,
    fit: Fit = "crop",
    rendering: Rendering = AS_THE_FILES_SAY,
) -> np.ndarray:
    """One file, on the disk or in memory, as uint8 (C, S, S), exactly as ``load_data`` would decode it."""
    read_headers([path], rendering)
    chunks = decode_files([path], image_size=image_size, channels=channels, fit=fit, rendering=rendering)
    return next(chunks)[0][0]


def _read_header(path: Path | Upload, rendering: Rendering) -> Header:
    if is_dicom(path):
        return dicom.read_header(path, rendering)
    with _opened(path) as image:
        width, height = image.size
        check_frame(path, getattr(image, "n_frames", 1), rendering.frame)
        return Header(width, height, image.mode in _GREY_MODES, 16 if image.mode.startswith("I") else 8)


@contextmanager
def _opened(path: Path | Upload) -> Iterator[Image.Image]:
    """The file, opened lazily; every way in which it can be bad becomes one coded error."""
    try:
        if isinstance(path, Path):
            check_plain(path)
        refuse_volume(path)
        with Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError(f"({image.width * image.height} pixels)")
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise too_large(path, _claimed_pixels(error)) from error
    except UnidentifiedImageError as error:
        raise corrupt(path, f"is not an image in any of {', '.join(FORMATS)}, nor DICOM") from error
    except FileNotFoundError as error:
        raise missing_file(path) from error
    except DataError:
        raise
    except Exception as error:  # Pillow's readers answer bad bytes with almost any error
        raise corrupt(path, str(error) or type(error).__name__) from error


def _claimed_pixels(error: Exception) -> str:
    """The number that Pillow's message gives in brackets."""
    match = re.search(r"\((\d+) pixels\)", str(error))
    return f"{int(match[1]):,}" if match else "too many"


def _decode(path: Path | Upload, rendering: Rendering) -> tuple[Image.Image, np.ndarray]:
    """The whole picture upright, as mode L or RGB with 8 bits; and the pixels that its content id is made of.

    These do not depend on ``rendering``: the same image remains the same in the ledger.
    """
    if is_dicom(path):
        return dicom.decode(path, rendering)
    with _opened(path) as image:
        image.seek(check_frame(path, getattr(image, "n_frames", 1), rendering.frame))
        image.load()
        upright = ImageOps.exif_transpose(image)
        if not upright.mode.startswith("I"):
            picture = _eight_bit(upright, path)
            return picture, np.asarray(picture)
        values = np.asarray(upright).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise unsupported(path, "32-bit integers")
        picture = Image.fromarray(rendering.sixteen_to_eight(values, path))
        return picture, identity(values.astype(np.uint16))


def _eight_bit(image: Image.Image, path: Path | Upload) -> Image.Image:
    mode = image.mode
    if mode in ("L", "RGB"):
        return image
    if mode == "1":
        return image.convert("L")
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
        raise unsupported(path, f"mode {mode}")
    return image


def _fit(image: Image.Image, size: int, channels: int, fit: Fit) -> Image.Image:
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size == (size, size):
        return image
    if fit == "crop":
        return ImageOps.fit(image, (size, size), method=Image.Resampling.BILINEAR)
    if fit == "pad":
        return ImageOps.pad(image, (size, size), method=Image.Resampling.BILINEAR)
    return image.resize((size, size), resample=Image.Resampling.BILINEAR)


class _Shared:
    """A context that several threads may be in: the first one enters it, the last one leaves it."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        self.context, self.lock, self.inside, self.stack = context, Lock(), 0, ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            if self.inside == 0:
                self.stack.enter_context(self.context())
            self.inside += 1
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if self.inside == 0:
                    self.stack.close()


@contextmanager
def _strict_filters() -> Iterator[None]:
    """Pillow's bomb warning is an error here; its remarks on odd metadata say nothing about pixels.

    Of pydicom's warnings none is heard: they quote headers, as its log does, see ``dicom.silence``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


_strict_readers = _Shared(_strict_filters)  # filters of warnings belong to the process, not to one reader


def num_threads() -> int:
    """As many as this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
