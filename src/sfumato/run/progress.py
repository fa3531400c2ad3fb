"""Who is told of what takes long before or between the steps."""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol

from sfumato.data.readers.listing import OnListing
from sfumato.features.cache import OnProgress

_PATIENCE_SECONDS = 2.0


class ProgressObserver(Protocol):
    """Is told of what takes long before or between the steps."""

    def noted(self, text: str) -> None:
        """A sentence for the user."""

    def computed(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` images are computed; ``what`` names the result. Total 0: not known yet."""


def reading_counter(observer: ProgressObserver | None) -> OnProgress:
    """Tells ``observer`` how many files are read, if that takes long enough to wonder."""
    began = time.monotonic()

    def count(done: int, total: int) -> None:
        if observer is not None and time.monotonic() - began > _PATIENCE_SECONDS:
            observer.computed("reading images", done, total)

    return count


def listing_counter(observer: ProgressObserver | None) -> OnListing:
    """Tells ``observer`` how many files are found, if listing them takes long enough to wonder."""
    began = time.monotonic()

    def count(found: int) -> None:
        if observer is not None and time.monotonic() - began > _PATIENCE_SECONDS:
            observer.computed("listing files", found, 0)

    return count


def features_counter(observer: ProgressObserver | None, split: str) -> OnProgress | None:
    """Tells ``observer`` how many of the split's images have their features."""
    return None if observer is None else partial(observer.computed, f"features of {split} images")
