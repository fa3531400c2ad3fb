"""The network before the first step: options, first weights, trained parts, fixed features."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from sfumato.data import ImageSet
from sfumato.randomness import RandomSource
from sfumato.recipes.recipe import Recipe
from sfumato.run.features import fit_extractor, fitting_note, load_extractor
from sfumato.run.networks import initial_model
from sfumato.run.progress import ProgressObserver
from sfumato.run.weights import Checkpoint, transfer_weights
from sfumato.training.finetuning import choose_trained


def build_network(
    recipe: Recipe,
    train: ImageSet,
    source: RandomSource,
    *,
    checkpoint: Checkpoint | None,
    device: torch.device,
    model: nn.Module | None = None,
    observer: ProgressObserver | None = None,
    fit: bool = True,
) -> nn.Module:
    """The network as the recipe says it; without ``fit`` its fixed features have their shape alone."""
    network = model if model is not None else initial_model(recipe.model, train, source)
    if checkpoint is not None:
        start_from(network, checkpoint, train, observer)
    choose_trained(network, recipe.model.trained)
    network = network.to(device)
    if not fit:
        if not load_extractor(network, recipe) and observer is not None:
            observer.noted(fitting_note(recipe, train.images.shape))
    elif observer is None:
        fit_extractor(network, recipe)
    else:
        counter = partial(observer.computed, "generated images")
        fit_extractor(network, recipe, on_note=observer.noted, on_progress=counter)
    return network


def start_from(
    network: nn.Module, checkpoint: Checkpoint, train: ImageSet, observer: ProgressObserver | None
) -> None:
    """Put the checkpoint's weights into the network, in place; says so if the last layer is new."""
    new_head = transfer_weights(network, checkpoint, classes=train.classes)
    if new_head and observer is not None and checkpoint.backbone is None:
        observer.noted(f"The last layer is new: {checkpoint.path} was trained for other classes.")
