"""Ctrl-C and SIGTERM between steps: the step is finished and saved first, the second signal stops at once."""

from __future__ import annotations

import contextlib
import signal
import threading
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
def deferred_interrupts() -> Iterator[Interruption]:
    """Within the block the first SIGINT or SIGTERM only sets ``requested``.

    A half-applied update must not be saved, so the signal waits until the step is whole.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # only the main thread may handle signals
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        if interruption.requested:
            raise KeyboardInterrupt
        interruption.requested = True

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield interruption
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
