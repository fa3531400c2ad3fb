"""Discrete Gaussian noise on a rounded sum: exact in whole numbers, so no floating-point attack applies.

The sampler is that of Canonne, Kamath and Steinke (2020), algorithms 1 to 3, over whole arrays:
discrete Laplace proposals, each kept with probability exp(-(|y| - σ)²/(2σ²)). All probabilities are
ratios of whole numbers and are decided by uniform whole numbers; no logarithm or exponential is ever
computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import ConfigError, PrivacyError

if TYPE_CHECKING:
    from sfumato.randomness import RandomSource

__all__ = ["ROUNDING", "add_discrete_noise", "discrete_gaussian"]

ROUNDING = 2.0**-10  # rounding the sum before the noise enlarges its sensitivity by at most this share
_LARGEST_SCALE = 2**48  # in lattice steps; products of whole numbers below stay within 64 bits


def add_discrete_noise(
    gradients: Mapping[str, Tensor],
    *,
    stddev: float,
    sensitivity: float,
    source: RandomSource,
    step: int,
    purpose: str = "noise",
) -> dict[str, Tensor]:
    """The tensors, rounded to a lattice, plus discrete Gaussian noise; same shapes, dtypes and devices.

    Guarantee: two sums within ``sensitivity`` of each other are, once rounded, within ``sensitivity`` · (1
    + ROUNDING): the spacing is so small that rounding d coordinates moves a sum by at most
    spacing·sqrt(d)/2. The noise has at least ``stddev``.
    """
    num_values = max(1, sum(value.numel() for value in gradients.values()))
    spacing = 2.0 ** math.floor(math.log2(sensitivity * ROUNDING / math.sqrt(num_values)))
    noise = discrete_gaussian(
        num_values, stddev=math.ceil(stddev / spacing), source=source, step=step, purpose=purpose
    )
    noisy, start = {}, 0
    for name, value in gradients.items():
        scaled = value.detach().to(device="cpu", dtype=torch.float64).reshape(-1) / spacing
        if not torch.isfinite(scaled).all() or scaled.abs().max().item() > 2.0**52:
            raise PrivacyError(
                "non-finite-sum",
                f"the sum of {name} is not finite, or too large for its lattice.",
                why="Noise cannot hide an infinite or undefined value.",
                fix="Compute the sum with sfumato.clipped_sum, which counts non-finite gradients as zero.",
            )
        part = noise[start : start + value.numel()]
        start += value.numel()
        whole = scaled.round().to(torch.int64) + part
        noisy[name] = (
            (whole.double() * spacing).to(device=value.device, dtype=value.dtype).reshape(value.shape)
        )
    return noisy


def discrete_gaussian(
    num_samples: int, *, stddev: int, source: RandomSource, step: int, purpose: str = "noise"
) -> Tensor:
    """Whole numbers k with probability proportional to exp(-k²/(2·stddev²)), int64; exact."""
    if not 1 <= stddev <= _LARGEST_SCALE:
        raise ConfigError(
            "noise-out-of-range",
            f"discrete noise of {stddev} lattice steps cannot be drawn.",
            fix="Use a noise multiplier above 0, or the continuous mechanism.",
        )
    coins = _Coins(source, purpose, step)
    out = np.empty(num_samples, dtype=np.int64)
    missing = np.arange(num_samples)
    while len(missing):
        proposal = _discrete_laplace(coins, len(missing), stddev)
        kept = _keep(coins, np.abs(np.abs(proposal) - stddev), stddev)
        out[missing[kept]] = proposal[kept]
        missing = missing[~kept]
    return torch.from_numpy(out)


class _Coins:
    """Exact coin tosses from a random source; every call uses fresh bytes."""

    def __init__(self, source: RandomSource, purpose: str, step: int) -> None:
        self._source, self._purpose, self._step, self._calls = source, purpose, step, 0

    def words(self, count: int) -> np.ndarray:
        self._calls += 1  # a seeded source repeats itself for the same purpose and step
        purpose = f"{self._purpose} {self._calls}"
        return self._source.random_bytes(8 * count, purpose=purpose, step=self._step).view(np.uint64)

    def below(self, count: int, limit: int) -> np.ndarray:
        """Uniform whole numbers in [0, limit)."""
        words = self.words(count)
        unbiased = np.uint64(2**64 - 1 - 2**64 % limit)  # the last whole multiple of the limit, less one
        while len(again := np.flatnonzero(words > unbiased)):
            words[again] = self.words(len(again))
        return (words % np.uint64(limit)).astype(np.int64)

    def bernoulli(self, numerators: np.ndarray, denominator: int) -> np.ndarray:
        """True with probability numerator / denominator."""
        return self.below(len(numerators), denominator) < numerators

    def exponential(
        self, numerators: np.ndarray, denominator: int, also: tuple[np.ndarray, int] | None = None
    ) -> np.ndarray:
        """True with probability exp(-x); x in [0, 1] is numerator/denominator, times another ratio if given.

        Toss coins of probability x/1, x/2, x/3, … until one fails; the number of tosses is odd with
        probability exp(-x).
        """
        result = np.zeros(len(numerators), dtype=bool)
        going, count = np.arange(len(numerators)), 1
        while len(going):
            won = self.bernoulli(numerators[going], denominator * count)
            if also is not None:
                won &= self.bernoulli(also[0][going], also[1])
            result[going[~won]] = count % 2 == 1
            going, count = going[won], count + 1
        return result


def _discrete_laplace(coins: _Coins, count: int, scale: int) -> np.ndarray:
    """Whole numbers with probability proportional to exp(-|k|/scale)."""
    out = np.empty(count, dtype=np.int64)
    missing = np.arange(count)
    while len(missing):
        remainder = coins.below(len(missing), scale)
        kept = np.flatnonzero(coins.exponential(remainder, scale))
        multiple = np.zeros(len(kept), dtype=np.int64)  # geometric: how often exp(-1) succeeds
        going = np.arange(len(kept))
        while len(going):
            going = going[coins.exponential(np.ones(len(going), dtype=np.int64), 1)]
            multiple[going] += 1
        size = remainder[kept] + scale * multiple
        negative = coins.below(len(kept), 2).astype(bool)
        valid = ~(negative & (size == 0))  # zero once, not twice
        out[missing[kept[valid]]] = np.where(negative, -size, size)[valid]
        missing = np.delete(missing, kept[valid])
    return out


def _keep(coins: _Coins, distance: np.ndarray, scale: int) -> np.ndarray:
    """True with probability exp(-(distance/scale)²/2).

    With distance = k·scale + r the exponent is k²/2 + k·(r/scale) + (r/scale)·(r/2 scale): each a product
    of coins.
    """
    multiple, rest = np.divmod(distance, scale)
    kept = coins.exponential(rest, scale, also=(rest, 2 * scale))
    for round_number in range(int(multiple.max(initial=0) ** 2)):
        todo = np.flatnonzero(kept & (multiple**2 > round_number))
        if not len(todo):
            break
        passed = coins.exponential(np.ones(len(todo), dtype=np.int64), 2)
        with_rest = todo[multiple[todo] > round_number]
        kept[todo[~passed]] = False
        kept[with_rest] &= coins.exponential(rest[with_rest], scale)
    return kept
