"""Ctrl-C and SIGTERM between steps: the step is finished and saved first, the second signal stops at once."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interruption:
    """Whether the user or the system asked the run to stop."""

    requested: bool = False

    def raise_if_requested(self) -> None:
        if self.requested:
            raise KeyboardInterrupt


@contextlib.contextmanager
def deferred_interrupts(*, echo_seconds: float = 0.0) -> Iterator[Interruption]:
    """Within the block the first SIGINT or SIGTERM only sets ``requested``.

    A half-applied update must not be saved, so the signal waits until the step is whole. Signals within
    ``echo_seconds`` after the first are the same one, handed on by whoever started this process.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # only the main thread may handle signals
        return

    first = math.inf  # when it came

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal first
        if time.monotonic() - first >= echo_seconds:
            raise KeyboardInterrupt
        first = min(first, time.monotonic())
        interruption.requested = True

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield interruption
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
