"""Parts of training by name, for recipes, and brought by a caller, for Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.gradients import CLIPPINGS, Clipping
from sfumato.privacy.plan import Plan
from sfumato.privacy.sampling_schemes import SamplingScheme
from sfumato.privacy.search import Part, Search
from sfumato.recipes.recipe import Recipe
from sfumato.training.component_identity import identity_of
from sfumato.training.gradient_sums import Loss
from sfumato.training.loop import divisor_of
from sfumato.training.losses import BinaryCrossEntropy
from sfumato.training.optimizers import ADAM_BC, build_optimizer

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

LOSSES: Mapping[str, Loss] = {
    "cross-entropy": cross_entropy,
    "label-smoothing": partial(cross_entropy, label_smoothing=0.1),
    "binary-cross-entropy": BinaryCrossEntropy(),
}  # by the names that recipes use


@dataclass(frozen=True, kw_only=True)
class WeightedLoss:
    """``loss`` of a row times the weight of its class.

    A weight inside cross_entropy would do nothing: its mean over one row divides by the weight again.
    """

    loss: Loss
    class_weights: tuple[float, ...]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.tensor(self.class_weights, device=targets.device)[targets] * self.loss(outputs, targets)


@dataclass(frozen=True, kw_only=True)
class SearchedRun:
    """A run's place in a search: which part it is, and the run in the ledger that pays, if any does."""

    search: Search
    part: Part = "trial"
    parent: str = ""


@dataclass(frozen=True, kw_only=True)
class Components:
    """What a caller brings instead of what the recipe names; None: as the recipe says.

    ``optimizer`` gets the trained parameters; its learning rate is set by the recipe's schedule. ``searched``
    is the search that the run is part of.
    """

    loss: Loss | None = None
    clipping: Clipping | None = None
    sampling: SamplingScheme | None = None
    optimizer: OptimizerFactory | None = None
    searched: SearchedRun | None = None

    @property
    def are_named(self) -> bool:
        """Whether loss and clipping are those that the recipe names, which need no check."""
        return self.loss is None and self.clipping is None

    def loss_of(self, recipe: Recipe) -> Loss:
        """A caller's own, or the one that the recipe names; for images of one class if it names none."""
        if self.loss is not None:
            return self.loss
        loss, weights = LOSSES[recipe.training.loss or "cross-entropy"], recipe.training.positive_weights
        return replace(loss, positive_weights=weights) if isinstance(loss, BinaryCrossEntropy) else loss

    def clipping_of(self, recipe: Recipe) -> Clipping:
        return self.clipping if self.clipping is not None else CLIPPINGS[recipe.privacy.clipping]

    def optimizer_of(self, recipe: Recipe, model: nn.Module, plan: Plan | None) -> torch.optim.Optimizer:
        """The optimizer over the parameters of ``model`` that are trained."""
        if self.optimizer is not None:
            return self.optimizer([value for value in model.parameters() if value.requires_grad])
        settings = recipe.training
        return build_optimizer(
            settings.optimizer,
            model,
            learning_rate=settings.learning_rate,
            options=dict(settings.optimizer_options),
            # a clipping function of a caller's own is not asked where nobody needs the answer
            noise_stddev=self.update_noise(recipe, plan) if plan and settings.optimizer == ADAM_BC else None,
        )

    def update_noise(self, recipe: Recipe, plan: Plan) -> float:
        """Standard deviation of the noise in each coordinate of an update: public, as the plan is."""
        sensitivity = self.clipping_of(recipe).sensitivity(plan.clip_norm)
        return plan.noise_multiplier * sensitivity / divisor_of(plan, recipe.training.normalised_update)

    def names(self) -> dict[str, str]:
        """What was brought, for the state of a run: a resumed run must bring the same (``identity_of``)."""
        brought: dict[str, object] = {"loss": self.loss, "clipping": self.clipping}
        brought |= {"sampling": self.sampling, "optimizer": self.optimizer}
        return {key: identity_of(value) for key, value in brought.items() if value is not None}


AS_THE_RECIPE_SAYS = Components()
