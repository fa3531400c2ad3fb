"""Squeeze and excitation (Hu et al. 2018): weigh each channel by what the whole image says."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sfumato.layers.activation import Activation, make_activation


class SqueezeExcite(nn.Module):
    """``factor * sigmoid(expand(act(reduce(mean(x))))) * x``."""

    def __init__(
        self, channels: int, hidden: int, *, activation: Activation = "relu", factor: float = 1.0
    ) -> None:
        super().__init__()
        self.reduce = nn.Linear(channels, hidden)
        self.activation = make_activation(activation)
        self.expand = nn.Linear(hidden, channels)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.sigmoid(self.expand(self.activation(self.reduce(x.mean(dim=(2, 3))))))
        return x * (self.factor * weight)[:, :, None, None]
