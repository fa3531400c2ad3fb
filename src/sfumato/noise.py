"""Gaussian noise of a stated scale, from an explicit source, safe to add to a private sum.

Two samplers, both from 64-bit words of a cryptographic generator:

- ``gaussian``: Box-Muller in float64; ``add_noise`` adds it and rounds the **result** to a lattice.
- ``discrete``: the exact discrete Gaussian of Canonne, Kamath and Steinke (2020) on the **rounded** sum.

Why the lattice. A floating-point sampler reaches only some of the floats, so the low bits of ``sum +
noise`` can tell which sums are possible at all (Mironov 2012 for Laplace; Jin, McMurtry, Rubinstein and
Ohrimenko 2022 for Gaussian samplers, Box-Muller among them; Holohan and Braghin 2021). Here those bits
never leave: the result is rounded to a multiple of a public power of two near stddev·2^-16, Mironov's
snapping carried over to Gaussians. Each lattice cell holds about 2^36 float64 noise values or more wherever
noise is likely, so every cell is reached from either neighbour, with a probability that differs from the
real Gaussian's by a factor within 1 ± 2^-33. Over d coordinates and T steps such factors act like an extra
Gaussian mechanism of mu = 2^-32·sqrt(d·T), 2e-5 for WRN-16-4 and 2,500 steps: the guarantee moves in its
fifth digit. Rounding a result that is already private costs nothing else. Whoever wants no such argument
takes ``discrete``, which is exact in integers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import ConfigError, PrivacyError
from sfumato.randomness import RandomSource

if TYPE_CHECKING or "jaxtyping" in sys.modules:  # in the tests, which check shapes; no dependency otherwise
    from jaxtyping import Float, Float64

__all__ = ["add_noise", "gaussian", "lattice_spacing"]

_PAIRS = 1 << 15  # pairs per piece: the working set stays in the cache
_LATTICE_BITS = 16  # spacing of the result lattice, in binary digits below the standard deviation


def gaussian(
    shape: int | tuple[int, ...], *, stddev: float, source: RandomSource, step: int, purpose: str = "noise"
) -> Float64[Tensor, "*shape"]:
    """Independent N(0, stddev²) samples in float64, on the CPU.

    Guarantee: exact in float64 up to 9.4 standard deviations; what lies beyond has probability 2^-64.
    To publish a private value use ``add_noise``, which also removes the low bits.
    """
    _check_stddev(stddev)
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    num_samples = math.prod(size)
    drawn = source.random_bytes(16 * ((num_samples + 1) // 2), purpose=purpose, step=step)
    words = torch.from_numpy(drawn.view(np.int64))
    out = torch.empty(words.numel(), dtype=torch.float64)
    with _one_thread():
        for start in range(0, words.numel(), 2 * _PAIRS):
            _box_muller(words[start : start + 2 * _PAIRS], out[start : start + 2 * _PAIRS], stddev)
    return out[:num_samples].reshape(size)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Pieces that fit in a cache gain nothing from a second thread, and wait for it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _box_muller(words: Tensor, out: Tensor, stddev: float) -> None:
    """Fill ``out`` with samples; the first half of ``words`` gives radii, the second half angles."""
    half = words.numel() // 2
    # Not w·2^-64 + 1/2, which would lose the low bits of a small uniform, and with them the tail.
    uniform = words[:half].bitwise_and_(2**63 - 1).double().add_(0.5).mul_(2.0**-63)  # in (0, 1]
    radius = uniform.log_().mul_(-2.0 * stddev * stddev).sqrt_()
    angle = words[half:].double().mul_(math.pi * 2.0**-63)
    torch.cos(angle, out=out[:half]).mul_(radius)
    torch.sin(angle, out=out[half:]).mul_(radius)


def lattice_spacing(stddev: float) -> float:
    """The largest power of two that is at most stddev·2^-16: public, as the scale of the noise is."""
    return 2.0 ** (math.floor(math.log2(stddev)) - _LATTICE_BITS)


def add_noise(
    gradients: Mapping[str, Float[Tensor, "..."]],
    *,
    stddev: float,
    source: RandomSource,
    step: int,
    purpose: str = "noise",
) -> dict[str, Float[Tensor, "..."]]:
    """The tensors plus Gaussian noise, rounded to a public lattice; same shapes, dtypes and devices.
    Guarantee: every coordinate gets its own noise of ``stddev``, drawn in one call for all tensors.
    The low bits of the result carry nothing of the input (see the module's text). Tensors that are not
    finite are refused.
    """
    _check_stddev(stddev)
    spacing = lattice_spacing(stddev)
    total = sum(value.numel() for value in gradients.values())
    # in units of the lattice, so that rounding is to whole numbers; a power of two scales exactly
    flat = gaussian(total, stddev=stddev / spacing, source=source, step=step, purpose=purpose)
    noisy, start = {}, 0
    with _one_thread():
        for name, value in gradients.items():
            part = flat[start : start + value.numel()].reshape(value.shape)
            start += value.numel()
            part.add_(value.detach().to("cpu"), alpha=1.0 / spacing).round_().mul_(spacing)
            _check_finite(name, part)
            noisy[name] = part.to(device=value.device, dtype=value.dtype)
    return noisy


def _check_finite(name: str, noisy: Tensor) -> None:
    if not math.isfinite(noisy.sum().item()):
        raise PrivacyError(
            "non-finite-sum",
            f"the noisy sum of {name} is not finite.",
            why="Noise cannot hide an infinite or undefined value, so it would be visible in the model.",
            fix="Compute the sum with sfumato.clipped_sum, which counts non-finite gradients as zero.",
        )


def _check_stddev(stddev: float) -> None:
    if not (math.isfinite(stddev) and stddev > 0):
        raise ConfigError(
            "noise-out-of-range",
            f"the standard deviation of the noise is {stddev}.",
            why="Without noise of a finite, positive scale there is no privacy.",
            fix="Give a noise multiplier and a clip norm above 0.",
        )
