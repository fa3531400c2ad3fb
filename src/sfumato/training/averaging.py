"""Exponential moving average of the weights, with warm-up (Tan & Le 2019; De et al. 2022, appendix C.3)."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class WeightAverage:
    """The average of a model's trained parameters over the updates made so far.

    Averaging only reads weights that are private already, so it costs no budget.
    """

    decay: float
    weights: dict[str, Tensor]
    num_updates: int = 0

    @classmethod
    def start(cls, model: nn.Module, *, decay: float) -> WeightAverage:
        """An average that begins at the model's present weights."""
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        return cls(decay=decay, weights={name: value.detach().clone() for name, value in trained.items()})

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after one real update.

        Early on the average would hold mostly the initial weights; (1 + t) / (10 + t) lets it forget them.
        """
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        parameters = dict(model.named_parameters())
        for name, average in self.weights.items():
            average.lerp_(parameters[name].detach(), 1 - decay)
        self.num_updates += 1

    def averaged(self, model: nn.Module) -> nn.Module:
        """A copy of ``model`` in evaluation mode that holds the averaged weights."""
        averaged = copy.deepcopy(model)
        averaged.load_state_dict({**averaged.state_dict(), **self.weights})
        return averaged.eval()
