"""Networks: those of the zoo as recipe and images describe them, and copies of a caller's network."""

from __future__ import annotations

import copy

import torch
from torch import nn

from sfumato.data import ImageSet
from sfumato.errors import ConfigError, ModelError
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


def training_copy(model: nn.Module) -> nn.Module:
    """A copy of a caller's network to train, so that the caller never holds steps that were not saved."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # whatever a module's __deepcopy__ raises
        raise ModelError(
            "cannot-be-copied",
            f"{type(model).__name__} cannot be copied: {error}",
            why="A copy is trained: steps that were not saved are taken again, so nobody may see them.",
            fix="Keep in the module only what copy.deepcopy can copy: no open files, no computed tensors.",
        ) from error
