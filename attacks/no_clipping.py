"""Without clipping a single image moves the model further than the noise can hide.

Safeguard: each unit's gradient is clipped to the norm that the noise was scaled for.
"""

from __future__ import annotations

import numpy as np
import torch
from membership import proven_epsilon, report
from torch import nn

from sfumato.gradients import clipped_sum
from sfumato.privacy.plan import Plan
from sfumato.randomness import SecureSource

PLAN = Plan(
    num_examples=40,
    batch_size=40,
    num_steps=1,
    noise_multiplier=1.0,
    clip_norm=1.0,
    delta=1e-3,
    sampling="full",
)
TRIALS = 3000


def scores(clip_norm: float, *, member: bool) -> np.ndarray:
    """How far the published gradient points towards the target image's own, over many runs of one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    images, labels = torch.rand(40, 1, 8, 8), torch.randint(0, 10, (40,))
    images[0] *= 100  # an unusual image
    kept = slice(0, 40) if member else slice(1, 40)
    total = clipped_sum(model, images[kept], labels[kept], clip_norm=clip_norm)
    alone = clipped_sum(model, images[:1], labels[:1], clip_norm=1.0).gradients["1.weight"]
    source, stddev = SecureSource(), PLAN.noise_multiplier * PLAN.clip_norm
    from sfumato.noise import add_noise

    return np.array(
        [
            float(
                (add_noise(total.gradients, stddev=stddev, source=source, step=0)["1.weight"] * alone).sum()
            )
            for _ in range(TRIALS)
        ]
    )


def attack(clip_norm: float) -> tuple[bool, str]:
    members, others = scores(clip_norm, member=True), scores(clip_norm, member=False)
    threshold = float(np.quantile(others, 0.998))
    proven = proven_epsilon(members, others, delta=PLAN.delta, threshold=threshold)
    found = float((members > threshold).mean())
    return proven > PLAN.epsilon, (
        f"{100 * found:.1f} % of members found at 0.2 % false alarms; ε of at least {proven:.2f} is proven, "
        f"{PLAN.epsilon:.2f} is promised"
    )


def without_safeguard() -> tuple[bool, str]:
    return attack(clip_norm=1e9)


def with_safeguard() -> tuple[bool, str]:
    return attack(clip_norm=PLAN.clip_norm)


if __name__ == "__main__":
    report("No clipping: a single image moves the model", without_safeguard, with_safeguard)
