"""Which units a step uses, drawn exactly as the accountant assumes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import ConfigError
from sfumato.randomness import RandomSource

if TYPE_CHECKING or "jaxtyping" in sys.modules:  # in the tests, which check shapes; no dependency otherwise
    from jaxtyping import Int64

__all__ = ["FullBatch", "PoissonSampling"]


@dataclass(frozen=True, kw_only=True)
class PoissonSampling:
    """Each step takes each unit independently with probability ``sampling_rate``.
    Guarantee: the probability is exact to 2^-64 and never above ``sampling_rate``; steps and units are
    independent. The size of a batch is random and may be 0: an empty batch is an ordinary step, whose
    result is noise alone.
    """

    sampling_rate: float
    num_steps: int

    def __post_init__(self) -> None:
        if not 0 < self.sampling_rate <= 1:
            raise ConfigError(
                "sampling-rate-out-of-range",
                f"sampling_rate is {self.sampling_rate}, but it is a probability above 0 and at most 1.",
                fix="Give a batch size between 1 and the number of units.",
            )
        _check_num_steps(self.num_steps)

    def batches(
        self, num_units: int, source: RandomSource, start_step: int = 0
    ) -> Iterator[Int64[Tensor, "chosen"]]:
        """Indices of the units of each step from ``start_step`` on, ascending, int64."""
        for step in range(start_step, self.num_steps):
            yield self.batch(num_units, source, step)

    def batch(self, num_units: int, source: RandomSource, step: int) -> Int64[Tensor, "chosen"]:
        """Indices of the units of one step."""
        if self.sampling_rate == 1:
            return torch.arange(num_units)
        words = source.random_bytes(8 * num_units, purpose="sampling", step=step).view(np.uint64)
        # q·2^64 is exact in float64; rounded down, so that a unit is never taken more often than accounted
        threshold = np.uint64(int(self.sampling_rate * 2.0**64))
        return torch.from_numpy(np.flatnonzero(words < threshold))


@dataclass(frozen=True, kw_only=True)
class FullBatch:
    """Each step takes every unit: no amplification by sampling, and exact Gaussian accounting."""

    num_steps: int
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        if self.sampling_rate != 1:
            raise ConfigError(
                "sampling-rate-out-of-range",
                f"a full batch has sampling_rate 1, not {self.sampling_rate}.",
                fix="Use PoissonSampling for smaller batches.",
            )
        _check_num_steps(self.num_steps)

    def batches(
        self, num_units: int, source: RandomSource, start_step: int = 0
    ) -> Iterator[Int64[Tensor, "chosen"]]:
        """All indices at each step from ``start_step`` on."""
        for _ in range(start_step, self.num_steps):
            yield torch.arange(num_units)


def _check_num_steps(num_steps: int) -> None:
    if num_steps < 0:
        raise ConfigError("num-steps-out-of-range", f"num_steps is {num_steps}.", fix="Give 0 or more.")
