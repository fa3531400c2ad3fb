"""Weights to begin with: read safely, and fitted to the model layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sfumato.errors import ModelError, PrivacyError
from sfumato.ledger.receipt import read_receipt
from sfumato.release.release import CONFIG, WEIGHTS, find_release, read_release
from sfumato.run.ancestry import Ancestor, read_ancestry
from sfumato.training.finetuning import last_layer, renew_head


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Trained weights, and what is known of how they were trained."""

    path: Path
    weights: Mapping[str, Tensor]
    config: Mapping[str, Any] | None = None  # None: a bare file
    privacy: Mapping[str, Any] | None = None
    fingerprint: str | None = None  # of its training images, if its run folder is there
    ancestors: tuple[Ancestor, ...] = ()  # unprotected data behind the weights that it began with in its turn

    @property
    def is_private(self) -> bool:
        """Whether a guarantee covers the images it was trained on."""
        return self.privacy is not None and self.privacy["epsilon"] is not None and self.privacy["releasable"]

    @property
    def data(self) -> str | None:
        """The name of its training images."""
        return None if self.config is None else self.config.get("data")

    @property
    def all_data(self) -> str | None:
        """The same, with the data behind the weights that it began with in its turn."""
        before = ((self.privacy or {}).get("weights_from") or {}).get("data")
        return self.data if before is None else f"{before} and {self.data}"


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Weights out of a run's folder, a release folder or a ``.safetensors`` file."""
    place = Path(path).expanduser()
    bare = place.is_file() and not (place.name == WEIGHTS and (place.parent / CONFIG).is_file())
    if bare:
        try:
            return Checkpoint(path=place, weights=load_file(place))
        except (OSError, SafetensorError) as error:
            raise ModelError(
                "bad-weights",
                f"{place} cannot be read as safetensors: {error}",
                why="Pickled checkpoints (.pth, .pt, .ckpt) are never opened: they can run any program.",
                fix="Give runs/NAME, a release folder, or a .safetensors file.",
            ) from error
    folder = find_release(place.parent if place.is_file() else place)
    weights, config, privacy = read_release(folder)
    spent = read_receipt(folder.parent / "state")
    return Checkpoint(
        path=folder,
        weights=weights,
        config=config,
        privacy=privacy,
        fingerprint=None if spent is None else spent.record.fingerprint,
        ancestors=read_ancestry(
            folder.parent / "state", tuple((privacy.get("weights_from") or {}).get("unprotected", ()))
        ),
    )


def take_over(model: nn.Module, checkpoint: Checkpoint, *, classes: tuple[str, ...]) -> bool:
    """Put the weights into ``model``, in place; returns whether the last layer is new.

    The last layer is taken over if the classes are the same, and begins at zero if they are not. All other
    names and shapes must be equal.
    """
    mine, theirs = model.state_dict(), dict(checkpoint.weights)
    head = {name for name in {*mine, *theirs} if name.startswith(f"{last_layer(model)}.")}
    same = checkpoint.config is None or tuple(checkpoint.config["classes"]) == classes
    fits = all(name in mine and name in theirs and mine[name].shape == theirs[name].shape for name in head)
    new_head = not (same and fits)
    compared = {*mine, *theirs} - (head if new_head else set())
    wrong = [
        _difference(name, mine.get(name), theirs.get(name))
        for name in sorted(compared)
        if name not in mine or name not in theirs or mine[name].shape != theirs[name].shape
    ]
    if wrong:
        raise ModelError(
            "weights-do-not-fit",
            f"{checkpoint.path} does not fit the model: {'; '.join(wrong[:3])}"
            + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""),
            why="All layers but the last must have the same names and shapes.",
            fix=_model_flags(checkpoint),
        )
    model.load_state_dict({**mine, **{name: theirs[name] for name in compared}})
    if new_head:
        renew_head(model)
    return new_head


def _difference(name: str, mine: Tensor | None, theirs: Tensor | None) -> str:
    if mine is None:
        return f"the model has no {name}"
    if theirs is None:
        return f"the weights have no {name}"
    return f"{name} is {tuple(theirs.shape)} there and {tuple(mine.shape)} here"


def _model_flags(checkpoint: Checkpoint) -> str:
    """The command-line options that build the network of the weights."""
    if checkpoint.config is None or checkpoint.config["model"]["name"] is None:
        return "Build the model that the weights were made with: --model and --set model.options.…"
    described = checkpoint.config["model"]
    options = "".join(f" --set model.options.{key}={value}" for key, value in described["options"].items())
    return f"Use --model {described['name']}{options}, and the same channels."


def saw_these_images(what: str) -> PrivacyError:
    """The refusal of weights that are declared public and are not."""
    return PrivacyError(
        "weights-saw-these-images",
        f"{what}.",
        why="Weights remember their training images: the guarantee would leave that out.",
        fix="Begin with other weights, or from scratch; a private release of the same images is counted in "
        "without model.weights_are_public.",
    )
