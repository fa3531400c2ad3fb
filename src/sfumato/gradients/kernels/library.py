"""The compiled kernels: found, declared, and called with their arguments checked on both sides.

Built with the package where a C compiler was found. A path is an instruction set; the best that the build and
the processor have is used, or the one that SFUMATO_KERNELS names (``none``: PyTorch everywhere).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from sfumato.errors import ConfigError

VERSION = 4  # of kernels.h: an older library would be called with arguments it does not know
PATHS = {"avx512": 2, "avx2": 1, "neon": 3, "plain": 0}  # best first, as kernels.h numbers them
ENVIRONMENT = "SFUMATO_KERNELS"


class Floats(ctypes.Structure):
    """float32 values and how many there are."""

    _fields_ = (("values", c_void_p), ("count", c_int64))


class Halves(ctypes.Structure):
    """bfloat16 values and how many there are."""

    _fields_ = (("values", c_void_p), ("count", c_int64))


class Doubles(ctypes.Structure):
    """float64 values and how many there are."""

    _fields_ = (("values", c_void_p), ("count", c_int64))


class Integers(ctypes.Structure):
    """int64 values and how many there are."""

    _fields_ = (("values", c_void_p), ("count", c_int64))


class Convolution(ctypes.Structure):
    """Sizes of a convolution, in the order of kernels.h."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("units", "views", "height", "width", "in_height", "in_width", "filters", "channels"),
            *("kernel_height", "kernel_width", "stride_y", "stride_x", "dilation_y", "dilation_x"),
            *("top", "left"),
        )
    )


ARRAYS = {torch.float32: Floats, torch.bfloat16: Halves, torch.float64: Doubles, torch.int64: Integers}
SIGNATURES: dict[str, Sequence[type]] = {  # after the path; all return a status
    "channel_sums": (Floats, Floats, *[c_int64] * 3, Floats, Floats),
    "group_norm_backward": (*[Floats] * 5, *[c_int64] * 4, *[Floats] * 3),
    "filter_moments": (Floats, Floats, *[c_int64] * 5, Doubles),
    "unit_filters": (POINTER(Convolution), *[Floats] * 4, Doubles, Floats),
    "low_group_norm_backward": (Halves, Halves, *[Floats] * 3, *[c_int64] * 4, Halves, Floats, Floats),
    "weighted_sum": (Floats, Floats, c_int64, c_int64, Doubles),
    "low_weighted_sum": (Halves, Floats, c_int64, c_int64, Doubles),
    "low_filters": (POINTER(Convolution), Halves, Halves, Floats, Halves, Doubles, Floats),
    "low_filter_sum": (POINTER(Convolution), Halves, Halves, Floats, Doubles),
    "head_sums": (
        *(Floats, Integers, Integers, Doubles, Floats, Floats, c_double),
        *[c_int64] * 3,
        *(Doubles, Doubles, Doubles, Floats),
    ),
}
FAILURES = {
    1: "an array is missing",
    2: "an array is not aligned",
    3: "a size is negative or too large, or does not fit the arrays",
    4: "an index, a target or the bound is out of range",
    5: "there is not enough memory",
    6: "this path does not have it",
}


@dataclass(frozen=True)
class Kernels:
    """The compiled functions by one path; it has ``unit_filters`` and ``head_sums`` unless ``lanes`` is 0."""

    library: ctypes.CDLL
    path: str
    lanes: int

    def call(self, name: str, *arguments: Tensor | Convolution | int | float) -> None:
        """Call a function; tensors are passed as pointers with their sizes, and live longer than the call.

        Raises ``ctypes.ArgumentError`` for a tensor of another type than declared, and ``ValueError`` for
        what the function refuses; it has then written nothing.
        """
        passed = (array(value) if isinstance(value, Tensor) else value for value in arguments)
        status = getattr(self.library, name)(PATHS[self.path], *passed)
        if status:
            raise ValueError(f"{name} on {self.path}: {FAILURES.get(status, f'status {status}')}")


def array(tensor: Tensor) -> ctypes.Structure:
    """A tensor's memory as C sees it: from the first value to the last, gaps between them included."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return ARRAYS[tensor.dtype](tensor.data_ptr(), count)


@cache
def available() -> dict[str, Kernels]:
    """The kernels by every path that the build and the processor have, the best first."""
    return open_kernels(Path(__file__).with_name("_fused"), "kernels", VERSION, SIGNATURES)


@cache
def compiled() -> Kernels | None:
    """The kernels in use: those of the best path, or of the one that SFUMATO_KERNELS names."""
    by_path, wanted = available(), os.environ.get(ENVIRONMENT, "auto")
    if wanted == "none":
        return None
    if wanted == "auto":
        return next(iter(by_path.values()), None)
    if wanted not in by_path:
        raise ConfigError(
            "no-kernels",
            f"{ENVIRONMENT}={wanted}: this build on this processor does not have it",
            fix=f"Use one of {', '.join(['auto', *by_path, 'none'])}, or unset it.",
        )
    return by_path[wanted]


def kernels_for(*tensors: Tensor) -> Kernels | None:
    """The kernels in use, if they can work on these tensors: float32 on a CPU."""
    if all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors):
        return compiled()
    return None


def low_kernels_for(*tensors: Tensor) -> Kernels | None:
    """The same for images in bfloat16 on a CPU; what goes with them may be float32."""
    kinds = (torch.bfloat16, torch.float32)
    if all(tensor.device.type == "cpu" and tensor.dtype in kinds for tensor in tensors):
        return compiled()
    return None


def multiplies_pairs(kernels: Kernels) -> bool:
    """Whether this path, on this processor, multiplies pairs of bfloat16."""
    return bool(kernels.library.kernels_pairs(PATHS[kernels.path]))


def open_kernels(
    place: Path, prefix: str, version: int, signatures: Mapping[str, Sequence[type]]
) -> dict[str, Kernels]:
    """The functions of a library beside this package, by each path that is there; none where it is not.

    ``place`` lacks the ending of a compiled extension. Not a Python module: it neither needs nor touches
    Python. It tells its version and its paths by ``<prefix>_version`` and ``<prefix>_lanes``.
    """
    places = [place.with_name(place.name + suffix) for suffix in EXTENSION_SUFFIXES]
    found = next((each for each in places if each.is_file()), None)
    if found is None:
        return {}
    try:
        library = ctypes.CDLL(str(found))
        asked, lanes_of = getattr(library, f"{prefix}_version"), getattr(library, f"{prefix}_lanes")
        asked.argtypes, asked.restype = [], c_int32
        lanes_of.argtypes, lanes_of.restype = [c_int32], c_int32
        if asked() != version:
            return {}
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = [c_int32, *arguments], c_int32
    except (OSError, AttributeError):  # built elsewhere, or from an older source
        return {}
    lanes = {path: lanes_of(number) for path, number in PATHS.items()}
    return {path: Kernels(library, path, lanes[path]) for path in PATHS if lanes[path] >= 0}
