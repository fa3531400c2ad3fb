"""What follows from whether an image has one class or any number of findings: the loss, and what to try."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sfumato.data import ImageSet
from sfumato.errors import ConfigError
from sfumato.recipes.choices import LossName
from sfumato.recipes.recipe import DecisionSettings, Recipe
from sfumato.training.gradient_sums import Loss
from sfumato.training.losses import BinaryCrossEntropy

OF_FINDINGS: Final = "binary-cross-entropy"
_MAX_WEIGHT = 1000.0


def with_task_settings(recipe: Recipe, train: ImageSet, *, own_loss: Loss | None) -> Recipe:
    """The recipe with the loss that its labels need; refuses one that they do not fit.

    ``own_loss`` is a caller's function, which takes the place of the recipe's.
    """
    training = recipe.training
    fitting: LossName = OF_FINDINGS if train.multi_label else "cross-entropy"
    loss = training.loss or fitting if own_loss is None else _name(own_loss)
    if loss is not None and (loss == OF_FINDINGS) != train.multi_label:
        labels = "any number of findings" if train.multi_label else "one class"
        raise ConfigError(
            "loss-does-not-fit",
            f"the loss is {loss}, but each image of {train.name} has {labels}.",
            why="It would be trained towards other probabilities than those that are reported.",
            fix=f"Leave it out, or use {fitting}.",
        )
    _check_weights(recipe, train, own_loss=own_loss)
    if train.multi_label:
        _check_decision(recipe)
    return recipe if own_loss is not None else replace(recipe, training=replace(training, loss=loss))


def _name(own_loss: Loss) -> LossName | None:
    """Which of the shipped losses a caller has brought; None for all others, which nobody can know."""
    if isinstance(own_loss, BinaryCrossEntropy):
        return OF_FINDINGS
    return "cross-entropy" if own_loss is cross_entropy else None


def _check_weights(recipe: Recipe, train: ImageSet, *, own_loss: Loss | None) -> None:
    weights = recipe.training.positive_weights
    if not weights:
        return
    wrong = ""
    if own_loss is not None:
        wrong = "the loss is one of your own, which has its weights itself"
    elif not train.multi_label:
        wrong = "images here have one class, no findings"
    elif len(weights) not in (1, len(train.classes)):
        wrong = f"there are {len(train.classes)} findings"
    elif not all(0 < weight <= _MAX_WEIGHT for weight in weights):
        wrong = f"each must be above 0 and at most {_MAX_WEIGHT:g}"
    if wrong:
        raise ConfigError(
            "bad-positive-weights",
            f"training.positive_weights is {list(weights)}, but {wrong}.",
            fix="Give one number for all findings, or one for each in their order; or leave it out.",
        )


def _check_decision(recipe: Recipe) -> None:
    """Refuse what only makes sense for classes, of which an image has one."""
    usual = DecisionSettings()
    given = {
        "training.class_weights": recipe.training.class_weights is not None,
        "decision.positive": recipe.decision.positive != usual.positive,
        "decision.prevalence_at_use": recipe.decision.prevalence_at_use != usual.prevalence_at_use,
    }
    for name, is_given in given.items():
        if is_given:
            raise ConfigError(
                "classes-and-findings",
                f"{name} is given, but each image has any number of findings.",
                why="It helps to choose one class of several; findings are called one by one.",
                fix="Leave it out. training.positive_weights weigh findings, decision.threshold says from "
                "which probability on each is called.",
            )


def probe_targets(train: ImageSet, count: int, device: torch.device | None = None) -> Tensor:
    """Targets of the kind that ``train`` has, for probing with noise: nobody's."""
    rows = torch.arange(count, device=device)
    if not train.multi_label:
        return rows % len(train.classes)
    return ((rows[:, None] + torch.arange(len(train.classes), device=device)) % 2).float()
