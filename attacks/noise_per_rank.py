"""Each of several machines adds its share of the noise, and the shares add up to less than was promised.

Standard deviations do not add: 16 shares of σ/16 make σ/4. Safeguard: noise is added once, after the
sum over all machines, by one call that knows the sum's sensitivity.
"""

from __future__ import annotations

import numpy as np
import torch
from membership import proven_epsilon, report

from sfumato.gradients import ClippedSum
from sfumato.noise import gaussian
from sfumato.privacy.plan import Plan
from sfumato.randomness import SecureSource

RANKS, TRIALS = 16, 20_000
PLAN = Plan(
    num_examples=100,
    batch_size=100,
    num_steps=1,
    noise_multiplier=2.0,
    clip_norm=1.0,
    delta=1e-3,
    sampling="full",
)


def published(*, member: bool, shares: bool) -> np.ndarray:
    """A coordinate of the noisy sum over ranks, to which only the target contributes, ``TRIALS`` times."""
    source, value = SecureSource(), 1.0 if member else 0.0
    if shares:
        parts = [gaussian(TRIALS, stddev=2.0 / RANKS, source=source, step=rank) for rank in range(RANKS)]
        return (value + torch.stack(parts).sum(0)).numpy()
    nothing = torch.zeros(0, dtype=torch.float64)
    total = ClippedSum(
        gradients={"w": torch.full((TRIALS,), value)}, norms=nothing, losses=nothing, sensitivity=1.0
    )
    return PLAN.noise(total, source=source, step=0)["w"].double().numpy()


def attack(shares: bool) -> tuple[bool, str]:
    members, others = published(member=True, shares=shares), published(member=False, shares=shares)
    proven = max(
        proven_epsilon(members, others, delta=PLAN.delta, threshold=threshold)
        for threshold in (0.5, 1.0, 1.2)
    )
    return proven > PLAN.epsilon, (
        f"noise of {others.std():.2f}; ε of at least {proven:.2f} is proven, {PLAN.epsilon:.2f} is promised"
    )


def without_safeguard() -> tuple[bool, str]:
    return attack(shares=True)


def with_safeguard() -> tuple[bool, str]:
    return attack(shares=False)


if __name__ == "__main__":
    report("Noise per rank instead of once", without_safeguard, with_safeguard)
