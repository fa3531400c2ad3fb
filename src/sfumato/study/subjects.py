"""What a study looks at: a network of a run or of the zoo, and the images that it is shown.

No guarantee covers what a study computes from training images. Test images count as public, as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.data import ImageSet, load_data, normalisation_for, normalise
from sfumato.data.generated import KINDS, DeadLeaves
from sfumato.errors import ConfigError, DataError, did_you_mean
from sfumato.features.cache import OnProgress, features_of
from sfumato.models import create_model, list_models
from sfumato.models.fixed_features import FixedFeatures
from sfumato.privacy.statement import round_up
from sfumato.release.release import load
from sfumato.release.scored_images import data_of, images_of, is_sensitive, with_one_class

On = Literal["test", "val", "train", "generated"]
_GENERATED_SEED = 20_221  # not that of the set ``generated``, on which a network may have been trained
_NUM_KINDS = 10  # of generated images for a fresh model: as many as CIFAR-10 has classes


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network in evaluation mode, and the inputs and labels that it is looked at with."""

    name: str
    model: nn.Module
    inputs: Tensor  # (N, C, H, W) float, normalised; rows of features for a head on fixed features
    labels: Tensor  # (N,)
    data: str
    split: On
    sensitive: bool  # whether the images count as private
    epsilon: float | None = None  # of the run; None: without privacy, or not trained
    trained: bool = True

    @property
    def label(self) -> str:
        """The name for a legend, with the budget."""
        if not self.trained:
            return f"{self.name}, initial"
        return f"{self.name}, {budget_words(self.epsilon)}"

    def described(self) -> dict[str, object]:
        """What stands in every JSON document beside the figures."""
        return {
            "name": self.name,
            "trained": self.trained,
            "epsilon": self.epsilon,
            "data": self.data,
            "split": self.split,
            "num_images": len(self.labels),
            "sensitive": self.sensitive,
        }

    def loss(self, *, batch_size: int = 256) -> float:
        """Mean cross-entropy over the images."""
        with torch.inference_mode():
            parts = zip(self.inputs.split(batch_size), self.labels.split(batch_size), strict=True)
            total = sum(cross_entropy(self.model(x), y, reduction="sum").item() for x, y in parts)
        return total / len(self.labels)


def budget_words(epsilon: float | None) -> str:
    """A budget for a legend."""
    return "no privacy" if epsilon is None else f"ε = {round_up(epsilon)}"


def not_private(split: str) -> str:
    """What everybody who sees a sensitive result has to know."""
    return (
        f"NOT PRIVATE: computed from {split} images without noise. No guarantee covers it; keep it where"
        " these images are kept."
    )


def load_subject(
    word: str,
    *,
    data: str | None = None,
    on: On | None = None,
    num_images: int = 256,
    options: Mapping[str, object] | None = None,
    needs_labels: bool = True,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Subject:
    """A run, a release folder, or a model of the zoo with fresh weights, and images to look at it with.

    A run is shown the test images of its own data unless told otherwise; a fresh model those of ``data``, or
    generated ones. The images are a random choice, equal for equal seeds. ``options`` are those of fresh
    models.

    Guarantee: private images are taken only if ``on`` is "train" or "val", and the subject is then sensitive.
    """
    if Path(word).exists():
        return _of_run(Path(word), data, on or "test", num_images, needs_labels, seed, on_progress)
    if word not in list_models() and not word.startswith(("wrn_", "scale_wrn_")):
        raise ConfigError(
            "no-subject",
            f"{word!r} is neither a run nor a model. {did_you_mean(word, list_models())}".rstrip(),
            fix="Give runs/NAME, a release folder, or a name out of sfumato models list.",
        )
    return _fresh(
        word, data, on or ("generated" if data is None else "test"), num_images, options or {}, seed
    )


def _of_run(
    path: Path,
    data: str | None,
    on: On,
    num_images: int,
    needs_labels: bool,
    seed: int,
    on_progress: OnProgress | None,
) -> Subject:
    released = load(path)
    config = released.config
    if on == "generated":
        if needs_labels:
            raise DataError(
                "no-labels",
                f"generated images have no labels among the classes of {path}",
                why="The loss, and with it its curvature, is that of images with their true classes.",
                fix="Leave out --on for the test images, or give other images with --data.",
            )
        images = _drawn(num_images, config["image_size"], config["channels"])
        sensitive = False
    else:
        name, images = images_of(released, data_of(path, released, data), on)
        sensitive = is_sensitive(path, name, own_data=data is None)
        images = with_one_class(_chosen(images, num_images, seed))
    mean, std = tuple(config["mean"]), tuple(config["std"])
    if isinstance(released.model, FixedFeatures):
        rows = features_of(released.model.extractor, images.images, on_progress=on_progress)
        inputs = rows.clone()
    else:
        inputs = normalise(images.images[:], mean, std)
    resolved = path.resolve()
    return Subject(
        name=resolved.parent.name if resolved.name == "release" else resolved.name,
        model=released.model,
        inputs=inputs,
        labels=images.labels,
        data=images.name,
        split=on,
        sensitive=sensitive,
        epsilon=released.privacy["epsilon"],
    )


def _fresh(
    name: str, data: str | None, on: On, num_images: int, options: Mapping[str, object], seed: int
) -> Subject:
    if on == "generated":
        images = _drawn(num_images, 32, 3)
    elif data is None:
        raise ConfigError(
            "no-data",
            f"no data set is named whose {on} images {name} could be shown",
            fix="Give --data, or --on generated.",
        )
    else:
        splits = load_data(data)
        part = {"test": splits.test, "val": splits.val, "train": splits.train}[on]
        if part is None:
            raise DataError("no-split", f"{data} has no {on} images", fix="Name a split that it has.")
        images = with_one_class(_chosen(part, num_images, seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        channels = images.images.shape[1]
        model = create_model(name, num_classes=len(images.classes), in_channels=channels, **options)
    mean, std = normalisation_for(images.name, channels)
    return Subject(
        name=name,
        model=model.eval(),
        inputs=normalise(images.images[:], mean, std),
        labels=images.labels,
        data=images.name,
        split=on,
        sensitive=on in ("val", "train"),
        trained=False,
    )


def _drawn(num_images: int, image_size: int, channels: int) -> ImageSet:
    """Dead leaves of ten kinds: nobody's data."""
    kinds = torch.arange(num_images) % _NUM_KINDS
    step = len(KINDS) // _NUM_KINDS  # kinds far apart
    leaves = DeadLeaves(image_size=image_size, channels=channels)
    images = leaves.images_of(kinds * step, seed=_GENERATED_SEED)
    return ImageSet(images, kinds, KINDS[::step][:_NUM_KINDS], name="generated")


def _chosen(images: ImageSet, num_images: int, seed: int) -> ImageSet:
    """So many of the images, chosen at random; all, if there are no more."""
    if len(images) <= num_images:
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images.select(order[:num_images].sort().values)
