"""The canaries of a run: their key, their part in each step, and what was seen of them, kept in ``state/``.

They leave the real units' guarantee as it is (``training.canaries``), and are nobody: the ledger,
fingerprints, class counts, the private mean of features and all scores are about the real images alone.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.data.canaries import CanaryImages, canary_images
from sfumato.errors import ConfigError, RunError
from sfumato.features.patch_features import PatchFeatures
from sfumato.features.rare_images import rare_images
from sfumato.files import check_plain, replacing, sync
from sfumato.models.fixed_features import FixedFeatures
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
    from sfumato.data.images import Task
    from sfumato.recipes.recipe import Recipe
    from sfumato.run.prepare import Prepared

PROJECTIONS = "projections.f32"  # in state/: (steps, canaries) in float32, the lowest byte first
IMAGES = "canary-images.safetensors"  # in state/: of canaries that take minutes to make
_WAITING = "audit.projections"  # in the state: those of the steps since the state before


@dataclass
class Projections:
    """What was seen of all canaries in each step, in a file that grows by the steps between two states.

    A state holds the rows that are new, and they are appended once it is saved: so a kill loses or repeats
    none, and the file is never written anew. Rows beyond what a state knows of are overwritten.
    """

    path: Path
    num_canaries: int
    num_kept: int = 0  # rows of the file that belong to a saved state
    waiting: list[Tensor] = field(default_factory=list)

    def saved(self, key: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and values for the next state."""
        return {_WAITING: self._stacked()}, {"canaries": _checksum(key)}

    def append(self) -> None:
        """Once a state with the waiting rows is saved: durably."""
        if not self.waiting:
            return
        rows = self._stacked()
        try:
            with open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
                file.seek(self.num_kept * self._row_bytes)
                file.write(rows.numpy().astype("<f4").tobytes())
                file.truncate()
                sync(file)
        except OSError as error:
            raise RunError(
                "cannot-save",
                f"{self.path} could not be written: {error}",
                why="The disk may be full or read-only. What was saved before is untouched.",
                fix="Make room, then continue with --resume.",
            ) from error
        self.num_kept += len(rows)
        self.waiting.clear()

    def restored(self, state: RunState, *, key: int, white_box: bool) -> Tensor:
        """All rows that belong to the state; refuses those of other canaries."""
        steps = state.values["step"] if white_box else 0
        waiting = state.tensors.get(_WAITING)
        kept = 0 if waiting is None else steps - len(waiting)
        if waiting is None or kept < 0 or waiting.shape[1:] != (self.num_canaries,):
            raise _other_canaries()
        if state.values.get("canaries") != _checksum(key):
            raise _other_canaries()
        data = self._read(kept * self._row_bytes) if kept else b""
        rows = np.frombuffer(data, dtype="<f4", count=kept * self.num_canaries)
        self.num_kept, self.waiting = kept, list(waiting)
        return torch.cat([torch.from_numpy(rows.astype(np.float32)).view(kept, self.num_canaries), waiting])

    def _read(self, size: int) -> bytes:
        """The first ``size`` bytes of the file."""
        try:
            check_plain(self.path)
            with open(self.path, "rb") as file:
                data = file.read(size)
        except (OSError, ValueError) as error:
            raise _lost_projections(f"{self.path} cannot be read: {error}") from error
        if len(data) < size:
            raise _lost_projections(f"{self.path} has {len(data):,} bytes; the state needs {size:,}.")
        return data

    @property
    def _row_bytes(self) -> int:
        return 4 * self.num_canaries

    def _stacked(self) -> Tensor:
        return torch.stack(self.waiting) if self.waiting else torch.zeros(0, self.num_canaries)


@dataclass(frozen=True, kw_only=True)
class RunCanaries:
    """All canaries of a run; ``directions`` are those of the kind ``gradient``, ``images`` of the others."""

    key: int
    members: Tensor  # (M,) bool: what the coins said
    directions: Directions | None
    images: ImageSet | None
    projections: Projections  # of each noisy sum on each direction, in sensitivities
    silent: bool  # no real unit has a gradient along a direction
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
        train = prepared.splits.train
        by_gradient = settings.kind == "gradient"
        directions = (
            Directions.draw(key, settings.canaries, prepared.model, softmax=not train.multi_label)
            if by_gradient
            else None
        )
        return cls(
            key=key,
            members=toss_coins(key, settings.canaries),
            directions=directions,
            # of a loss that is not ours nobody knows whether its gradients add up to zero over the classes
            silent=directions is not None and directions.silent and prepared.loss is cross_entropy,
            images=None
            if settings.kind == "gradient"
            else images_of_canaries(
                folder,
                key,
                settings.canaries,
                kind=settings.kind,
                model=prepared.model,
                like=(tuple(train.images.shape[1:]), train.classes, train.task),
            ),
            projections=Projections(folder.state / PROJECTIONS, settings.canaries),
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
            self.projections.waiting.append((self.directions.projections(noisy) / self.sensitivity).float())

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and values for the state of the run."""
        tensors, values = self.projections.saved(self.key)
        return tensors, {**values, "silent_canaries": self.silent}

    def restore(self, state: RunState) -> None:
        """Go on with what was seen in the saved state; refuses that of other canaries."""
        self.projections.restored(state, key=self.key, white_box=self.directions is not None)


def images_of_canaries(
    folder: RunFolder,
    key: int,
    count: int,
    *,
    kind: CanaryImages,
    model: nn.Module,
    like: tuple[tuple[int, ...], tuple[str, ...], Task],
) -> ImageSet:
    """The images of this key, of a shape, classes and task like the run's.

    Those that are optimised take minutes: they are made once, for the public features of ``model``, and kept.
    """
    shape, classes, task = like
    drawn = canary_images(key, count, kind=kind, shape=shape, classes=classes, task=task)
    if kind != "optimised":
        return drawn
    path = folder.state / IMAGES
    if not path.exists():
        made = rare_images(_patches_of(model), drawn.images)
        with replacing(path, mode=0o600) as temporary:
            save_file({"images": made}, temporary)
    try:
        images = load_file(path)["images"]
    except (OSError, SafetensorError, KeyError) as error:
        raise RunError(
            "damaged-run",
            f"{path} cannot be read: {error}",
            fix="Delete it: the images are made anew, which takes minutes.",
        ) from error
    if images.shape != drawn.images.shape or images.dtype != torch.uint8:
        raise _other_canaries()
    return replace(drawn, images=images)


def _patches_of(model: nn.Module) -> PatchFeatures:
    """The features that images can be made for, without the private centre."""
    if not isinstance(model, FixedFeatures) or not isinstance(model.extractor, PatchFeatures):
        raise ConfigError(
            "canaries-need-patches",
            "optimised canaries are wanted, but the model has no fixed patch features.",
            why="They are made for features that are known before the training.",
            fix="Use --recipe fast/patches, or --audit-kind mislabelled.",
        )
    return model.extractor


def _lost_projections(what: str) -> RunError:
    return RunError(
        "damaged-run",
        what,
        why="What was seen of the canaries in the steps before the last state is lost.",
        fix="Restore the file, or start anew with another --out.",
    )


def _other_canaries() -> RunError:
    return RunError(
        "damaged-run",
        "the key in state/ is not that of the canaries which the run began with.",
        why="Scores of different canaries cannot be put together.",
        fix="Restore the folder, or start anew with another --out.",
    )


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
    """Refuse canaries that the model has no directions for, or no images, before anything is spent."""
    if not recipe.audit.canaries:
        return
    if recipe.audit.kind == "gradient":
        Directions.draw(0, recipe.audit.canaries, model, softmax=not train.multi_label)
        return
    if recipe.audit.kind == "optimised":
        _patches_of(model)
    height, width = train.images.shape[-2:]
    if height != width:
        raise ConfigError(
            "canaries-not-square",
            f"images are {height} x {width}, and canaries with images are wanted.",
            why="They are shown to the released model, and a release knows of square images alone.",
            fix="Use --audit-kind gradient, or square images.",
        )


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
