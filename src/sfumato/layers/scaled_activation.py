"""Activations that keep the variance of a standard normal input (Brock et al. 2021a)."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

from sfumato.errors import ConfigError, did_you_mean
from sfumato.layers.activation import make_activation

NfActivation = Literal["relu", "gelu", "silu", "mish", "selu", "tanh", "elu"]

# 1 / the standard deviation of act(z), z standard normal; a test integrates them anew.
_GAINS = {
    "relu": 1.712858550,
    "gelu": 1.700926243,
    "silu": 1.787187222,
    "mish": 1.592025381,
    "selu": 1.0,
    "tanh": 1.592537420,
    "elu": 1.270843418,
}


class ScaledActivation(nn.Module):
    """``scale * gain * act(x)``: deviation ``scale`` for a standard normal input."""

    def __init__(self, name: NfActivation, *, scale: float = 1.0) -> None:
        super().__init__()
        if name not in _GAINS:
            raise ConfigError(
                "unknown-activation",
                f"{name!r} has no known gain. {did_you_mean(str(name), get_args(NfActivation))}".rstrip(),
                fix=f"Choose one of {', '.join(_GAINS)}.",
            )
        self.activation = make_activation(name)
        self.factor = scale * _GAINS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x) * self.factor

    def extra_repr(self) -> str:
        return f"factor={self.factor:.4f}"
