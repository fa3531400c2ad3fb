"""The audit's own model and what the auditor keeps of every step: channels are blocks of weights."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop

from sfumato.gradients import ClippedSum
from sfumato.training.gradient_sums import GradientSum

SIDE = 4  # of an image
OTHERS, SILENT = 0, slice(1, 11)  # channels; those of the canaries follow
FIRST_CANARY = SILENT.stop
NUM_SILENT = SILENT.stop - SILENT.start
DROPOUT = 0.5


@dataclass(frozen=True)
class Watched:
    """One step, in float64: what the model knew of the canaries, and parts of the gradient it was given."""

    weights: np.ndarray  # (classes, canaries): the sum over a canary's pixels
    gradient: np.ndarray  # (classes, canaries, pixels)
    silent: np.ndarray  # (classes, channels, pixels)
    others: np.ndarray  # (classes, pixels)


class WatchedModel(nn.Sequential):
    """One linear layer on pixels; dropout is for the others alone, so that a canary's gradient is known."""

    head: nn.Linear

    def __init__(self, num_canaries: int, *, num_classes: int, dropout: bool) -> None:
        layers = OrderedDict[str, nn.Module](flatten=nn.Flatten())
        if dropout:
            layers["dropout"] = OthersDropout()
        layers["head"] = nn.Linear((FIRST_CANARY + num_canaries) * SIDE**2, num_classes)
        super().__init__(layers)


class OthersDropout(nn.Module):
    """Dropout in the channel of the other units."""

    def forward(self, pixels: Tensor) -> Tensor:
        dropped = drop(pixels[:, : SIDE**2], DROPOUT, self.training)
        return torch.cat([dropped, pixels[:, SIDE**2 :]], dim=1)


class RecordingSGD(torch.optim.SGD):
    """Ordinary SGD that keeps what it saw of every step."""

    def __init__(self, model: WatchedModel, *, learning_rate: float) -> None:
        super().__init__(model.parameters(), lr=learning_rate)
        self.weight = model.head.weight
        self.seen: list[Watched] = []
        self.register_step_pre_hook(_record_step)


def _record_step(optimizer: torch.optim.Optimizer, _args: object, _options: object) -> None:
    assert isinstance(optimizer, RecordingSGD)
    given = optimizer.weight.grad
    assert given is not None  # the loop sets it before each step
    weights, gradient = _blocks(optimizer.weight.detach()), _blocks(given)
    optimizer.seen.append(
        Watched(
            weights=weights[:, FIRST_CANARY:].sum(-1),
            gradient=gradient[:, FIRST_CANARY:],
            silent=gradient[:, SILENT],
            others=gradient[:, OTHERS],
        )
    )


def _blocks(values: Tensor) -> np.ndarray:
    """(classes, channels, pixels), a copy in float64."""
    return values.double().reshape(len(values), -1, SIDE**2).numpy()


@dataclass(frozen=True, kw_only=True)
class WithGradientCanaries:
    """Sums of ``others`` and of some units before them, each of whose clipped gradients is one coordinate.

    They pass by the clip, so that sampling, noise and loop are audited alone.
    """

    others: GradientSum
    present: np.ndarray  # numbers of the canaries that are there, which are the first units in this order
    label: int
    clip_norm: float

    @property
    def num_units(self) -> int:
        return self.others.num_units + len(self.present)

    def __call__(self, indices: Tensor, step: int) -> ClippedSum:
        among_canaries = indices < len(self.present)
        total = self.others(indices[~among_canaries] - len(self.present), step)
        channels = FIRST_CANARY + torch.from_numpy(self.present)[indices[among_canaries]]
        total.gradients["head.weight"][self.label, channels * SIDE**2] += self.clip_norm
        return total
