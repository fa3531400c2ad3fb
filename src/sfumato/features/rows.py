"""A run on fixed features: rows instead of images, the private mean, and settings that follow the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from scipy.optimize import brentq
from scipy.special import ndtr
from torch import Tensor, nn

from sfumato.accounting import SampledGaussian
from sfumato.data import KNOWN_SETS, ImageSet
from sfumato.data.workspace import workspace
from sfumato.errors import ConfigError
from sfumato.features.cache import OnProgress, cache_home, checksum, features_of, not_writable
from sfumato.features.head import HeadSum, private_mean
from sfumato.gradients import ClippedSum
from sfumato.last_layer import LastLayerViews
from sfumato.models.fixed_features import FeatureClassifier, FixedFeatures
from sfumato.units import Microbatch, Units

if TYPE_CHECKING:
    from sfumato.randomness import RandomSource, UnitRandomness
    from sfumato.recipe import FeatureSettings, Recipe

_ROWS_AT_ONCE = 4096
# The budget at which reference_steps and reference_rate were chosen: ε = 1, δ = 1e-5 on 50,000 images.
_REFERENCE_SIGNAL = 0.268 * 50_000
_NO_NOISE = 20.0  # the ratio above which noise no longer limits the number of steps
_FASTEST = 6.3  # the ratio above which a larger rate does harm whatever the noise: ε = 8 on 50,000 images
_PLAIN_RATE = 2.0  # times reference_rate, without privacy: nothing is clipped then, and batches are smaller


@dataclass(frozen=True, kw_only=True)
class FeatureViews:
    """Takes the place of ``Views`` where the inputs are features: rows of ``features``, as they are."""

    features: Tensor  # (N, d) of the training images, in their order
    rows_at_once: int = _ROWS_AT_ONCE  # a linear head needs little memory, so that more fit than images
    mean: tuple[float, ...] = (0.0,)  # the extractor wants plain pixels from 0 to 1
    std: tuple[float, ...] = (1.0,)
    count: int = 0  # rows have no views of their own

    def microbatches(
        self,
        units: Units,
        indices: Tensor,
        *,
        max_rows: int,
        randomness: UnitRandomness,
        device: torch.device,
    ) -> Iterator[Microbatch]:
        """The units' rows, as many at once as fit."""
        size = max(max_rows, self.rows_at_once)
        if units.are_images:
            for start in range(0, len(indices), size):
                chosen = units.rows[indices[start : start + size]]
                ids = indices[start : start + size]
                yield self._microbatch(units.data, chosen, torch.arange(len(chosen)), ids, device)
            return
        for ids, group in units.pack(indices, max_rows=size, views=1, randomness=randomness):
            sizes = torch.tensor([len(chosen) for chosen in group])
            unit_index = torch.arange(len(group)).repeat_interleave(sizes)
            yield self._microbatch(units.data, torch.cat(group), unit_index, ids, device)

    def _microbatch(
        self, data: ImageSet, chosen: Tensor, unit_index: Tensor, unit_ids: Tensor, device: torch.device
    ) -> Microbatch:
        return Microbatch(
            inputs=self.features[chosen].to(device),
            targets=data.labels[chosen].to(device),
            unit_index=unit_index.to(device),
            num_units=len(unit_ids),
            unit_ids=unit_ids,
        )


def mean_events(settings: FeatureSettings | None) -> tuple[SampledGaussian, ...]:
    """What releasing the private mean costs, for ``Plan.extra_events``."""
    if settings is None or not settings.mean_noise_multiplier:
        return ()
    return (SampledGaussian(noise_multiplier=settings.mean_noise_multiplier),)


@torch.no_grad()
def release_centre(
    model: FixedFeatures,
    views: FeatureViews,
    units: Units,
    *,
    settings: FeatureSettings,
    source: RandomSource,
    private: bool,
) -> None:
    """Put the mean row into the model: with the noise that ``mean_events`` states; exact without privacy."""
    if not settings.mean_noise_multiplier:
        return
    if not private:
        model.centre.copy_(views.features.mean(0))
    else:
        owner = None
        if not units.are_images:  # patients: each counts once, with the mean of all their rows
            sizes = units.offsets.diff()
            owner = torch.empty(len(units.rows), dtype=torch.int64)
            owner[units.rows] = torch.arange(len(sizes)).repeat_interleave(sizes)
        centre = private_mean(
            views.features,
            noise_multiplier=settings.mean_noise_multiplier,
            source=source,
            unit_index=owner,
        )
        model.centre.copy_(centre)


def in_closed_form(model: nn.Module, views: object, units: Units) -> bool:
    """Whether a step is the sum over fixed rows under a linear head, each row a unit."""
    on_features = isinstance(views, FeatureViews) and isinstance(model, FeatureClassifier)
    if not (on_features or isinstance(views, LastLayerViews)) or not units.are_images:
        return False
    head = model.head
    if type(head) is not nn.Linear or head.bias is None or not head.bias.requires_grad:
        return False
    return head.weight.device.type == "cpu" and head.weight.dtype == torch.float32


@torch.no_grad()
def closed_form_sums(
    model: nn.Module, views: object, units: Units
) -> Callable[[Tensor, float], ClippedSum] | None:
    """Clipped sums of a linear head over units, five times as fast as the engine; None if it is not one.

    Call it when everything before the head is final: the head's rows are computed here, once.
    """
    if not in_closed_form(model, views, units):
        return None
    rows = views.features
    if isinstance(model, FeatureClassifier):
        rows = torch.empty(views.features.shape)
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            rows[part] = model.features(views.features[part])
    sums = HeadSum(rows, units.data.labels, num_classes=model.head.out_features)

    def total(indices: Tensor, clip_norm: float) -> ClippedSum:
        chosen = None if len(indices) == len(units) else indices
        weight, bias = model.head.weight.detach(), model.head.bias.detach()
        found = sums(weight, bias, clip_norm=clip_norm, indices=chosen)
        return replace(found, gradients={f"head.{name}": value for name, value in found.gradients.items()})

    return total


def with_feature_settings(recipe: Recipe, train: ImageSet, *, num_units: int, delta: float) -> Recipe:
    """The recipe with what its images and its budget determine; unchanged if it has no [features]."""
    if recipe.features is None:
        from sfumato.models import list_feature_heads

        if recipe.model.name in list_feature_heads():
            raise ConfigError(
                "no-features-section",
                f"the recipe has no [features] section, but the features of {recipe.model.name} are fixed.",
                why="They are fitted on generated images and computed once, as that section says.",
                fix="Begin with one of the recipes fast/*, for example --recipe fast/patches.",
            )
        return _with_rate(recipe, 1.0)
    refused = {"augmentation.views": recipe.augmentation.views}
    refused |= {"data.mean": recipe.data.mean, "data.std": recipe.data.std}
    for name, value in refused.items():
        if value:
            raise ConfigError(
                "fixed-features",
                f"{name} = {value} would change nothing: the features are fixed.",
                why="They are computed once, from each image as it is, with a normalisation of their own.",
                fix=f"Leave {name} out, or use a recipe that trains on the images themselves.",
            )
    return with_budget_settings(with_image_options(recipe, train), num_units=num_units, delta=delta)


def with_budget_settings(recipe: Recipe, *, num_units: int, delta: float) -> Recipe:
    """The recipe with steps and learning rate for its budget, where it leaves them open.

    What counts is μ·N, how far the sum over N units stands out of the noise. Steps grow with its 0.29th and
    the rate with its two-thirds power, for every ε and every number of images. Below the reference the
    product of both goes on with the same power, but in steps that grow again as μ·N falls: few large ones
    with momentum end before they have settled, most of all where classes are not equally frequent.
    """
    settings, training = recipe.features, recipe.training
    ratio, factor = _NO_NOISE, _PLAIN_RATE
    if recipe.privacy.enabled:
        if recipe.privacy.epsilon is not None:
            ratio = min(ratio, gaussian_mu(recipe.privacy.epsilon, delta) * num_units / _REFERENCE_SIGNAL)
        factor = min(ratio, _FASTEST) ** (2 / 3)
    steps = round(settings.reference_steps * max(ratio, 1 / ratio) ** 0.29)
    rate = settings.reference_rate * factor * min(1.0, ratio) ** 0.58  # as much smaller as steps are more
    given = training.num_steps or training.num_epochs  # of full batches, an epoch is a step
    if given is None:
        return _with_rate(replace(recipe, training=replace(training, num_steps=steps)), rate)
    return _with_rate(recipe, rate * steps / given)


def _with_rate(recipe: Recipe, rate: float) -> Recipe:
    """The recipe with this rate, unless it has one."""
    if recipe.training.learning_rate is not None:
        return recipe
    rounded = round(rate, 3) if rate > 0.1 else float(f"{rate:.3g}")
    return replace(recipe, training=replace(recipe.training, learning_rate=rounded))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """μ of the Gaussian mechanism that is exactly (ε, δ)-private (Dong, Roth & Su 2022, corollary 1)."""

    epsilon = min(epsilon, 500.0)  # beyond it exp(ε) overflows, and noise no longer matters

    def excess(mu: float) -> float:
        return ndtr(-epsilon / mu + mu / 2) - math.exp(epsilon) * ndtr(-epsilon / mu - mu / 2) - delta

    return brentq(excess, 1e-6, 100.0 + 10 * epsilon)


def with_image_options(recipe: Recipe, images: ImageSet) -> Recipe:
    """The recipe with what is public of the images among the model's options, unless it says otherwise.

    Their size; and that a mirrored image may be of another class, for sets known to be so: writing.
    """
    from sfumato.models import find_variant

    known = KNOWN_SETS.get(images.name)
    found: dict[str, int | bool] = {"image_size": images.images.shape[-1]}
    if known is not None and not known.mirror:
        found["mirror"] = False
    wanted = find_variant(recipe.model.name).options()
    options = {name: value for name, value in found.items() if name in wanted}
    return replace(recipe, model=replace(recipe.model, options={**options, **recipe.model.options}))


def fit_extractor(
    model: nn.Module,
    recipe: Recipe,
    *,
    folder: Path | None = None,
    on_note: Callable[[str], None] | None = None,
) -> None:
    """Fit the features on generated images, or take them from the cache; no private image enters."""
    if recipe.features is None:
        return
    if not isinstance(model, FixedFeatures):
        raise ConfigError(
            "no-fixed-features",
            f"the recipe has a [features] section, but {recipe.model.name} has no fixed features.",
            fix="Remove the section, or use a model such as patches, scatter or efficientnet_lite0_features.",
        )
    if not hasattr(model.extractor, "fit"):
        return
    seed, num_images = recipe.features.seed, recipe.features.num_images
    nothing = torch.zeros(0, 1, 1, 1, dtype=torch.uint8)
    key = checksum(model.extractor, nothing)  # of the unfitted module: its shapes and settings
    entry = (folder or cache_home()) / f"extractor-{key}-{num_images}-{seed}.safetensors"
    try:
        fitted = load_file(entry) if entry.is_file() else {}
        if fitted.keys() == model.extractor.state_dict().keys():
            model.extractor.load_state_dict(fitted)
            return
    except (OSError, SafetensorError, RuntimeError):
        pass  # not there, or damaged: what can be fitted again is no loss
    if on_note is not None:
        on_note(f"Fitting features on {num_images:,} generated images; kept for later runs.")
    model.extractor.fit(num_images=num_images, seed=seed)
    weights = {name: value.contiguous() for name, value in model.extractor.state_dict().items()}
    try:
        with workspace(entry.parent) as work:
            save_file(weights, work / "extractor")
            (work / "extractor").replace(entry)
    except (OSError, SafetensorError) as error:
        raise not_writable(entry.parent, error) from error


def feature_views(
    model: nn.Module, recipe: Recipe, train: ImageSet, *, on_progress: OnProgress | None = None
) -> FeatureViews | None:
    """The training images' features, from the cache if they are there; None without a [features] section."""
    if recipe.features is None:
        return None
    features = features_of(model.extractor, train.images, on_progress=on_progress)
    linear = isinstance(model, FeatureClassifier)
    return FeatureViews(features=features, rows_at_once=_ROWS_AT_ONCE if linear else 1)
