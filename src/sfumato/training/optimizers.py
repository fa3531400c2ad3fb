"""Optimizers by name and learning rates over time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from sfumato.errors import ConfigError, did_you_mean
from sfumato.recipes.recipe import ScheduleSettings

# Optimizers of torch.optim that cannot take one noisy gradient per step, and why.
_UNUSABLE = {
    "Optimizer": "It is only the class that all optimizers share.",
    "LBFGS": "It computes the loss several times per step, and each time would cost budget.",
    "SparseAdam": "It wants sparse gradients, and noise is dense.",
    "Muon": "It takes matrices only, and most models have other parameters too.",
}


def build_optimizer(
    name: str, model: nn.Module, *, learning_rate: float | None, options: dict[str, object]
) -> torch.optim.Optimizer:
    """Any optimizer of torch.optim by name, over the parameters that are trained.

    Options that it does not take are refused, and so is no learning rate at all.
    """
    base = torch.optim.Optimizer
    known = [
        key for key, value in vars(torch.optim).items() if isinstance(value, type) and issubclass(value, base)
    ]
    usable = [key for key in known if key not in _UNUSABLE]
    if name not in usable:
        hint = "" if name in _UNUSABLE else did_you_mean(name, usable)
        raise ConfigError(
            "unknown-optimizer",
            f"{name!r} is not an optimizer for this loop. {hint}".rstrip(),
            why=_UNUSABLE.get(name, ""),
            fix="Use one of torch.optim that takes dense gradients and no closure: SGD, NAdam, AdamW, …",
        )
    trained = [value for value in model.parameters() if value.requires_grad]
    try:
        return getattr(torch.optim, name)(trained, lr=learning_rate, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "bad-optimizer-option",
            f"{name} with {options}: {error}",
            fix=f"See the arguments of torch.optim.{name}.",
        ) from error


@dataclass
class Schedule:
    """The learning rate at each step; ``observe`` feeds a plateau schedule its public scores."""

    settings: ScheduleSettings
    learning_rate: float
    num_steps: int
    steps_per_epoch: float
    scale: float = 1.0  # what a plateau has left of the rate
    best: float = math.inf
    best_step: int = 0

    def __call__(self, step: int) -> float:
        """The rate of step number ``step``, counted from 0."""
        kind = self.settings
        if kind.name == "step":
            changes = int(step / (kind.every_epochs * self.steps_per_epoch))
            return self.learning_rate * kind.factor**changes
        if kind.name == "cosine":
            wave = 0.5 * (1 + math.cos(math.pi * step / self.num_steps))
            return self.learning_rate * (kind.final + (1 - kind.final) * wave)
        return self.learning_rate * self.scale

    def observe(self, step: int, loss: float) -> None:
        """Take note of a loss on public images; a plateau cuts the rate when it stagnates."""
        if loss < self.best:
            self.best, self.best_step = loss, step
        elif step - self.best_step > self.settings.patience_epochs * self.steps_per_epoch:
            self.scale *= self.settings.factor
            self.best_step = step  # the lower rate gets its own time
