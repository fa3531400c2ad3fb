"""The initialisations of the three papers."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Literal, get_args

from torch import Tensor, nn

from sfumato.errors import ConfigError, did_you_mean

Initialisation = Literal["fan_in_normal", "xavier", "xavier_selu", "torch"]


def fan_in_normal_(weight: Tensor) -> Tensor:
    """Normal with variance 1 / fan-in: De et al. 2022, appendix C.1."""
    return nn.init.normal_(weight, std=1 / sqrt(weight[0].numel()))


def xavier_selu_(weight: Tensor) -> Tensor:
    """Xavier uniform with the gain of SELU: Remerscheid et al. 2022."""
    return nn.init.xavier_uniform_(weight, gain=nn.init.calculate_gain("selu"))


_SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    "fan_in_normal": fan_in_normal_,
    "xavier": nn.init.xavier_uniform_,  # Glorot & Bengio 2010
    "xavier_selu": xavier_selu_,
}


def initialise(model: nn.Module, scheme: Initialisation) -> nn.Module:
    """Draw the weights of all convolutions and linear layers afresh, their biases zero; return the model.

    ``torch`` leaves everything as PyTorch, or the family, drew it. No scheme touches norm layers, gains and
    scalars.
    """
    if scheme not in get_args(Initialisation):
        known = get_args(Initialisation)
        raise ConfigError(
            "unknown-initialisation",
            f"{scheme!r} is not an initialisation. {did_you_mean(str(scheme), known)}".rstrip(),
            fix=f"Choose one of {', '.join(known)}.",
        )
    if scheme == "torch":
        return model
    draw = _SCHEMES[scheme]
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() >= 2:  # norm layers have one dimension
            draw(weight)
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor):
                nn.init.zeros_(bias)
    return model
