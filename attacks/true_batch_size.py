"""The sum is divided by the true batch size, and the size of the noise tells it.

Safeguard: the divisor is the expected batch size, which is public.
"""

from __future__ import annotations

import torch
from membership import report

from sfumato.gradients import ClippedSum
from sfumato.privacy.plan import Plan
from sfumato.randomness import SecureSource

PLAN = Plan(
    num_examples=20,
    batch_size=20,
    num_steps=1,
    noise_multiplier=5.0,
    clip_norm=1.0,
    delta=1e-3,
    sampling="full",
)
TRIALS = 60


def noisy_mean(num_units: int, divisor: float, source: SecureSource) -> torch.Tensor:
    nothing = torch.zeros(0, dtype=torch.float64)
    gradients = {"w": torch.full((200_000,), 0.9 * num_units / 200_000**0.5)}
    total = ClippedSum(gradients=gradients, norms=nothing, losses=nothing, sensitivity=1.0)
    return PLAN.noise(total, source=source, step=0)["w"] / divisor


def attack(divide_by_true_size: bool) -> tuple[bool, str]:
    """Guess whether 20 or 19 units were there, from the spread of 200,000 noisy values."""
    source, right = SecureSource(), 0
    for trial in range(TRIALS):
        true_size = 20 - trial % 2
        published = noisy_mean(true_size, true_size if divide_by_true_size else PLAN.batch_size, source)
        spread = published.double().std().item()
        guess = 20 if spread < 5.0 / 19.5 else 19
        right += guess == true_size
    return right > 0.9 * TRIALS, f"{right} of {TRIALS} guesses about one unit's presence are right"


def without_safeguard() -> tuple[bool, str]:
    return attack(divide_by_true_size=True)


def with_safeguard() -> tuple[bool, str]:
    return attack(divide_by_true_size=False)


if __name__ == "__main__":
    report("Divisor by the true batch size", without_safeguard, with_safeguard)
