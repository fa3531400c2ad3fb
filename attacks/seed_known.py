"""A seed is guessed, and the noise is subtracted.

Safeguard: noise comes from the operating system's entropy; a seeded run says ``releasable: false``.
"""

from __future__ import annotations

import torch
from membership import report

from sfumato.noise import add_noise
from sfumato.randomness import RandomSource, SecureSource, SeededSource

STDDEV = 50.0
PRIVATE_SUM = {"w": torch.linspace(-1, 1, 1000)}


def guess_the_seed(published: torch.Tensor) -> tuple[bool, str]:
    """Try seeds until what remains is far smaller than the noise."""
    for seed in range(2000):
        noise = add_noise({"w": torch.zeros(1000)}, stddev=STDDEV, source=SeededSource(seed), step=3)["w"]
        rest = published - noise
        if rest.abs().max() < STDDEV / 10:
            error = (rest - PRIVATE_SUM["w"]).abs().max().item()
            return (
                True,
                f"seed {seed} found; the private sum is known to {error:.4f}, under noise of {STDDEV}",
            )
    return False, "no seed explains the noise"


def publish(source: RandomSource) -> torch.Tensor:
    return add_noise(PRIVATE_SUM, stddev=STDDEV, source=source, step=3)["w"]


def without_safeguard() -> tuple[bool, str]:
    return guess_the_seed(publish(SeededSource(1729)))


def with_safeguard() -> tuple[bool, str]:
    assert SecureSource().releasable
    assert not SeededSource(1729).releasable
    return guess_the_seed(publish(SecureSource()))


if __name__ == "__main__":
    report("Seed known: the noise is subtracted", without_safeguard, with_safeguard)
