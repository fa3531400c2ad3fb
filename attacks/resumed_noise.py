"""A run is resumed with the noise it had before, on another batch: the difference of the results has none.

Safeguard: every process draws noise under a fresh key of its own, so a step that is done again gets new
noise.
"""

from __future__ import annotations

import torch
from membership import report

from sfumato.noise import add_noise
from sfumato.randomness import RandomSource, SecureSource, SeededSource

STDDEV = 100.0


def attack(before: RandomSource, after: RandomSource) -> tuple[bool, str]:
    """Subtract what was published at step 7 before the crash from what was published at step 7 after it."""
    target = torch.zeros(5000)
    target[17] = 1.0  # the target's clipped gradient: in the batch before the crash, not in the one after
    others = torch.rand(5000)
    first = add_noise({"w": others + target}, stddev=STDDEV, source=before, step=7)["w"]
    second = add_noise({"w": others}, stddev=STDDEV, source=after, step=7)["w"]
    difference = first - second
    found = int(difference.abs().argmax())
    clear = difference.abs().max().item() < 2 and found == 17
    return clear, f"largest difference {difference.abs().max():.3f} at coordinate {found}, noise was {STDDEV}"


def without_safeguard() -> tuple[bool, str]:
    return attack(SeededSource(5), SeededSource(5))


def with_safeguard() -> tuple[bool, str]:
    return attack(SecureSource(), SecureSource())


if __name__ == "__main__":
    report("Noise used again after a resume", without_safeguard, with_safeguard)
