"""One image whose gradient is not a number turns the whole model into nothing, which everybody can see.

Safeguard: a unit whose gradient is not finite counts as zero, and noise refuses sums that are not finite.
"""

from __future__ import annotations

import math

import torch
from membership import report
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.gradients import clipped_sum
from sfumato.noise import add_noise
from sfumato.randomness import SecureSource


def batch(*, member: bool) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    images, labels = torch.rand(12, 1, 8, 8), torch.randint(0, 10, (12,))
    if member:
        images[3, 0, 0, 0] = math.inf
    return model, images, labels


def careless_sum(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Clipping as it is often written: g · min(1, C/|g|), without a thought for infinities."""
    names = dict(model.named_parameters())
    total = {name: torch.zeros_like(value) for name, value in names.items()}
    for i in range(len(images)):
        loss = cross_entropy(model(images[i : i + 1]), labels[i : i + 1])
        gradient = torch.autograd.grad(loss, list(names.values()))
        norm = torch.cat([part.flatten() for part in gradient]).norm()
        for name, part in zip(names, gradient, strict=True):
            total[name] += part * (1.0 / norm).clamp(max=1.0)
    return total


def visible(gradients: dict[str, Tensor]) -> bool:
    noise = {name: torch.randn_like(value) for name, value in gradients.items()}
    return not all(torch.isfinite(value + noise[name]).all() for name, value in gradients.items())


def without_safeguard() -> tuple[bool, str]:
    told = [visible(careless_sum(*batch(member=member))) for member in (True, False)]
    return told == [True, False], f"the model is ruined with the image: {told[0]}, without it: {told[1]}"


def with_safeguard() -> tuple[bool, str]:
    told = []
    for member in (True, False):
        gradients = clipped_sum(*batch(member=member), clip_norm=1.0).gradients
        noisy = add_noise(gradients, stddev=1.0, source=SecureSource(), step=0)
        told.append(not all(torch.isfinite(value).all() for value in noisy.values()))
    return told == [True, False], f"the model is ruined with the image: {told[0]}, without it: {told[1]}"


if __name__ == "__main__":
    report("An image that is not a number", without_safeguard, with_safeguard)
