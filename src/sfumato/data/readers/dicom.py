"""DICOM files: the picture and, where it is asked for, the patient. Nothing else of a header is kept or told.

Headers name people. So only the elements in ``_PICTURE`` are read for a picture, and only the PatientID for a
unit; pydicom's warnings and messages, which quote values, are not shown; and errors name the file alone.
"""

from __future__ import annotations

import io
import logging
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image

from sfumato.data.readers.header import (
    MAX_PIXELS,
    Header,
    Upload,
    check_frame,
    check_pixels,
    corrupt,
    missing_file,
    too_large,
    unsupported,
)
from sfumato.data.readers.rendering import Rendering, identity, to_bytes, window_limits
from sfumato.errors import ConfigError, DataError
from sfumato.files import check_plain

if TYPE_CHECKING:
    from pydicom import Dataset

ENDINGS = (".dcm", ".dicom")
_MAGIC = 128  # bytes before the letters DICM
_INFLATED_BYTES = 8 * MAX_PIXELS  # of a deflated file: 16 bits in four times the pixels that are decoded
_DEFLATED = "1.2.840.10008.1.2.1.99"
_PICTURE = [
    *("Rows", "Columns", "NumberOfFrames", "SamplesPerPixel", "PhotometricInterpretation"),
    *("PlanarConfiguration", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
    *("WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence"),
    *("RedPaletteColorLookupTableDescriptor", "RedPaletteColorLookupTableData"),
    *("GreenPaletteColorLookupTableDescriptor", "GreenPaletteColorLookupTableData"),
    *("BluePaletteColorLookupTableDescriptor", "BluePaletteColorLookupTableData"),
    *("ExtendedOffsetTable", "ExtendedOffsetTableLengths"),
]
_PIXELS = ["PixelData", "FloatPixelData", "DoubleFloatPixelData"]
_LOGGERS = ("pydicom", "pylibjpeg", "openjpeg")
Result = TypeVar("Result")


def has_magic(path: str | Path | Upload) -> bool:
    """Whether the file begins as DICOM files do, whatever it is called."""
    if isinstance(path, Upload):
        return bytes(path.getbuffer()[_MAGIC : _MAGIC + 4]) == b"DICM"
    try:
        check_plain(Path(path))
        with open(path, "rb") as file:
            return file.read(_MAGIC + 4)[_MAGIC:] == b"DICM"
    except (OSError, ValueError):
        return False


def read_header(path: Path | Upload, rendering: Rendering) -> Header:
    """Size and depth; several frames, an unknown compression and a file without a picture are refused."""

    def read() -> Header:
        dataset = _dataset(path, _PICTURE)
        _check_decodable(path, dataset)
        header = Header(
            width=int(dataset.Columns),
            height=int(dataset.Rows),
            grey=str(dataset.PhotometricInterpretation).startswith("MONOCHROME"),
            bits=int(dataset.BitsStored),
        )
        check_pixels(path, header.width * header.height)
        check_frame(path, int(dataset.get("NumberOfFrames") or 1), rendering.frame)
        return header

    return _named_only(path, read)


def decode(path: Path | Upload, rendering: Rendering) -> tuple[Image.Image, np.ndarray]:
    """The picture with 8 bits, mode L or RGB; and what tells it from others, see ``rendering.identity``."""
    from pydicom.pixels import pixel_array

    def read() -> tuple[Image.Image, np.ndarray]:
        dataset = _dataset(path, [*_PICTURE, *_PIXELS], with_pixels=True)
        _check_decodable(path, dataset)
        check_pixels(path, int(dataset.Rows) * int(dataset.Columns))
        frame = check_frame(path, int(dataset.get("NumberOfFrames") or 1), rendering.frame)
        stored = pixel_array(dataset, index=frame)
        if stored.shape[:2] != (dataset.Rows, dataset.Columns) or stored.size == 0:
            raise ValueError
        if not np.issubdtype(stored.dtype, np.integer) or stored.dtype.itemsize > 2:
            raise unsupported(path, f"values of type {stored.dtype}")
        if stored.ndim == 3 or str(dataset.PhotometricInterpretation) == "PALETTE COLOR":
            pixels = _colour(path, stored, dataset)
            return Image.fromarray(pixels), pixels
        if int(dataset.BitsStored) <= 8 and not dataset.PixelRepresentation:
            stored = stored.astype(np.uint8)  # 8 bits, also where 16 were allocated
        return Image.fromarray(_grey(path, stored, dataset, rendering)), identity(stored)

    return _named_only(path, read)


def read_patient(path: Path) -> str:
    """The PatientID, sensitive; the empty text if there is none."""

    def read() -> str:
        value = _dataset(path, ["PatientID"]).get("PatientID")
        parts = value if isinstance(value, list | tuple) else [value]
        return "\\".join(str(part) for part in parts if part is not None).strip()

    return _named_only(path, read)


@cache
def silence() -> None:
    """pydicom, which must be imported by now, and its decoders log nothing any more: they quote headers.

    Not by ``disabled``, which leaves the loggers below ("pydicom.pixels.decoders.base") as they are; a level
    is inherited by them.
    """
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.CRITICAL + 1)  # whoever has a handler there hears nothing either
        logger.propagate = False
        logger.addHandler(logging.NullHandler())  # without any, the last resort is standard error


def require_pydicom(path: object) -> None:
    """Refuse DICOM files where pydicom is not installed."""
    try:
        import pydicom  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "medical-not-installed",
            f"{path}: is a DICOM file, and the package pydicom is not installed.",
            fix="pip install 'sfumato[medical]'",
        ) from error


def _named_only(path: Path | Upload, read: Callable[[], Result]) -> Result:
    """What ``read`` gives; whatever goes wrong is told as the file's name, never with pydicom's words."""
    require_pydicom(path)
    silence()
    try:
        if isinstance(path, Path):
            check_plain(path)
        return read()
    except FileNotFoundError:
        problem = missing_file(path)
    except DataError:
        raise
    except Exception as error:
        problem = corrupt(path, f"cannot be read as DICOM ({type(error).__name__})")
    raise problem  # outside of the handler: the error that quotes the header must not hang on to this one


def _dataset(path: Path | Upload, wanted: list[str], *, with_pixels: bool = False) -> Dataset:
    """The ``wanted`` elements and no others; what would fill the memory is refused before it is read."""
    from pydicom import dcmread
    from pydicom.filereader import read_dataset

    with path.open("rb") if isinstance(path, Path) else io.BytesIO(path.getvalue()) as file:
        file.seek(_MAGIC + 4)
        meta = read_dataset(file, False, True, stop_when=lambda tag, vr, length: tag >> 16 != 2)
        if str(meta.get("TransferSyntaxUID")) == _DEFLATED:
            _check_inflated(path, file)
        file.seek(0)
        tags: list[Any] = [*wanted]
        return dcmread(file, stop_before_pixels=not with_pixels, specific_tags=tags)


def _check_inflated(path: Path | Upload, file: IO[bytes]) -> None:
    """Refuse a deflated file that would fill the memory, before it does; ``file`` stands where it begins."""
    inflate, size = zlib.decompressobj(-zlib.MAX_WBITS), 0
    while block := file.read(2**16):
        while block:
            size += len(inflate.decompress(block, 2**20))
            block = inflate.unconsumed_tail
            if size > _INFLATED_BYTES:
                raise too_large(path, "too many")


def _check_decodable(path: Path | Upload, dataset: Dataset) -> None:
    """Refuse a compression that nothing here can undo, and a file that is no picture."""
    from pydicom.pixels import get_decoder

    if "Rows" not in dataset or "PhotometricInterpretation" not in dataset:
        raise DataError(
            "dicom-without-picture",
            f"{path}: is a DICOM file without a picture.",
            why="Reports, plans and lists are stored as DICOM too. Nothing is skipped silently.",
            fix="Remove it from the folder of images, or leave it out of the manifest.",
        )
    syntax = dataset.file_meta.TransferSyntaxUID
    try:
        known = not syntax.is_encapsulated or get_decoder(syntax).is_available
    except (NotImplementedError, ValueError):  # no such compression, or no public syntax at all
        known = False
    if not known:
        named = f" as {syntax.name}" if syntax.name != str(syntax) else ""
        raise DataError(
            "dicom-compression",
            f"{path}: its pixels are compressed{named}, and no decoder for that is installed.",
            why="Each compression of DICOM needs its decoder.",
            fix="pip install 'sfumato[medical]', or save the files uncompressed.",
        )


def _colour(path: Path | Upload, stored: np.ndarray, dataset: Dataset) -> np.ndarray:
    """uint8 (H, W, 3)."""
    from pydicom.pixels import apply_color_lut

    if str(dataset.PhotometricInterpretation) == "PALETTE COLOR":
        coloured = apply_color_lut(stored, dataset)
        return np.ascontiguousarray(coloured >> 8 if coloured.dtype == np.uint16 else coloured).astype(
            np.uint8
        )
    if stored.dtype != np.uint8 or stored.shape[2] != 3:
        raise unsupported(path, f"colours of {stored.dtype} in {stored.shape[2]} samples")
    return np.ascontiguousarray(stored)


def _grey(path: Path | Upload, stored: np.ndarray, dataset: Dataset, rendering: Rendering) -> np.ndarray:
    """uint8 (H, W): modality values, then the window, then inverted if the header says so."""
    from pydicom.pixels import apply_modality_lut, apply_voi

    values = apply_modality_lut(stored, dataset).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError
    if rendering.limits is not None:
        shown = to_bytes(values, *rendering.limits)
    elif dataset.get("WindowCenter") is not None and dataset.get("WindowWidth") is not None:
        shown = _windowed(path, values, dataset)
    elif dataset.get("VOILUTSequence"):
        bits = int(dataset.VOILUTSequence[0].LUTDescriptor[2])
        shown = to_bytes(apply_voi(values.astype(np.int64), dataset), 0, 2**bits - 1)
    else:
        shown = to_bytes(values, *_full_range(dataset))
    return 255 - shown if str(dataset.PhotometricInterpretation) == "MONOCHROME1" else shown


def _windowed(path: Path | Upload, values: np.ndarray, dataset: Dataset) -> np.ndarray:
    """The first window of the header, by the function that it names (PS3.3, C.11.2.1.2 and C.11.2.1.3)."""
    center, width = (float(np.atleast_1d(dataset[name].value)[0]) for name in ("WindowCenter", "WindowWidth"))
    function = str(dataset.get("VOILUTFunction") or "LINEAR").upper()
    known = function in ("LINEAR", "LINEAR_EXACT", "SIGMOID")
    if not known or not np.isfinite([center, width]).all() or width < (1 if function == "LINEAR" else 1e-9):
        raise DataError(
            "bad-window",
            f"{path}: the window in its header cannot be used.",
            why="A window has a finite centre, a positive width, and a function that the standard knows.",
            fix="Give a window for all images: --window CENTER,WIDTH.",
        )
    if function == "SIGMOID":
        scaled = np.clip(-4 * (values - center) / width, -700, 700)
        return (255 / (1 + np.exp(scaled))).astype(np.uint8)
    exact = function == "LINEAR_EXACT"
    return to_bytes(
        values, *((center - width / 2, center + width / 2) if exact else window_limits(center, width))
    )


def _full_range(dataset: Dataset) -> tuple[float, float]:
    """What the stored bits can hold, as modality values: a constant of the format, not of the pixels."""
    if dataset.get("ModalityLUTSequence"):
        return 0.0, 2.0 ** int(dataset.ModalityLUTSequence[0].LUTDescriptor[2]) - 1
    bits, signed = int(dataset.BitsStored), bool(dataset.PixelRepresentation)
    ends = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if signed else (0.0, 2.0**bits - 1)
    slope, intercept = (float(dataset.get(name) or 0.0) for name in ("RescaleSlope", "RescaleIntercept"))
    if dataset.get("RescaleSlope") is None or dataset.get("RescaleIntercept") is None:
        return ends
    low, high = sorted(slope * end + intercept for end in ends)
    return low, high
