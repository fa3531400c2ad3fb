"""The folder that may be published: weights, config, guarantee and model card; written and read here.

Reading trusts nothing: weights are safetensors, the model is rebuilt from the zoo by name, and whatever does
not fit is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sfumato.accounting import event_from_dict
from sfumato.data.augmentation import check_normalisation
from sfumato.data.images import Task
from sfumato.data.pixels import Pixels
from sfumato.data.readers.decode import Fit, decode_files, decode_image
from sfumato.data.readers.rendering import Rendering
from sfumato.errors import ConfigError, DataError, ModelError, RunError
from sfumato.files import check_plain, read_json, replace_folder, replacing, workspace, write_json, write_text
from sfumato.models import create_model, find_variant, weight_shapes
from sfumato.release.documents import Config, Privacy
from sfumato.training.decision import Decision
from sfumato.training.evaluation import predict_logits

FORMAT = 1
_FIGURES = (
    "delta",
    "neighbouring",
    "accountant",
    "noise_multiplier",
    "clip_norm",
    "sampling_rate",
    "num_steps",
    "num_examples",
    "events",
)  # what stands behind every epsilon
WEIGHTS, CONFIG, PRIVACY, CARD = "model.safetensors", "config.json", "privacy.json", "README.md"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The class of one image, by the release's threshold if it has one, and how likely each one is.

    Where an image has any number of findings, ``findings`` are those that it has, ``label`` joins them, empty
    if there are none, and ``probability`` and ``index`` are of the most likely one.
    """

    label: str
    probability: float
    index: int
    probabilities: tuple[float, ...] = ()  # in the order of the classes
    findings: tuple[str, ...] | None = None  # None: an image has one class


@dataclass(frozen=True, kw_only=True)
class ReleasedModel:
    """A released classifier with everything needed to use it and to assess its guarantee."""

    model: nn.Module
    classes: tuple[str, ...]
    privacy: Privacy
    config: Config

    @property
    def task(self) -> Task:
        """Whether an image has one of the classes, or any number of them; not said: one."""
        return self.config.get("task", "single-label")

    @property
    def rendering(self) -> Rendering:
        """How files of more than 8 bits became pictures in training."""
        return rendering_of(self.config)

    def logits(self, images: Pixels, *, batch_size: int = 256) -> Tensor:
        """Logits (N, classes) of uint8 images (N, C, H, W) of its size; their softmax is probability."""
        size, channels = self.config["image_size"], self.config["channels"]
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1:] != (channels, size, size):
            raise DataError(
                "wrong-images",
                f"got {images.dtype} of shape {tuple(images.shape)}",
                why=f"This model takes uint8 images of shape (N, {channels}, {size}, {size}).",
                fix="Give file names, and they are decoded and resized; or convert the tensor.",
            )
        mean, std = tuple(self.config["mean"]), tuple(self.config["std"])
        rows = min(batch_size, self._rows_at_once)
        try:
            logits = predict_logits(self.model, images, mean=mean, std=std, batch_size=rows)
        except RuntimeError as error:  # a network whose layers do not meet at this size
            raise _unusable(f"it cannot take images of {channels} x {size} x {size}: {error}") from error
        if logits.shape != (len(images), len(self.classes)) or not logits.isfinite().all():
            raise _unusable(f"its output is not a finite number for each of the {len(self.classes)} classes")
        return self.decision.correct(logits)

    @property
    def decision(self) -> Decision:
        """From the network's outputs to probabilities and a class; ``logits`` and ``predict`` apply it."""
        return Decision.from_dict(self.config.get("decision"), num_classes=len(self.classes))

    def predict(self, images: Tensor | np.ndarray | Sequence[str | Path]) -> list[Prediction]:
        """Classify image files, or uint8 images (N, C, H, W)."""
        if isinstance(images, np.ndarray):
            images = torch.from_numpy(images)
        if not len(images):
            return []
        if isinstance(images, Tensor):
            return self._best(images)
        step = self._rows_at_once  # files piece by piece: decoded, all of them may not fit in memory
        pieces = (self.decode(images[start : start + step]) for start in range(0, len(images), step))
        return [prediction for piece in pieces for prediction in self._best(piece)]

    @property
    def _rows_at_once(self) -> int:
        """Images that are decoded and classified together: 256 of 224 pixels, fewer of larger ones."""
        return max(1, min(256, 256 * 224**2 // self.config["image_size"] ** 2))

    def _best(self, images: Tensor) -> list[Prediction]:
        logits = self.logits(images)
        if self.task == "multi-label":
            pairs = zip(logits.sigmoid().tolist(), self.decision.found(logits).tolist(), strict=True)
            return [self._found(row, called) for row, called in pairs]
        rows, chosen = logits.softmax(1), self.decision.choose(logits)
        return [
            Prediction(
                label=self.classes[index], probability=row[index], index=index, probabilities=tuple(row)
            )
            for row, index in zip(rows.tolist(), chosen.tolist(), strict=True)
        ]

    def _found(self, row: list[float], called: list[bool]) -> Prediction:
        """All findings from their thresholds on; the label joins them as a manifest does."""
        findings = tuple(name for name, is_called in zip(self.classes, called, strict=True) if is_called)
        index = max(range(len(row)), key=row.__getitem__)
        return Prediction(
            label="|".join(findings),
            probability=row[index],
            index=index,
            probabilities=tuple(row),
            findings=findings,
        )

    def decode(self, files: Sequence[str | Path]) -> Tensor:
        """Image files as uint8 (N, C, H, W), decoded as the training images were."""
        size, channels, fit = self._decoding()
        arrays = [
            decode_image(Path(file), image_size=size, channels=channels, fit=fit, rendering=self.rendering)
            for file in files
        ]
        return torch.from_numpy(np.stack(arrays)) if arrays else torch.zeros(0, channels, size, size).byte()

    def decode_pieces(self, files: Sequence[Path]) -> Iterator[tuple[Tensor, Tensor]]:
        """The same piece by piece, on all cores, each with the hashes of its images' content."""
        size, channels, fit = self._decoding()
        for images, ids in decode_files(
            files, image_size=size, channels=channels, fit=fit, rendering=self.rendering
        ):
            yield torch.from_numpy(images), torch.from_numpy(ids)

    def _decoding(self) -> tuple[int, int, Fit]:
        """Size, channels and fit of images out of files; refuses a model that no file suits."""
        size, channels, fit = self.config["image_size"], self.config["channels"], self.config["fit"]
        if channels not in (1, 3):
            raise DataError(
                "wrong-images",
                f"this model takes images of {channels} channels",
                why="Image files are grey or colour: 1 channel or 3.",
                fix="Give a tensor of uint8 images instead.",
            )
        return size, channels, fit


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
    with workspace(folder.parent) as work:
        building = work / folder.name
        building.mkdir()
        weights = {name: value.detach().to("cpu").contiguous() for name, value in model.state_dict().items()}
        with replacing(building / WEIGHTS) as temporary:
            save_file(weights, temporary, metadata={"format": "pt"})
        write_json(building / CONFIG, {"format": FORMAT, **config})
        write_json(building / PRIVACY, privacy)
        write_text(building / CARD, card)
        for file in building.iterdir():
            file.chmod(0o644)  # to be handed over: whoever may enter the run's folder may read it
        building.chmod(0o755)
        replace_folder(building, folder)


def load(path: str | Path, *, model: nn.Module | None = None) -> ReleasedModel:
    """Load a released model from a run's folder or from its ``release/`` alone.

    ``model`` is needed only for a network of your own, which the zoo cannot rebuild by name.
    """
    folder = find_release(Path(path))
    weights, config, privacy = read_release(folder)
    try:
        network = model if model is not None else build_model(config, weights)
        _check_numbers(weights, network, folder)
        network.load_state_dict(weights)
    except ConfigError as error:  # a name or option that this version does not have
        raise _bad_release(folder, f"{CONFIG} describes no model: {error.what}") from error
    except RuntimeError as error:
        raise _bad_release(folder, f"{WEIGHTS} does not fit: {error}") from error
    return ReleasedModel(
        model=network.eval(), classes=tuple(config["classes"]), privacy=privacy, config=config
    )


def read_release(folder: Path) -> tuple[dict[str, Tensor], Config, Privacy]:
    """Weights, config and privacy of a release folder, as they are stored."""
    config, privacy = read_description(folder)
    try:
        check_plain(folder / WEIGHTS)
        return load_file(folder / WEIGHTS), config, privacy
    except (OSError, ValueError, SafetensorError) as error:
        raise _bad_release(folder, f"{WEIGHTS} cannot be read: {error}") from error


def read_description(folder: Path) -> tuple[Config, Privacy]:
    """Config and privacy of a release folder, checked: whoever reads them finds every key that is shown."""
    name = CONFIG
    try:
        config = read_json(folder / CONFIG, Config)
        if config["format"] != FORMAT:
            raise ValueError(f"its format is {config['format']}, this version reads {FORMAT}")
        if {"name", "num_classes", "in_channels"} & config["model"]["options"].keys():
            raise ValueError("it says twice which model it describes")
        Decision.from_dict(config.get("decision"), num_classes=len(config["classes"]))
        check_normalisation(config["mean"], config["std"], channels=config["channels"])
        rendering_of(config)
        name = PRIVACY
        privacy = read_json(folder / PRIVACY, Privacy)
        _check_guarantee(privacy)
    except (OSError, ValueError, ConfigError) as error:
        what = error.what if isinstance(error, ConfigError) else error
        raise _bad_release(folder, f"{name} cannot be used: {what}") from error
    return config, privacy


def rendering_of(config: Config) -> Rendering:
    """The public constants in ``config.json``; ConfigError if they contradict each other."""
    return Rendering(**config.get("rendering", {}))


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


def _check_guarantee(privacy: Privacy) -> None:
    """Refuse a guarantee without the figures behind it: a model that has none must say so."""
    if privacy["epsilon"] is None:
        return
    missing = [key for key in _FIGURES if privacy.get(key) is None]
    if missing:
        raise ValueError(f"it states epsilon without {missing[0]}")
    try:
        for event in privacy["events"]:
            event_from_dict(event)
    except (ConfigError, KeyError, TypeError) as error:
        raise ValueError(f"an event cannot be read: {error}") from error


def _check_numbers(weights: Mapping[str, Tensor], network: nn.Module, folder: Path) -> None:
    """Refuse whole or complex numbers for real weights, which PyTorch would convert silently."""
    for name, value in network.state_dict().items():
        stored = weights.get(name)
        if stored is not None and stored.is_floating_point() != value.is_floating_point():
            raise _bad_release(folder, f"{WEIGHTS} does not fit: {name} is {stored.dtype}, not {value.dtype}")


def _unusable(what: str) -> ModelError:
    return ModelError("bad-release", f"the model cannot be used: {what}", fix="Ask whoever made the release.")


def _bad_release(folder: Path, what: str) -> ModelError:
    return ModelError("bad-release", f"{folder}: {what}", fix="Copy the release folder again, complete.")
