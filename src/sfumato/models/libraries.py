"""Networks of other libraries, by name and without weights: timm, torchvision and transformers.

Each becomes a module with ``features(images) -> (B, d)``: what it computes before its last layer. Nothing is
downloaded, no file is opened here, and the libraries are imported only when one of their networks is built.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from sfumato.errors import ConfigError, ModelError, did_you_mean

_PACKAGES = {"timm": "timm", "torchvision": "torchvision", "hf": "transformers"}
# Of a configuration only plain values are taken: nested ones and these name other models, code or kernels.
_NOT_TAKEN = ("attn_implementation", "auto_map", "dtype", "torch_dtype", "name_or_path", "model_type")
_LONGEST_RECORD = 20_000  # characters


@dataclass(frozen=True, kw_only=True)
class Description:
    """What is known of a network beside its weights: how images are prepared for it, its configuration."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_size: int
    config: Mapping[str, Any] | None = None  # of transformers, which has no networks by name

    def recorded(self) -> str:
        """As JSON, for a model's options: a later version of a library changes nothing in a release."""
        return json.dumps(asdict(self), sort_keys=True)


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a description, with its types."""

    mean: list[float]
    std: list[float]
    input_size: int
    config: dict[str, bool | int | float | str | list[bool | int | float | str]] | None = None


def description_of(recorded: str) -> Description:
    """``Description.recorded``, read back from wherever it came."""
    try:
        record = msgspec.json.decode(recorded[:_LONGEST_RECORD].encode(), type=_Record)
        sound = len(record.mean) == len(record.std) == 3 and min(record.std) > 0 < record.input_size <= 1024
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise ConfigError("bad-backbone", f"recorded is no description: {error}", fix=_LEAVE_OUT) from error
    if not sound:
        raise ConfigError(
            "bad-backbone", "recorded holds no mean and deviation of three channels.", fix=_LEAVE_OUT
        )
    return Description(
        mean=tuple(record.mean), std=tuple(record.std), input_size=record.input_size, config=record.config
    )


_LEAVE_OUT = "Leave model.options.recorded out: it is filled in from the library and the weights' folder."


def split_name(network: str) -> tuple[str, str]:
    """``"timm:resnet18"`` as library and name."""
    library, colon, name = network.partition(":")
    if library not in _PACKAGES or not colon or not name:
        raise ConfigError(
            "bad-backbone",
            f"{network[:80]!r} does not name a backbone. {did_you_mean(library, tuple(_PACKAGES))}".rstrip(),
            fix="Write timm:NAME, torchvision:NAME or hf:NAME, for example timm:resnet18.",
        )
    if library != "hf" and (":" in name or "/" in name):
        raise ConfigError(
            "bad-backbone",
            f"{network[:80]!r} names a place, not a network of {library}.",
            why="The library would fetch or open what is there (hf-hub:…, local-dir:…).",
            fix=f"Write {library}:NAME, and give the weights as a file: --backbone-weights FILE.safetensors",
        )
    return library, name


def import_library(library: str) -> ModuleType:
    """The package behind ``timm``, ``torchvision`` or ``hf``; says what to install if it is missing."""
    package = _PACKAGES[library]
    try:
        return importlib.import_module(package)
    except Exception as error:  # a package built for another torch fails with whatever its code raises
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        raise ModelError(
            "backbone-not-installed",
            f"the package {package} "
            + ("is not installed." if missing else f"cannot be imported: {str(error)[:200]}"),
            why="It builds the network; Sfumato does without it otherwise."
            if missing
            else "It, or a package that it needs, was built for another version of torch.",
            fix=f"pip install 'sfumato[{package}]'"
            + ("" if missing else ", with torchvision from where torch came from."),
        ) from error


def describe(network: str) -> Description:
    """How the library's images are prepared for this network; transformers keeps that with the weights."""
    library, name = split_name(network)
    module = import_library(library)
    if library == "timm":
        values = _known(network, lambda: module.create_model(name, pretrained=False, num_classes=0))
        settings = values.pretrained_cfg
        size = settings["input_size"][-1]
        return Description(mean=tuple(settings["mean"]), std=tuple(settings["std"]), input_size=size)
    if library == "torchvision":
        published = _known(network, lambda: module.models.get_model_weights(name))
        prepared = next(iter(published)).transforms()
        mean, std = tuple(prepared.mean), tuple(prepared.std)
        return Description(mean=mean, std=std, input_size=int(prepared.crop_size[0]))
    raise ConfigError(
        "bad-backbone",
        f"{network[:80]} has no description: transformers keeps config.json beside the weights.",
        fix="Give the weights in the folder they came in: --backbone-weights FOLDER/model.safetensors",
    )


def build_trunk(network: str, description: Description) -> tuple[nn.Module, int]:
    """The network without its last layer, with drawn weights, and how many numbers it gives for an image."""
    library, name = split_name(network)
    module = import_library(library)
    if library == "timm":
        net = _known(network, lambda: module.create_model(name, pretrained=False, num_classes=0))
        return PooledTrunk(net), int(net.head_hidden_size)
    if library == "torchvision":
        net = _known(network, lambda: module.models.get_model(name, weights=None))
        return PooledTrunk(net), _without_last_layer(net, network)
    net = _transformers_network(network, description)
    return TokenTrunk(net), _width(net, network)


def licence_of(network: str) -> str | None:
    """What the library says of the licence of the weights that it publishes under this name."""
    library, name = split_name(network)
    if library != "timm":
        return None
    settings = import_library(library).get_pretrained_cfg(name)
    return None if settings is None else settings.license


class PooledTrunk(nn.Module):
    """A network whose output is a row of numbers for each image."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def features(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) → (B, d)."""
        rows = self.net(x)
        if not isinstance(rows, Tensor) or rows.ndim != 2:
            raise ModelError(
                "bad-backbone",
                f"{type(self.net).__name__} gives no row of numbers for an image.",
                fix="Choose a network that classifies images.",
            )
        return rows


class TokenTrunk(nn.Module):
    """A network of transformers: its pooled output, else its class token, else the mean over places."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        pooler = getattr(net, "pooler", None)
        if isinstance(pooler, nn.Module) and any(True for _ in pooler.parameters()):
            setattr(net, "pooler", None)  # noqa: B010  # checkpoints of classifiers have no weights for it
        names = [name for name, _ in net.named_parameters()]
        self.has_class_token = any(name.endswith("cls_token") for name in names)

    def features(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) → (B, d)."""
        output = self.net(pixel_values=x)
        pooled = getattr(output, "pooler_output", None)
        if pooled is not None:
            return pooled.flatten(1)
        maps = output.last_hidden_state
        if maps.ndim == 4:
            return maps.mean(dim=(2, 3))
        return maps[:, 0] if self.has_class_token else maps.mean(dim=1)


def load_weights(trunk: nn.Module, weights: Mapping[str, Tensor]) -> tuple[nn.Module, list[str]]:
    """The trunk with the published weights in it, and what does not fit.

    The file may have more than the trunk: its last layer. What the trunk needs must be there.
    """
    if isinstance(trunk, TokenTrunk):
        return _load_as_transformers(trunk, weights)
    expected = {
        name: value for name, value in trunk.state_dict().items() if not name.endswith("num_batches_tracked")
    }
    given = {f"net.{name}": value for name, value in weights.items()}
    wrong = [f"no {name.removeprefix('net.')}" for name in expected if name not in given]
    common = {name: (given[name], value) for name, value in expected.items() if name in given}
    wrong += [
        f"{name} is {tuple(theirs.shape)}, not {tuple(ours.shape)}"
        for name, (theirs, ours) in common.items()
        if theirs.shape != ours.shape
    ]
    wrong += [
        f"{name} is {theirs.dtype}"
        for name, (theirs, ours) in common.items()
        if theirs.is_floating_point() != ours.is_floating_point()
    ]
    if not wrong:
        trunk.load_state_dict({name: given[name] for name in expected}, strict=False)
    return trunk, wrong


def _load_as_transformers(trunk: TokenTrunk, weights: Mapping[str, Tensor]) -> tuple[nn.Module, list[str]]:
    """By the library's own loader, which knows how names in older files have changed."""
    from transformers.utils import logging

    kind: Any = type(trunk.net)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it reports the last layer, which is not wanted here
    try:
        net, info = kind.from_pretrained(
            None,
            config=trunk.net.config,
            state_dict=dict(weights),
            output_loading_info=True,
            attn_implementation="eager",
        )
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        return trunk, [str(error)[:200]]
    finally:
        logging.set_verbosity(verbosity)
    missing = [f"no {name}" for name in sorted(info["missing_keys"]) if not name.startswith("pooler.")]
    other = [f"another shape of {entry[0]}" for entry in info.get("mismatched_keys", ())]
    return TokenTrunk(net.to(torch.get_default_dtype())), missing + other


def _known(network: str, build: Callable[[], Any]) -> Any:
    """What the library makes of a name, or an error with the library's own words."""
    try:
        return build()
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "bad-backbone",
            f"{network[:80]} is not built by its library: {str(error)[:200]}",
            fix="See timm.list_models(), torchvision.models.list_models(), or the model's page.",
        ) from error


def _without_last_layer(net: nn.Module, network: str) -> int:
    """Puts an identity in the place of the last linear layer; how many numbers that was given."""
    found = [(name, module) for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if not found:
        raise ConfigError(
            "bad-backbone", f"{network[:80]} has no linear layer at its end.", fix="Choose a classifier."
        )
    name, last = found[-1]
    place, _, attribute = name.rpartition(".")
    setattr(net.get_submodule(place), attribute, nn.Identity())
    return last.in_features


def _transformers_network(network: str, description: Description) -> nn.Module:
    from transformers import AutoConfig, AutoModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    values = dict(description.config or {})
    kind = str(values.get("model_type"))
    if kind not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES or kind == "timm_wrapper":
        raise ConfigError(
            "bad-backbone",
            f"{network[:80]}: model_type {kind[:40]!r} is no classifier of images in transformers.",
            fix="Choose one, such as vit, dinov2, convnext, swin or resnet.",
        )
    plain = {key: value for key, value in values.items() if key[:1] != "_" and key not in _NOT_TAKEN}
    # eager: written in operations that the engine knows; others may fetch kernels, which are programs
    return _known(
        network,
        lambda: AutoModel.from_config(AutoConfig.for_model(kind, **plain), attn_implementation="eager"),
    ).to(torch.get_default_dtype())


def plain_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a ``config.json``: what describes the layers, nothing that names other things."""
    scalar = (bool, int, float, str)

    def is_plain(value: object) -> bool:
        inner = value if isinstance(value, list) else [value]
        return all(isinstance(item, scalar) for item in inner)

    kept = {key: value for key, value in values.items() if key[:1] != "_" and is_plain(value)}
    return {key: value for key, value in kept.items() if key == "model_type" or key not in _NOT_TAKEN}


def _width(net: nn.Module, network: str) -> int:
    config = getattr(net, "config", None)
    width = getattr(config, "hidden_size", None)
    several = getattr(config, "hidden_sizes", None)
    if isinstance(width, int):
        return width
    if isinstance(several, list | tuple) and several:
        return int(several[-1])
    raise ConfigError(
        "bad-backbone",
        f"{network[:80]} does not say how many features it has.",
        fix="Choose a network whose config.json has hidden_size or hidden_sizes.",
    )
