"""Optimizers by name and learning rates over time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from sfumato.errors import ConfigError, did_you_mean
from sfumato.recipes.recipe import ScheduleSettings
from sfumato.training.adam_bc import AdamBC

ADAM_BC = "AdamBC"

# Optimizers of torch.optim that cannot take one noisy gradient per step, and why.
_UNUSABLE = {
    "Optimizer": "It is only the class that all optimizers share.",
    "LBFGS": "It computes the loss several times per step, and each time would cost budget.",
    "SparseAdam": "It wants sparse gradients, and noise is dense.",
    "Muon": "It takes matrices only, and most models have other parameters too.",
}


def build_optimizer(
    name: str,
    model: nn.Module,
    *,
    learning_rate: float | None,
    options: dict[str, object],
    noise_stddev: float | None = None,
) -> torch.optim.Optimizer:
    """Any optimizer of torch.optim by name, or AdamBC, over the parameters that are trained.

    Options that it does not take are refused, and so is no learning rate at all. ``noise_stddev`` is that of
    each coordinate of the update, as planned; None: there is no noise.
    """
    base = torch.optim.Optimizer
    known = [
        key for key, value in vars(torch.optim).items() if isinstance(value, type) and issubclass(value, base)
    ]
    usable = [*(key for key in known if key not in _UNUSABLE), ADAM_BC]
    if name not in usable:
        hint = "" if name in _UNUSABLE else did_you_mean(name, usable)
        raise ConfigError(
            "unknown-optimizer",
            f"{name!r} is not an optimizer for this loop. {hint}".rstrip(),
            why=_UNUSABLE.get(name, ""),
            fix="Use one of torch.optim that takes dense gradients and no closure: SGD, NAdam, AdamW, …",
        )
    trained = [value for value in model.parameters() if value.requires_grad]
    kind: Any = AdamBC if name == ADAM_BC else getattr(torch.optim, name)
    planned = {"noise_stddev": _planned(noise_stddev)} if name == ADAM_BC else {}
    try:
        return kind(trained, lr=learning_rate, **planned, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "bad-optimizer-option",
            f"{name} with {options}: {error}",
            fix="See docs/recipes.md." if name == ADAM_BC else f"See the arguments of torch.optim.{name}.",
        ) from error


def _planned(noise_stddev: float | None) -> float:
    if noise_stddev is None:
        raise no_noise_to_remove(f"training.optimizer = {ADAM_BC!r} corrects Adam")
    return noise_stddev


def no_noise_to_remove(what: str) -> ConfigError:
    """The error for a method against noise where there is none."""
    return ConfigError(
        "no-noise-to-remove",
        f"{what} for the noise of a private step, and this training has none",
        fix="Train privately, or leave the method out.",
    )


class Schedule:
    """The learning rate, step by step: ``advance`` after each one, ``observe`` after each evaluation.

    A schedule of torch.optim.lr_scheduler decides. It scales a rate of 1 that is held by an optimizer of its
    own: ``fit`` sets the true rate, also in an optimizer of the caller's. Epochs are expected ones.
    """

    def __init__(
        self,
        settings: ScheduleSettings,
        *,
        learning_rate: float,
        num_steps: int,
        steps_per_epoch: float,
        evaluate_every: int,
    ) -> None:
        self.learning_rate = learning_rate
        self._holder = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        if settings.name == "plateau" and settings.factor < 1:
            self._scheduler: LRScheduler = ReduceLROnPlateau(
                self._holder,
                factor=settings.factor,
                # torch counts evaluations: as many as lie within the epochs of patience
                patience=int(settings.patience_epochs * steps_per_epoch // evaluate_every),
                threshold=0.0,
                threshold_mode="abs",
                eps=0.0,
            )
        else:
            # StepLR takes whole steps only, and CosineAnnealingLR adds up rounding from step to step
            form = partial(_scale, settings, num_steps=num_steps, steps_per_epoch=steps_per_epoch)
            self._scheduler = LambdaLR(self._holder, form)
            self._holder.step()  # trains nothing; torch warns of a schedule that is ahead of its optimizer

    @property
    def rate(self) -> float:
        """The rate of the next step."""
        return self.learning_rate * float(self._scheduler.get_last_lr()[0])

    def advance(self) -> None:
        """A step was taken."""
        if not isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step()

    def observe(self, loss: float) -> None:
        """A loss on public images: a plateau cuts the rate when it stagnates."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(loss)

    def state_dict(self) -> dict[str, Any]:
        """What changes on the way, in torch's words and JSON's values; all else follows from the settings."""
        values = {"best": math.inf, "num_bad_epochs": 0, **self._scheduler.state_dict()}
        kept = {key: values[key] for key in ("last_epoch", "_last_lr", "best", "num_bad_epochs")}
        return {**kept, "best": kept["best"] if math.isfinite(kept["best"]) else None}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        best = math.inf if saved["best"] is None else saved["best"]
        now = self._scheduler.state_dict()
        known = {key: value for key, value in {**saved, "best": best}.items() if key in now}
        self._scheduler.load_state_dict({**now, **known})
        self._holder.param_groups[0]["lr"] = saved["_last_lr"][0]


def _scale(settings: ScheduleSettings, step: int, *, num_steps: int, steps_per_epoch: float) -> float:
    """What a rate that follows the steps alone is at ``step``, counted from 0, as a share of the first."""
    if settings.name == "step":
        return settings.factor ** int(step / (settings.every_epochs * steps_per_epoch))
    if settings.name == "cosine":
        wave = 0.5 * (1 + math.cos(math.pi * step / num_steps))
        return settings.final + (1 - settings.final) * wave
    return 1.0
