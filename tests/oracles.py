"""Slow, obvious references: one row at a time through ordinary autograd, everything in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class Reference:
    """What a clipped sum should be."""

    per_unit: dict[str, Tensor]  # parameter name -> (units, ...), float64
    norms: Tensor
    losses: Tensor

    def clipped_sum(self, clip_norm: float) -> dict[str, Tensor]:
        """Sum over units of g * min(1, C / |g|)."""
        factors = (clip_norm / self.norms).clamp(max=1.0)
        return {name: torch.einsum("u,u...->...", factors, each) for name, each in self.per_unit.items()}


def reference(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    loss: Callable[..., Tensor] = cross_entropy,
    unit_index: Tensor | None = None,
) -> Reference:
    """Each unit's mean gradient over its rows, one row in the model at a time, in float64."""
    model = copy.deepcopy(model).double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    unit_index = torch.arange(len(inputs)) if unit_index is None else unit_index
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    units = int(unit_index.max()) + 1
    per_unit = {name: torch.zeros(units, *value.shape).double() for name, value in trained.items()}
    losses = torch.zeros(units, dtype=torch.float64)
    for unit in range(units):
        rows = (unit_index == unit).nonzero().flatten().tolist()
        for row in rows:
            value = loss(model(inputs[row : row + 1]), targets[row : row + 1]).sum()
            gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
            losses[unit] += value.item() / len(rows)
            for name, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    per_unit[name][unit] += gradient / len(rows)
    return Reference(per_unit, norms_of(per_unit), losses)


def norms_of(per_unit: dict[str, Tensor]) -> Tensor:
    """Each unit's Euclidean norm over all parameters together."""
    squares = [each.double().reshape(len(each), -1).square().sum(dim=1) for each in per_unit.values()]
    return torch.stack(squares).sum(dim=0).sqrt()


def norm_of(gradients: dict[str, Tensor]) -> float:
    """The Euclidean norm of one gradient over all parameters, in float64."""
    return float(norms_of({name: value[None] for name, value in gradients.items()}))


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """How far two gradients are apart, relative to the second."""
    assert found.keys() == expected.keys()
    apart = norm_of({name: found[name].double() - expected[name].double() for name in expected})
    return apart / max(norm_of(expected), 1e-30)
