"""The folder that may leave the house: weights, config, guarantee and model card; written and read here.

Reading trusts nothing: weights are safetensors, the model is rebuilt from the zoo by name, and whatever does
not fit is refused.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sfumato.data.readers.decode import Fit, decode_image
from sfumato.errors import ConfigError, DataError, ModelError, RunError
from sfumato.files import replacing, sync_folder, write_json, write_text
from sfumato.models import create_model, find_variant, weight_shapes
from sfumato.training.evaluation import predict_logits

FORMAT = 1
WEIGHTS, CONFIG, PRIVACY, CARD = "model.safetensors", "config.json", "privacy.json", "README.md"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The most likely class of one image."""

    label: str
    probability: float
    index: int


@dataclass(frozen=True, kw_only=True)
class ReleasedModel:
    """A released classifier with everything needed to use it and to judge its guarantee."""

    model: nn.Module
    classes: tuple[str, ...]
    privacy: dict[str, Any]
    config: dict[str, Any]

    def logits(self, images: Tensor, *, batch_size: int = 256) -> Tensor:
        """Logits (N, classes) of uint8 images (N, C, H, W) of the model's size."""
        size, channels = self.config["image_size"], self.config["channels"]
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1:] != (channels, size, size):
            raise DataError(
                "wrong-images",
                f"got {images.dtype} of shape {tuple(images.shape)}",
                why=f"This model takes uint8 images of shape (N, {channels}, {size}, {size}).",
                fix="Give file names, and they are decoded and resized; or convert the tensor.",
            )
        mean, std = tuple(self.config["mean"]), tuple(self.config["std"])
        return predict_logits(self.model, images, mean=mean, std=std, batch_size=batch_size)

    def predict(self, images: Tensor | np.ndarray | Sequence[str | Path]) -> list[Prediction]:
        """Classify image files, or uint8 images (N, C, H, W)."""
        if isinstance(images, np.ndarray):
            images = torch.from_numpy(images)
        if not isinstance(images, Tensor):
            images = self.decode(images)
        if not len(images):
            return []
        chances = self.logits(images).softmax(1)
        best = chances.max(1)
        return [
            Prediction(label=self.classes[index], probability=chance, index=index)
            for chance, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]

    def decode(self, files: Sequence[str | Path]) -> Tensor:
        """Image files as uint8 (N, C, H, W), decoded as the training images were."""
        size, channels, fit = self.config["image_size"], self.config["channels"], self.config["fit"]
        if channels not in (1, 3):
            raise DataError(
                "wrong-images",
                f"this model takes images of {channels} channels",
                why="Image files are grey or colour: 1 channel or 3.",
                fix="Give a tensor of uint8 images instead.",
            )
        arrays = [decode_image(Path(file), image_size=size, channels=channels, fit=fit) for file in files]
        return torch.from_numpy(np.stack(arrays)) if arrays else torch.zeros(0, channels, size, size).byte()


def write_release(
    folder: Path,
    *,
    model: nn.Module,
    config: Mapping[str, Any],
    privacy: Mapping[str, Any],
    card: str,
) -> None:
    """Write a complete release folder, or none.

    Guarantee: only what is passed here is written; nothing is computed from training data.
    """
    building = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        weights = {name: value.detach().to("cpu").contiguous() for name, value in model.state_dict().items()}
        with replacing(building / WEIGHTS) as temporary:
            save_file(weights, temporary, metadata={"format": "pt"})
        write_json(building / CONFIG, {"format": FORMAT, **config})
        write_json(building / PRIVACY, privacy)
        write_text(building / CARD, card)
        if folder.exists():
            shutil.rmtree(folder)
        building.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def load(path: str | Path, *, model: nn.Module | None = None) -> ReleasedModel:
    """Load a released model from a run's folder or from its ``release/`` alone.

    ``model`` is needed only for a network of your own, which the zoo cannot rebuild by name.
    """
    folder = find_release(Path(path))
    weights, config, privacy = read_release(folder)
    try:
        network = model if model is not None else build_model(config, weights)
        network.load_state_dict(weights)
    except ConfigError as error:  # a name or option that this version does not have
        raise _bad_release(folder, f"{CONFIG} describes no model: {error.what}") from error
    except RuntimeError as error:
        raise _bad_release(folder, f"{WEIGHTS} does not fit: {error}") from error
    return ReleasedModel(
        model=network.eval(), classes=tuple(config["classes"]), privacy=privacy, config=config
    )


def read_release(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Weights, config and privacy of a release folder, as they are stored."""
    config, privacy = read_description(folder)
    try:
        return load_file(folder / WEIGHTS), config, privacy
    except (OSError, SafetensorError) as error:
        raise _bad_release(folder, f"{WEIGHTS} cannot be read: {error}") from error


def read_description(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Config and privacy of a release folder, checked: whoever reads them finds every key that is shown."""
    config, privacy = _read_json(folder / CONFIG), _read_json(folder / PRIVACY)
    _check_config(config, folder)
    _check_privacy(privacy, folder)
    return config, privacy


def find_release(path: Path) -> Path:
    """The release folder of a run, or the folder itself."""
    for candidate in (path, path / "release"):
        if (candidate / CONFIG).is_file():
            return candidate
    if (path / "recipe.toml").is_file():
        raise RunError(
            "not-finished",
            f"{path} has no release yet",
            fix=f"Finish it: sfumato train --resume --out {path}",
        )
    raise RunError(
        "no-run", f"{path} is neither a run nor a release", fix="Give runs/NAME or a release folder."
    )


def build_model(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    """The network that ``config.json`` describes, before the released ``weights`` are put into it.

    Guarantee: its time and memory are bounded by those of ``weights``, whatever the description says.
    """
    described = config["model"]
    if described["name"] is None:
        raise ModelError(
            "own-model",
            "this release holds a model that is not in the zoo",
            fix="Build it yourself and give it: sfumato.load(path, model=my_model).",
        )
    options = dict(described["options"])
    if "pretrained" in find_variant(described["name"]).options():
        options["pretrained"] = False  # public weights would be replaced at once, and need their package
    options |= {"num_classes": len(config["classes"]), "in_channels": config["channels"]}
    if weight_shapes(described["name"], **options) != {name: value.shape for name, value in weights.items()}:
        raise RuntimeError(f"{described['name']} with these options has weights of other names or shapes")
    return create_model(described["name"], **options)


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= 1024  # what data can be resized to


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_number, value))


def _are_names(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(name, str) for name in value)


def _is_model(value: object) -> bool:
    return (
        isinstance(value, dict)
        and "name" in value
        and isinstance(value["name"], str | None)
        and isinstance(value.get("options"), dict)
        and not {"name", "num_classes", "in_channels"} & value["options"].keys()
    )


def _are_channels(value: object) -> bool:
    return type(value) is int and 1 <= value <= 16


_CONFIG_CHECKS: dict[str, Callable[[object], bool]] = {
    "model": _is_model,
    "classes": _are_names,
    "image_size": _is_size,
    "channels": _are_channels,
    "mean": _are_numbers,
    "std": lambda value: _are_numbers(value) and min(value) > 0,
    "fit": lambda value: value in get_args(Fit),
    "data": lambda value: isinstance(value, str),
}
_PRIVACY_CHECKS: dict[str, Callable[[object], bool]] = {
    "epsilon": lambda value: value is None or _is_number(value),
    "delta": lambda value: value is None or _is_number(value),
    "unit": lambda value: isinstance(value, str),
    "releasable": lambda value: isinstance(value, bool),
    "statement": lambda value: isinstance(value, str),
}


def _check_config(config: Mapping[str, Any], folder: Path) -> None:
    if config.get("format") != FORMAT:
        raise _bad_release(folder, f"its format is {config.get('format')!r}, this version reads {FORMAT}")
    for key, usable in _CONFIG_CHECKS.items():
        if not usable(config.get(key)):
            raise _bad_release(folder, f"{CONFIG} has no usable {key}")


def _check_privacy(privacy: Mapping[str, Any], folder: Path) -> None:
    """Refuse a guarantee that cannot be read: a model without one must say so."""
    for key, usable in _PRIVACY_CHECKS.items():
        if key not in privacy or not usable(privacy[key]):
            raise _bad_release(folder, f"{PRIVACY} has no usable {key}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _bad_release(path.parent, f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise _bad_release(path.parent, f"{path.name} is not a JSON object")
    return value


def _bad_release(folder: Path, what: str) -> ModelError:
    return ModelError("bad-release", f"{folder}: {what}", fix="Copy the release folder again, complete.")
