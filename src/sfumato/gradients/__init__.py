"""Per-example clipped gradient sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["ClippedSum", "clipped_sum"]


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """The sum over units of their clipped gradients, and what one unit can change in it."""

    gradients: dict[str, Tensor]
    norms: Tensor  # one per unit, before clipping, float64; sensitive
    losses: Tensor  # one per unit, mean over its rows; sensitive
    sensitivity: float

    def __add__(self, other: ClippedSum) -> ClippedSum:
        return ClippedSum(
            gradients={name: value + other.gradients[name] for name, value in self.gradients.items()},
            norms=torch.cat([self.norms, other.norms]),
            losses=torch.cat([self.losses, other.losses]),
            sensitivity=max(self.sensitivity, other.sensitivity),
        )


def clipped_sum(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    clip_norm: float,
    loss: Callable[..., Tensor] = cross_entropy,
    unit_index: Tensor | None = None,
    microbatch_size: int | None = None,
) -> ClippedSum:
    """Sum over units of each unit's gradient, clipped to norm ``clip_norm``."""
    rows = len(inputs)
    units = torch.arange(rows) if unit_index is None else unit_index
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in names.items()}
    norms, losses = [], []
    for unit in range(int(units.max()) + 1 if rows else 0):
        mine = units == unit
        value = loss(model(inputs[mine]), targets[mine])
        grads = torch.autograd.grad(value, list(names.values()), allow_unused=True)
        norm = sum(g.double().square().sum() for g in grads if g is not None).sqrt()
        factor = min(1.0, clip_norm / norm.item()) if torch.isfinite(norm) and norm > 0 else 0.0
        for n, g in zip(names, grads, strict=True):
            if g is not None and factor > 0:
                total[n] += factor * g
        norms.append(norm)
        losses.append(value.detach())
    empty = torch.zeros(0, dtype=torch.float64)
    return ClippedSum(
        gradients=total,
        norms=torch.stack(norms) if norms else empty,
        losses=torch.stack(losses) if losses else empty,
        sensitivity=clip_norm,
    )
