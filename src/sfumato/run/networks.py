"""Networks of the zoo as the recipe and the images describe them."""

from __future__ import annotations

import torch
from torch import nn

from sfumato.data import ImageSet
from sfumato.errors import ConfigError
from sfumato.models import create_model
from sfumato.randomness import RandomSource
from sfumato.recipes.recipe import ModelSettings


def zoo_network(settings: ModelSettings, train: ImageSet) -> nn.Module:
    """The network by its name, for images and classes like these."""
    for name in ("num_classes", "in_channels"):
        if name in settings.options:
            raise ConfigError(
                "unknown-model-option",
                f"model.options.{name} cannot be set: the images have it",
                fix="Leave it out; data.channels changes the images' channels.",
            )
    return create_model(
        settings.name,
        num_classes=len(train.classes),
        in_channels=train.images.shape[1],
        **settings.options,
    )


def initial_model(settings: ModelSettings, train: ImageSet, source: RandomSource) -> nn.Module:
    """A model of the zoo with fresh weights drawn from ``source``; the global generator is left as it was."""
    seed = source.torch_generator(purpose="init", step=0).initial_seed()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return zoo_network(settings, train)
