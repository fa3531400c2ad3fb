"""The canaries of a run: their key, their part in each step, and what was seen of them, kept in ``state/``.

They leave the real units' guarantee as it is (``training.canaries``), and are nobody: the ledger,
fingerprints, class counts, the private mean of features and all scores are about the real images alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sfumato.data.canaries import canary_images
from sfumato.errors import ConfigError, RunError
from sfumato.randomness import RandomSource
from sfumato.release.run_folder import RunFolder
from sfumato.run.features import feature_views
from sfumato.run.state import RunState
from sfumato.training.canaries import Directions, WithGradientCanaries, WithInputCanaries, toss_coins
from sfumato.training.gradient_sums import GradientSum
from sfumato.training.inputs import Inputs, Units
from sfumato.training.last_layer import LastLayerViews, last_layer_views

if TYPE_CHECKING:
    from collections.abc import Callable

    from sfumato.data import ImageSet
    from sfumato.recipes.recipe import Recipe
    from sfumato.run.prepare import Prepared

PROJECTIONS = "audit.projections"  # in the state: (steps done, canaries)


@dataclass(frozen=True, kw_only=True)
class RunCanaries:
    """All canaries of a run; ``directions`` are those of the kind ``gradient``, ``images`` of the others."""

    key: int
    members: Tensor  # (M,) bool: what the coins said
    directions: Directions | None
    images: ImageSet | None
    projections: Tensor  # (num_steps, M): each noisy sum on each direction, in sensitivities; filled in
    sensitivity: float  # of the sums: what a unit can move them by, and what the noise is measured in

    @classmethod
    def begin(cls, prepared: Prepared, folder: RunFolder) -> RunCanaries | None:
        """New ones, or those of the run that ``folder`` holds; None if the recipe wants none."""
        settings, plan = prepared.recipe.audit, prepared.plan
        if not settings.canaries or plan is None:
            return None
        key = folder.canary_key()
        if key is None:
            if folder.has_state:
                raise _lost(folder)
            key = new_key(prepared.source)
            folder.keep_canary_key(key)
        train, by_gradient = prepared.splits.train, settings.kind == "gradient"
        return cls(
            key=key,
            members=toss_coins(key, settings.canaries),
            directions=Directions.draw(key, settings.canaries, prepared.model, softmax=not train.multi_label)
            if by_gradient
            else None,
            images=None
            if settings.kind == "gradient"
            else canary_images(
                key,
                settings.canaries,
                kind=settings.kind,
                shape=tuple(train.images.shape[1:]),
                classes=train.classes,
                task=train.task,
            ),
            projections=torch.zeros(prepared.num_steps if by_gradient else 0, settings.canaries),
            sensitivity=prepared.clipping.sensitivity(plan.clip_norm),
        )

    def joined_to(
        self, others: GradientSum, prepared: Prepared, sum_of: Callable[[Prepared], GradientSum]
    ) -> GradientSum:
        """The sums of the real units and of the canaries; ``sum_of`` gives those of a run's units."""
        if self.directions is not None:
            return WithGradientCanaries(others=others, directions=self.directions, members=self.members)
        assert self.images is not None  # one of the two
        units = Units.images(self.images)
        alone = replace(prepared, units=units, views=_views(prepared, self.images))
        return WithInputCanaries(others=others, canaries=sum_of(alone), members=self.members)

    def observe(self, step: int, noisy: dict[str, Tensor]) -> None:
        """Keep what the noisy sum of a step shows of each canary, in or out: it is private by now."""
        if self.directions is not None:
            self.projections[step] = self.directions.projections(noisy) / self.sensitivity

    def saved(self, step: int) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors and values for the state of the run after ``step`` steps."""
        return {PROJECTIONS: self.projections[:step]}, {"canaries": _checksum(self.key)}

    def restore(self, state: RunState, step: int) -> None:
        """Go on with what was seen in the saved state; refuses that of other canaries."""
        wanted = self.projections[:step]
        wanted.copy_(kept_projections(state, key=self.key, shape=wanted.shape))


def kept_projections(state: RunState, *, key: int, shape: tuple[int, ...]) -> Tensor:
    """What a saved run has seen of the canaries of ``key``; refuses that of others."""
    seen = state.tensors.get(PROJECTIONS)
    if seen is None or seen.shape != shape or state.values.get("canaries") != _checksum(key):
        raise RunError(
            "damaged-run",
            "the key in state/ is not that of the canaries which the run began with.",
            why="Scores of different canaries cannot be put together.",
            fix="Restore the folder, or start anew with another --out.",
        )
    return seen


def _checksum(key: int) -> str:
    return hashlib.sha256(f"sfumato canaries {key:064x}".encode()).hexdigest()


def new_key(source: RandomSource) -> int:
    """The secret that the canaries and their coins follow from; the run's seed gives it if there is one."""
    return int.from_bytes(source.random_bytes(32, purpose="canaries", step=0).tobytes())


def check_canaries(recipe: Recipe) -> None:
    """Refuse canaries where there is no guarantee to audit."""
    if recipe.audit.canaries and not recipe.privacy.enabled:
        raise ConfigError(
            "canaries-without-privacy",
            f"{recipe.audit.canaries:,} canaries are wanted in a training without privacy.",
            why="There is no guarantee that an audit could compare with.",
            fix="Leave out --audit-canaries, or train with --epsilon.",
        )


def check_room(recipe: Recipe, model: nn.Module, train: ImageSet) -> None:
    """Refuse more canaries than the model has directions for, before anything is spent."""
    if recipe.audit.canaries and recipe.audit.kind == "gradient":
        Directions.draw(0, recipe.audit.canaries, model, softmax=not train.multi_label)


def _views(prepared: Prepared, images: ImageSet) -> Inputs:
    """What a step sees of the canaries' images: as of the real ones."""
    views = prepared.views
    if isinstance(views, LastLayerViews):
        return last_layer_views(prepared.model, images, views.images)
    return feature_views(prepared.model, prepared.recipe, images) or views


def _lost(folder: RunFolder) -> RunError:
    return RunError(
        "damaged-run",
        f"{folder.path} has no key of its canaries",
        why="Without it nobody knows which canaries were in the training.",
        fix="Restore state/canaries.key, or start anew with another --out.",
    )
