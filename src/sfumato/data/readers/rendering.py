"""From values of more than 8 bits to the 8 of a picture, by public constants, the same for all images.

A range that was measured on the images would be a statistic of private data; none is ever measured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from sfumato.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """How deep grey values become 8 bits, and which frame is the picture. All of it is public.

    ``window`` (centre, width) and ``range`` (lowest, highest) hold for 16-bit files and for all grey DICOM
    files, in place of their own windows; values outside become black or white. ``bits`` says that 16-bit
    files hold fewer, as those of most scanners do, and more is then refused; DICOM files say theirs
    themselves. At most one of the three.
    """

    window: tuple[float, ...] | None = None
    range: tuple[float, ...] | None = None
    bits: int | None = None
    frame: int | None = None  # of files with several, counted from 0; None: such files are refused

    def __post_init__(self) -> None:
        given = [name for name in ("window", "range", "bits") if getattr(self, name) is not None]
        if len(given) > 1:
            raise _bad(f"data.{' and data.'.join(given)} are given together", "Keep one of them.")
        for name in ("window", "range"):
            pair = getattr(self, name)
            if pair is not None and (len(pair) != 2 or not all(isfinite(value) for value in pair)):
                raise _bad(f"data.{name} is {list(pair)}", "Give two finite numbers.")
        if self.window is not None and self.window[1] < 1:
            raise _bad(f"the width in data.window is {self.window[1]:g}", "It must be 1 or more.")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise _bad(f"data.range is {list(self.range)}", "Give the lowest value first, then the highest.")
        if self.bits is not None and not 9 <= self.bits <= 16:
            raise _bad(f"data.bits is {self.bits}", "Give 9 to 16; files of 8 bits need no setting.")
        if self.frame is not None and self.frame < 0:
            raise _bad(f"data.frame is {self.frame}", "Count frames from 0.")

    @property
    def limits(self) -> tuple[float, float] | None:
        """The values that become black and white in all files; None where each file's format says it."""
        if self.window is not None:
            return window_limits(*self.window)
        return None if self.range is None else (self.range[0], self.range[1])

    @property
    def described(self) -> str:
        """All of it as text: part of the name under which decoded images are kept."""
        return f"{self.window} {self.range} {self.bits} {self.frame}"

    def sixteen_to_eight(self, values: np.ndarray, path: object) -> np.ndarray:
        """The values of a 16-bit file that is no DICOM file, as uint8."""
        bits = self.bits or 16
        if int(values.max()) >= 2**bits:
            raise DataError(
                "value-above-bits",
                f"{path}: holds values that do not fit into data.bits = {bits}.",
                why="They would all become white.",
                fix="Give more bits, or data.range, outside of which values are cut.",
            )
        return to_bytes(values, *(self.limits or (0.0, 2.0**bits - 1)))


AS_THE_FILES_SAY = Rendering()


def window_limits(center: float, width: float) -> tuple[float, float]:
    """The values of a DICOM window (PS3.3, C.11.2.1.2.1, LINEAR) that become black and white."""
    middle, half = center - 0.5, (width - 1) / 2
    return middle - half, middle + half


def to_bytes(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """``values`` with ``low`` as 0 and ``high`` as 255, cut off outside, rounded down."""
    span = max(high - low, 1e-9)  # a window of width 1 is a threshold
    return np.clip((values.astype(np.float64) - low) * 255.0 / span, 0, 255).astype(np.uint8)


def identity(stored: np.ndarray) -> np.ndarray:
    """uint8 pixels that tell an image from others whatever its rendering: what its content id is made of.

    A run with another window is about the same people: were the id made of the picture, it would be a new
    one, and the ledger would forget what was spent.
    """
    if stored.dtype == np.uint8:
        return stored
    values = stored.astype(np.int64)
    if np.issubdtype(stored.dtype, np.signedinteger):
        values += 2**15
    elif values.max() > 4095:  # 16 bits in use: earlier versions divided so, and ledgers know them by it
        return (values // 257).astype(np.uint8)
    # Of 12 bits that division leaves 16 shades: different dark images would be one, and a DICOM file would
    # not be known again in its PNG copy. So these have other ids than before; the changelog says so.
    return np.stack([values >> 8, values & 255], axis=-1).astype(np.uint8)


def _bad(what: str, fix: str) -> ConfigError:
    return ConfigError("bad-rendering", f"{what}.", fix=fix)
