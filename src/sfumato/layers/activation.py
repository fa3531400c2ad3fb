"""Activations by name. None of them works in place: the gradient engine keeps the layers' inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sfumato.errors import ConfigError, did_you_mean

Activation = Literal[
    "relu", "mish", "selu", "tempered_sigmoid", "tanh", "gelu", "silu", "elu", "leaky_relu", "relu6", "none"
]


class TemperedSigmoid(nn.Module):
    """``scale * sigmoid(inverse_temperature * x) - offset`` (Papernot et al. 2021); the defaults are tanh."""

    def __init__(self, scale: float = 2.0, inverse_temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        self.scale, self.inverse_temperature, self.offset = scale, inverse_temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(self.inverse_temperature * x) - self.offset

    def extra_repr(self) -> str:
        return f"scale={self.scale}, inverse_temperature={self.inverse_temperature}, offset={self.offset}"


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "mish": nn.Mish,
    "selu": nn.SELU,
    "tempered_sigmoid": TemperedSigmoid,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "leaky_relu": nn.LeakyReLU,
    "relu6": nn.ReLU6,
    "none": nn.Identity,
}
assert set(_ACTIVATIONS) == set(get_args(Activation))


def make_activation(name: Activation) -> nn.Module:
    """A fresh activation module. Each use gets its own, so that every layer has one place in the model."""
    if name not in _ACTIVATIONS:
        raise ConfigError(
            "unknown-activation",
            f"{name!r} is not an activation. {did_you_mean(str(name), tuple(_ACTIVATIONS))}".rstrip(),
            fix=f"Choose one of {', '.join(_ACTIVATIONS)}.",
        )
    return _ACTIVATIONS[name]()
