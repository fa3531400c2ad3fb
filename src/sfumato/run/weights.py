"""Weights that training starts from: read safely, and put into the model layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sfumato.errors import ModelError, PrivacyError
from sfumato.ledger.receipt import read_receipt
from sfumato.models.backbones import is_backbone, load_trunk
from sfumato.recipes.recipe import ModelSettings
from sfumato.release.documents import Config, Privacy
from sfumato.release.release import CONFIG, PRIVACY, WEIGHTS, find_release, read_release
from sfumato.run.ancestry import Ancestor, read_ancestry
from sfumato.run.backbones import BackboneRecord, read_backbone
from sfumato.training.finetuning import last_layer, renew_head


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Trained weights, and what is known of how they were trained."""

    path: Path
    weights: Mapping[str, Tensor]
    config: Config | None = None  # None: a bare file
    privacy: Privacy | None = None
    fingerprint: str | None = None  # of its training images, if its run folder is there
    ancestors: tuple[Ancestor, ...] = ()  # unprotected data behind the weights that its training started from
    backbone: BackboneRecord | None = None  # of another library
    recorded: str = ""  # its model's option of that name

    @property
    def guarantee(self) -> Privacy | None:
        """What covers the images it was trained on; None if nothing does."""
        privacy = self.privacy
        if privacy is None or privacy["epsilon"] is None or not privacy["releasable"]:
            return None
        return privacy

    @property
    def data(self) -> str | None:
        """The name of its training images."""
        return None if self.config is None else self.config["data"]

    @property
    def all_data(self) -> str | None:
        """The same, after the data behind the weights that its training started from."""
        origin = None if self.privacy is None else self.privacy.get("weights_from")
        before = None if origin is None else origin["data"]
        return self.data if before is None else f"{before} and {self.data}"


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Weights out of a run's folder, a release folder or a ``.safetensors`` file."""
    path = Path(path).expanduser()
    if not path.exists():
        raise ModelError(
            "missing-weights",
            f"{path} is not there, and the recipe begins with its weights",
            why="Random weights in their place would train another model.",
            fix="Give yours: --weights runs/NAME, a release folder or a .safetensors file; if no private "
            "image went into them, with --set model.weights_are_public=true.",
        )
    in_release = path.name == WEIGHTS and (path.parent / CONFIG).is_file()
    if path.is_file() and not in_release:
        try:
            return Checkpoint(path=path, weights=load_file(path))
        except (OSError, SafetensorError) as error:
            raise ModelError(
                "bad-weights",
                f"{path} cannot be read as safetensors: {error}",
                why="Pickled checkpoints (.pth, .pt, .ckpt) are never opened: they can run any program.",
                fix="Give runs/NAME, a release folder, or a .safetensors file.",
            ) from error
    folder = find_release(path.parent if path.is_file() else path)
    weights, config, privacy = read_release(folder)
    state = folder.parent / "state"
    receipt, origin = read_receipt(state), privacy.get("weights_from")
    return Checkpoint(
        path=folder,
        weights=weights,
        config=config,
        privacy=privacy,
        fingerprint=None if receipt is None else receipt.record.fingerprint,
        ancestors=read_ancestry(state, () if origin is None else tuple(origin["unprotected"])),
    )


def begin_with(path: str | Path, settings: ModelSettings) -> Checkpoint:
    """The weights that a model with these settings begins with: a backbone's file, or trained by us."""
    path = Path(path).expanduser()
    if not is_backbone(settings.name) or path.is_dir() or _is_ours(path):
        return read_checkpoint(path)
    weights, record = read_backbone(replace(settings, weights=str(path)))
    recorded = str(settings.options.get("recorded", ""))
    return Checkpoint(path=path, weights=weights, backbone=record, recorded=recorded)


def _is_ours(path: Path) -> bool:
    """Whether a file of weights lies in a release: a folder of others may have a config.json too."""
    return path.name == WEIGHTS and (path.parent / PRIVACY).is_file()


def transfer_weights(model: nn.Module, checkpoint: Checkpoint, *, classes: tuple[str, ...]) -> bool:
    """Put the weights into ``model``, in place; returns whether the last layer is new.

    The last layer is transferred if the classes are the same, and starts at zero if they are not. All other
    names and shapes must be equal.
    """
    if checkpoint.backbone is not None:
        network, recorded = checkpoint.backbone.network, checkpoint.recorded
        load_trunk(model, checkpoint.weights, network=network, recorded=recorded)
        return True
    current, given = model.state_dict(), checkpoint.weights
    differences = {name: _difference(name, current, given) for name in sorted({*current, *given})}
    head = {name for name in differences if name.startswith(f"{last_layer(model)}.")}
    same_classes = checkpoint.config is None or tuple(checkpoint.config["classes"]) == classes
    new_head = not same_classes or any(differences[name] for name in head)
    transferred = [name for name in differences if not (new_head and name in head)]
    wrong = [differences[name] for name in transferred if differences[name]]
    if wrong:
        raise ModelError(
            "weights-do-not-fit",
            f"{checkpoint.path} does not fit the model: {'; '.join(wrong[:3])}"
            + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""),
            why="All layers but the last must have the same names and shapes.",
            fix=_model_flags(checkpoint),
        )
    model.load_state_dict({**current, **{name: given[name] for name in transferred}})
    if new_head:
        renew_head(model)
    return new_head


def _difference(name: str, model: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    """How the two tensors of this name differ; empty if they fit."""
    if name not in model:
        return f"the model has no {name}"
    if name not in weights:
        return f"the weights have no {name}"
    if model[name].shape == weights[name].shape:
        return ""
    return f"{name} is {tuple(weights[name].shape)} there and {tuple(model[name].shape)} here"


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
