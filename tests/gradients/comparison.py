"""How the tests of the engine force its strategies and compare it with the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oracles import distance, reference
from sfumato.gradients import Choices, ClippedSum, Strategy, clipped_sum

TOLERANCE = {torch.float32: 4e-5, torch.float64: 1e-10}  # the clip leaves a margin of 8e-6 in float32
UNEVEN = torch.tensor([2, 0, 1, 0, 3, 3, 2, 3])  # four units of 2, 1, 2 and 3 rows, their rows not neighbours


@dataclass
class Forced(Choices):
    """Takes the wanted strategy wherever a layer offers it, and remembers which were offered."""

    wanted: str = ""
    offered: set[str] = field(default_factory=set)

    def _best(self, strategies: list[Strategy]) -> str:
        names = [strategy.name for strategy in strategies]
        self.offered |= set(names)
        return self.wanted if self.wanted in names else names[0]


def strategies_offered(model: nn.Module, inputs: Tensor, targets: Tensor, **arguments: object) -> list[str]:
    """Names of all strategies that some layer offers for these inputs; '' stands for each layer's first."""
    choices = Forced()
    clipped_sum(model, inputs, targets, clip_norm=1.0, choices=choices, **arguments)
    return ["", *sorted(choices.offered)]


def assert_exact(
    model: nn.Module,
    inputs: Tensor,
    *,
    targets: Tensor | None = None,
    loss: Callable[..., Tensor] = cross_entropy,
    unit_index: Tensor | None = None,
    microbatch_size: int | None = None,
    tolerance: float | None = None,
) -> set[str]:
    """Norms, losses and clipped sum equal the reference's by every strategy; returns their names."""
    targets = torch.arange(len(inputs)) % 3 if targets is None else targets
    dtype = next(value.dtype for value in model.parameters())
    tolerance = tolerance or TOLERANCE[dtype]
    settings = {"loss": loss, "unit_index": unit_index, "microbatch_size": microbatch_size}
    expected = reference(model, inputs, targets, loss=loss, unit_index=unit_index)
    clip_norm = float(expected.norms.median())  # some units are clipped, some are not
    names = strategies_offered(model, inputs, targets, **settings)
    for name in names:
        choices = Forced(wanted=name)
        total = clipped_sum(model, inputs, targets, clip_norm=clip_norm, choices=choices, **settings)
        assert isinstance(total, ClippedSum)
        torch.testing.assert_close(total.norms, expected.norms, rtol=tolerance, atol=tolerance * clip_norm)
        torch.testing.assert_close(total.losses, expected.losses, rtol=tolerance, atol=tolerance)
        assert distance(total.gradients, expected.clipped_sum(clip_norm)) < tolerance, name
    return set(names)


def classifier(*layers: nn.Module, inputs: Tensor) -> nn.Sequential:
    """The layers, all positions flattened, and a linear layer to three classes."""
    with torch.no_grad():
        features = (
            nn.Sequential(*layers).eval().to(inputs.dtype if inputs.is_floating_point() else None)(inputs)
        )
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features[0].numel(), 3))
    return model.to(features.dtype).train()
