"""Weights of public backbones out of local files: read safely, described, and recorded for the release."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from sfumato.data import KNOWN_SETS
from sfumato.errors import ConfigError, ModelError
from sfumato.files import check_plain
from sfumato.models.backbones import check_network, is_backbone
from sfumato.models.libraries import Description, describe, licence_of, plain_config, split_name
from sfumato.recipes.recipe import ModelSettings, Recipe

_PICKLED = (".pth", ".pt", ".bin", ".ckpt", ".tar")
_NOT_STATED = "not stated"


@dataclass(frozen=True, kw_only=True)
class BackboneRecord:
    """Which public network a training began with, for the statement and privacy.json."""

    network: str
    file: str  # its name, without the folder: paths are private
    sha256: str
    licence: str

    @property
    def text(self) -> str:
        """For the statement."""
        licence = (
            "a licence that was not stated" if self.licence == _NOT_STATED else f"licence {self.licence}"
        )
        return f"the backbone {self.network} ({licence}; {self.file}, SHA-256 {self.sha256})"

    def as_dict(self) -> dict[str, str]:
        return {
            "network": self.network,
            "file": self.file,
            "sha256": self.sha256,
            "licence": self.licence,
        }


def with_backbone(recipe: Recipe) -> Recipe:
    """The recipe with what the backbone's library and folder say of it; others as they are.

    How images are prepared for it goes into the model's options, once. A folder of images is read at the
    backbone's size, unless the recipe gives another.
    """
    settings = recipe.model
    if not is_backbone(settings.name):
        return recipe
    network = check_network(settings.options.get("network", ""))
    recorded = settings.options.get("recorded") or describe_backbone(network, settings.weights).recorded()
    recipe = replace(recipe, model=replace(settings, options={**settings.options, "recorded": recorded}))
    if recipe.data.image_size is None and recipe.data.name not in KNOWN_SETS:
        size = settings.options.get("input_size") or json.loads(str(recorded))["input_size"]
        recipe = replace(recipe, data=replace(recipe.data, image_size=int(size)))
    return recipe


def describe_backbone(network: str, weights: str | None) -> Description:
    """Size, mean and deviation of its images: from its library, or from the JSON files beside its weights."""
    if split_name(network)[0] != "hf":
        return describe(network)
    if weights is None:
        return describe(network)  # which says what is missing
    folder = Path(weights).expanduser().parent
    config, images = _document(folder / "config.json"), _document(folder / "preprocessor_config.json")
    mean, std = _triple(images.get("image_mean")), _triple(images.get("image_std"))
    size = images.get("crop_size") if images.get("do_center_crop") else images.get("size")
    size = _side(size) or _side(images.get("size")) or _side(config.get("image_size"))
    if mean is None or std is None or size is None:
        raise ConfigError(
            "bad-backbone",
            f"{folder / 'preprocessor_config.json'} has no image_mean, image_std and size.",
            why="Images would be prepared in another way than the network was trained with.",
            fix="Copy the model's folder again, complete.",
        )
    return Description(mean=mean, std=std, input_size=size, config=plain_config(config))


def read_backbone(settings: ModelSettings) -> tuple[dict[str, Tensor], BackboneRecord]:
    """The tensors of the file, and its record.

    Guarantee: safetensors are read as such. A file of torch, which is a pickle, is opened only if the caller
    knows its SHA-256, and then by torch's reader that builds tensors and nothing else.
    """
    network = check_network(settings.options.get("network", ""))
    path = Path(settings.weights or "").expanduser()
    try:
        check_plain(path)
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ModelError(
            "missing-weights",
            f"{path} cannot be read: {error}",
            why="Nothing is downloaded: the weights of a backbone come from a file of yours.",
            fix="Give it: --backbone-weights FILE.safetensors",
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    _check_digest(path, digest, settings.weights_sha256)
    weights = _tensors(path, content, trusted=settings.weights_sha256 is not None)
    licence = settings.weights_licence or licence_of(network) or _licence_beside(path) or _NOT_STATED
    return weights, BackboneRecord(network=network, file=path.name, sha256=digest, licence=licence)


def _check_digest(path: Path, digest: str, expected: str | None) -> None:
    if expected is not None and digest != expected.lower().strip():
        raise ModelError(
            "weights-changed",
            f"{path} has SHA-256 {digest}, not {expected[:80]}.",
            why="It is not the file that was meant.",
            fix="Get it again, or correct --backbone-sha256.",
        )


def _tensors(path: Path, content: bytes, *, trusted: bool) -> dict[str, Tensor]:
    if path.suffix.lower() in _PICKLED and not trusted:
        raise ModelError(
            "pickled-weights",
            f"{path} is a file of torch, which is a pickle.",
            why="A pickle can run any program, so one is opened only if you know which file it must be.",
            fix="Take the .safetensors file of the same weights, or give the checksum that its publisher "
            "states: --backbone-sha256 HEX",
        )
    try:
        if path.suffix.lower() in _PICKLED:
            loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            loaded = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else loaded
        else:
            loaded = load(content)
    except (SafetensorError, RuntimeError, ValueError, EOFError, OSError, KeyError, TypeError) as error:
        raise _unreadable(path, str(error)[:200]) from error
    except Exception as error:  # torch's reader raises the error of a library that is not imported here
        if type(error).__name__ != "UnpicklingError":
            raise
        raise _unreadable(path, "it holds more than tensors") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise _unreadable(path, "it is no table of tensors")
    return {str(name): value for name, value in loaded.items()}


def _unreadable(path: Path, what: str) -> ModelError:
    return ModelError(
        "bad-weights",
        f"{path} cannot be read as weights: {what}",
        fix="Give a .safetensors file, or a file of torch that holds a state dict, with --backbone-sha256.",
    )


def _document(path: Path) -> dict[str, Any]:
    """A JSON table; every value is looked at before it is used."""
    try:
        check_plain(path)
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            "bad-backbone",
            f"{path} cannot be read: {error}",
            why="It says how the network is built and how its images are prepared.",
            fix="Keep it beside the weights, as in the folder that they came in.",
        ) from error
    return document if isinstance(document, dict) else {}


def _triple(values: object) -> tuple[float, ...] | None:
    """Three numbers, one for each colour."""
    if not isinstance(values, list) or len(values) != 3:
        return None
    return tuple(map(float, values)) if all(isinstance(each, int | float) for each in values) else None


def _side(size: object) -> int | None:
    """One side of a size as transformers writes it: a number, or a table."""
    if isinstance(size, Mapping):
        size = size.get("height") or size.get("shortest_edge")
    return size if isinstance(size, int) and 0 < size <= 1024 else None


def _licence_beside(path: Path) -> str | None:
    """The licence in the head of the model's card, where that lies beside the weights."""
    try:
        head = (path.parent / "README.md").read_text(encoding="utf-8", errors="replace")[:4000]
    except OSError:
        return None
    found = re.search(r"^license:\s*([\w.\- ]{1,60})$", head, re.MULTILINE)
    return found[1].strip() if found and head.startswith("---") else None
