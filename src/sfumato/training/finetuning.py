"""Fine-tuning: which parts of a network are trained, and how the others are kept as they were.

De et al. 2022, section 4, train the last layer or all of them; between the two lie the norms and biases
(Bu et al. 2022) and the first and last layers. Fewer trained parameters mean less noise in all, but also
less that can be learnt.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from sfumato.errors import ConfigError

Part = Literal["all", "last", "norms-and-biases", "first-and-last"]


def choose_trained(model: nn.Module, part: Part) -> None:
    """Freeze whatever is not of ``part``; the last layer is always trained, what was frozen before never.

    Frozen parameters do not require a gradient, so neither clip nor noise knows of them.
    """
    if part == "all":
        return
    kept = {f"{last_layer(model)}.", *([f"{first_layer(model)}."] if part == "first-and-last" else [])}
    for name, value in model.named_parameters():
        chosen = name.startswith(tuple(kept)) or (part == "norms-and-biases" and is_per_channel(value))
        value.requires_grad_(value.requires_grad and chosen)


def is_per_channel(value: Tensor) -> bool:
    """Whether a parameter has one number per channel: a norm's scale and shift, a gain, a bias."""
    return value.ndim == 0 or value.numel() == value.shape[0]


def last_layer(model: nn.Module) -> str:
    """The layer that gives the class scores: ``head`` in the zoo, else the last one with parameters."""
    if isinstance(getattr(model, "head", None), nn.Module):
        return "head"
    return _layers(model)[-1]


def first_layer(model: nn.Module) -> str:
    """The name of the layer that sees the image: the first with parameters."""
    return _layers(model)[0]


def _layers(model: nn.Module) -> list[str]:
    names = [name for name, module in model.named_modules() if name and any(True for _ in _own(module))]
    if not names:
        raise ConfigError(
            "no-layers",
            f"{type(model).__name__} has no layers with parameters of their own.",
            fix='Use trained = "all", or build the network out of modules.',
        )
    return names


def _own(module: nn.Module):
    return module.parameters(recurse=False)


@torch.no_grad()
def renew_head(model: nn.Module) -> None:
    """The last layer at zero: for other classes, the one start that has no random direction to unlearn."""
    for value in model.get_submodule(last_layer(model)).parameters():
        value.zero_()


def training_mode(model: nn.Module) -> None:
    """Training mode where all parameters are trained; evaluation mode in frozen and in mixed parts.

    Guarantee: a batch norm in a frozen part keeps its statistics and mixes no examples. One whose
    surroundings are trained too is in training mode, where the check before training refuses it.
    """
    _set_mode(model, inherited=True)


def _set_mode(module: nn.Module, *, inherited: bool) -> None:
    """``inherited``: what a part without parameters (dropout, pooling) takes from the part it lies in."""
    states = {value.requires_grad for value in module.parameters()}
    if len(states) < 2:
        # Where only some layers are trained, statistics stay those of the weights they came with.
        keeps_statistics = getattr(module, "running_mean", None) is not None
        trained = inherited if not states or (keeps_statistics and not inherited) else states.pop()
        module.train(trained)
        return
    module.training = False
    for child in module.children():
        _set_mode(child, inherited=False)
