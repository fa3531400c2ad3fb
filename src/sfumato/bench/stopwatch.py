"""Where the time of a private step goes: the parts of ``training.fit`` tell a stopwatch when they begin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.data.pixels import Pixels
from sfumato.gradients import ClippedSum
from sfumato.randomness import UnitRandomness
from sfumato.training.averaging import WeightAverage
from sfumato.training.gradient_sums import GradientSum
from sfumato.training.inputs import Inputs, Microbatch, Units

PARTS = ("sampling", "reading", "augmentation", "gradient", "noise", "ledger", "optimizer", "average")


@dataclass(frozen=True)
class Seconds:
    """By the clock, and of the processor, which other programs do not change."""

    clock: float = 0.0
    processor: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.clock + other.clock, self.processor + other.processor)

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.clock - other.clock, self.processor - other.processor)

    def over(self, count: int) -> Seconds:
        """The share of each of ``count``."""
        return Seconds(self.clock / count, self.processor / count)

    @classmethod
    def now(cls) -> Seconds:
        return cls(time.perf_counter(), time.process_time())


@dataclass
class Stopwatch:
    """At any moment one part of the step is under way; ``turn`` says which from now on."""

    spent: dict[str, Seconds] = field(default_factory=dict)
    part: str = ""
    since: Seconds = field(default_factory=Seconds.now)
    thread: int = field(default_factory=threading.get_ident)
    images: int = 0  # of the step under way

    def turn(self, part: str) -> None:
        """The part that was under way has ended; ``part`` begins."""
        moment = Seconds.now()
        self.spent[self.part] = self.spent.get(self.part, Seconds()) + (moment - self.since)
        self.part, self.since = part, moment

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """``part`` for a while; not in other threads, whose work goes on beside the step."""
        if threading.get_ident() != self.thread:
            yield
            return
        outer = self.part
        self.turn(part)
        try:
            yield
        finally:
            self.turn(outer)

    def take(self) -> dict[str, Seconds]:
        """What each part has taken since it was asked last; begins anew."""
        self.turn(self.part)
        spent, self.spent = self.spent, {}
        return spent


@dataclass(frozen=True, eq=False)
class WatchedPixels:
    """Images whose reading is timed."""

    images: Pixels
    watch: Stopwatch

    @property
    def shape(self) -> torch.Size:
        return self.images.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.images.dtype

    @property
    def ndim(self) -> int:
        return self.images.ndim

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: Any, /) -> Tensor:
        with self.watch.during("reading"):
            return self.images[rows]


@dataclass(frozen=True)
class WatchedInputs:
    """Inputs whose views are timed."""

    inputs: Inputs
    watch: Stopwatch

    @property
    def mean(self) -> tuple[float, ...]:
        return self.inputs.mean

    @property
    def std(self) -> tuple[float, ...]:
        return self.inputs.std

    @property
    def rows_per_image(self) -> int:
        return self.inputs.rows_per_image

    def microbatches(
        self,
        units: Units,
        indices: Tensor,
        *,
        max_rows: int,
        randomness: UnitRandomness,
        device: torch.device,
    ) -> Iterator[Microbatch]:
        made = iter(
            self.inputs.microbatches(
                units, indices, max_rows=max_rows, randomness=randomness, device=device
            )
        )  # fmt: skip
        while True:
            with self.watch.during("augmentation"):
                part = next(made, None)
            if part is None:
                return
            yield part


@dataclass(frozen=True)
class WatchedSum:
    """A sum before which ``fit`` samples, and behind which it draws its noise."""

    inner: GradientSum
    watch: Stopwatch

    @property
    def num_units(self) -> int:
        return self.inner.num_units

    def __call__(self, indices: Tensor, step: int) -> ClippedSum:
        self.watch.turn("gradient")
        self.watch.images = len(indices)
        total = self.inner(indices, step)
        self.watch.turn("noise")
        return total


@dataclass
class WatchedAverage(WeightAverage):
    """An average that is timed; ``fit`` samples next."""

    watch: Stopwatch = field(default_factory=Stopwatch)

    @classmethod
    def of(cls, average: WeightAverage, watch: Stopwatch) -> WatchedAverage:
        return cls(**vars(average), watch=watch)

    def update(self, model: nn.Module) -> None:
        self.watch.turn("average")
        super().update(model)
        self.watch.turn("sampling")


def watched_spending(spend: Callable[[int], None], watch: Stopwatch) -> Callable[[int], None]:
    """A ledger that is timed; ``fit`` updates the weights next."""

    def timed(step: int) -> None:
        watch.turn("ledger")
        spend(step)
        watch.turn("optimizer")

    return timed
