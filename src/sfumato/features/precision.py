"""bfloat16 where it pays: a processor without such products is many times slower in it than in float32."""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

_LOCK = threading.Lock()
_GLANCE = 256  # of square matrices: where bfloat16 is emulated, one product takes some hundredths of a second
_HOPELESS = 4.0  # times slower at a glance: larger products need not be waited for
_SIZE, _SIZE_ON_ACCELERATOR = 512, 4096  # large enough that starting a product takes no time beside it
_ROUNDS = 7
_WORTHWHILE = 1.1  # times faster, so that chance does not decide between equals


def bfloat16_is_faster(device: torch.device) -> bool:
    """Whether ``device`` multiplies matrices in bfloat16 faster than in float32.

    Measured at the first question about a device, in about a tenth of a second, and then remembered: all that
    one process computes is rounded alike.
    """
    with _LOCK:  # whoever asks meanwhile waits, and does not disturb what is timed
        return _measured(device)


def working_dtype(device: torch.device, *, low_precision: bool) -> torch.dtype:
    """What ``low_precision`` means on ``device``: bfloat16 if it is faster there, else float32."""
    return torch.bfloat16 if low_precision and bfloat16_is_faster(device) else torch.float32


def wants_low_precision(module: nn.Module) -> bool:
    """Whether a part of ``module`` computes in bfloat16 where that is faster."""
    return any(getattr(part, "low_precision", False) for part in module.modules())


@functools.cache
def _measured(device: torch.device) -> bool:
    # In a thread of its own: autocast and modes that count or trace operations are those of the caller's.
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(_compared, device).result()


def _compared(device: torch.device) -> bool:
    try:
        plain, low = _best_seconds(device, _GLANCE, rounds=2)
        if low > _HOPELESS * plain:
            return False
        size = _SIZE if device.type == "cpu" else _SIZE_ON_ACCELERATOR
        plain, low = _best_seconds(device, size, rounds=_ROUNDS)
    except (RuntimeError, TypeError):  # a device that has no bfloat16 at all
        return False
    return _WORTHWHILE * low < plain


def _best_seconds(device: torch.device, size: int, *, rounds: int) -> tuple[float, float]:
    """Of a product in float32 and of one in bfloat16; in turns, so that other programs disturb both."""
    squares = [torch.ones(size, size, device=device, dtype=kind) for kind in (torch.float32, torch.bfloat16)]
    times = [[_seconds(square) for square in squares] for _ in range(rounds)]
    plain, low = (min(column) for column in zip(*times, strict=True))
    return plain, low


def _seconds(square: Tensor) -> float:
    start = time.perf_counter()
    product = square @ square
    float(product[0, 0])  # accelerators answer before they have computed
    return time.perf_counter() - start
