"""A run on fixed features: extractors fitted on generated images, and settings that follow the budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from scipy.optimize import brentq
from scipy.special import ndtr
from torch import nn

from sfumato.data import KNOWN_SETS, ImageSet
from sfumato.errors import ConfigError
from sfumato.features.cache import OnProgress, checksum, features_of, not_writable
from sfumato.files import cache_home, put, workspace
from sfumato.models.fixed_features import FeatureClassifier, FixedFeatures
from sfumato.training.fixed_rows import ROWS_AT_ONCE, FeatureViews

if TYPE_CHECKING:
    from sfumato.recipes.recipe import Recipe

# The budget at which reference_steps and reference_rate were chosen: ε = 1, δ = 1e-5 on 50,000 images.
_REFERENCE_SIGNAL = 0.268 * 50_000
_NO_NOISE = 20.0  # the ratio above which noise no longer limits the number of steps
_FASTEST = 6.3  # the ratio above which a larger rate does harm whatever the noise: ε = 8 on 50,000 images
_PLAIN_RATE = 2.0  # times reference_rate, without privacy: nothing is clipped then, and batches are smaller


def with_feature_settings(recipe: Recipe, train: ImageSet, *, num_units: int) -> Recipe:
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
    recipe = with_image_options(recipe, train)
    return with_budget_settings(recipe, num_units=num_units, delta=recipe.privacy.delta)


def with_budget_settings(recipe: Recipe, *, num_units: int, delta: float | None) -> Recipe:
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
    entry = (folder or cache_home("features")) / f"extractor-{key}-{num_images}-{seed}.safetensors"
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
            put(work / "extractor", entry)
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
    return FeatureViews(features=features, rows_at_once=ROWS_AT_ONCE if linear else 1)
