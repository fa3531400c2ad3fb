"""A run on fixed features: extractors fitted on generated images, and settings that follow the budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from scipy.optimize import brentq
from scipy.special import ndtr
from torch import Tensor, nn

from sfumato.data import KNOWN_SETS, ImageSet
from sfumato.data.generated import fitting_images
from sfumato.data.pixels import Pixels
from sfumato.errors import ConfigError
from sfumato.features.cache import OnProgress, checksum, complete_parts, features_of, not_writable
from sfumato.files import cache_home, put, workspace
from sfumato.models import find_variant, list_feature_heads
from sfumato.models.backbones import FEATURES
from sfumato.models.fixed_features import FeatureClassifier, FixedFeatures
from sfumato.run.planning import delta_of
from sfumato.training.fixed_rows import ROWS_AT_ONCE, FeatureViews
from sfumato.training.ranks import ALONE, Ranks, first_on_host

if TYPE_CHECKING:
    from sfumato.recipes.feature_settings import FeatureSettings
    from sfumato.recipes.recipe import Recipe

# The budget at which reference_steps and reference_rate were chosen: ε = 1, δ = 1e-5 on 50,000 images.
_REFERENCE_SIGNAL = 0.268 * 50_000
_MAX_RATIO = 20.0  # above it noise no longer limits the number of steps
_MAX_RATIO_FOR_RATE = 6.3  # above it a larger rate does harm whatever the noise: ε = 8 on 50,000 images
_DRAWN_TO_TIME = 32  # generated images
_NON_PRIVATE_FACTOR = 2.0  # of reference_rate: without privacy nothing is clipped, and batches are smaller


@runtime_checkable
class FittedExtractor(Protocol):
    """An extractor with weights of its own, made from generated images; others have public ones or none."""

    def fit(self, *, num_images: int, seed: int, on_progress: OnProgress | None) -> nn.Module:
        """Fit it, in place; equal seeds give equal features."""


def with_feature_settings(recipe: Recipe, train: ImageSet, *, num_units: int) -> Recipe:
    """The recipe with what its images and its budget determine; unchanged if it has no [features]."""
    if recipe.features is None:
        if recipe.model.name in (*list_feature_heads(), FEATURES):
            raise ConfigError(
                "no-features-section",
                f"the recipe has no [features] section, but the features of {recipe.model.name} are fixed.",
                why="They are fitted on generated images and computed once, as that section says.",
                fix="Begin with one of the recipes fast/*, for example --recipe fast/patches.",
            )
        return _with_rate(recipe, 1.0)
    without_effect = {
        "augmentation.views": recipe.augmentation.views,
        "data.mean": recipe.data.mean,
        "data.std": recipe.data.std,
    }
    for name, value in without_effect.items():
        if value:
            raise ConfigError(
                "fixed-features",
                f"{name} = {value} would change nothing: the features are fixed.",
                why="They are computed once, from each image as it is, with a normalisation of their own.",
                fix=f"Leave {name} out, or use a recipe that trains on the images themselves.",
            )
    recipe = with_image_options(recipe, train)
    return with_budget_settings(recipe, num_units=num_units, delta=delta_of(recipe.privacy, num_units))


def with_budget_settings(recipe: Recipe, *, num_units: int, delta: float) -> Recipe:
    """The recipe with steps and learning rate for its budget, where its [features] leave them open.

    What counts is μ·N, how far the sum over N units stands out of the noise. Steps grow with its 0.29th and
    the rate with its two-thirds power, for every ε and every number of images. Below the reference the
    product of both goes on with the same power, but in steps that grow again as μ·N falls: few large ones
    with momentum end before they have settled, most of all where classes are not equally frequent.
    """
    settings, training = recipe.features, recipe.training
    if settings is None:
        return recipe
    ratio, factor = _MAX_RATIO, _NON_PRIVATE_FACTOR
    if recipe.privacy.enabled:
        if recipe.privacy.epsilon is not None:
            ratio = min(ratio, gaussian_mu(recipe.privacy.epsilon, delta) * num_units / _REFERENCE_SIGNAL)
        factor = min(ratio, _MAX_RATIO_FOR_RATE) ** settings.rate_power
    steps = round(settings.reference_steps * max(ratio, 1 / ratio) ** 0.29)
    rate = settings.reference_rate * factor * min(1.0, ratio) ** 0.58  # as much smaller as steps are more
    given_steps = training.num_steps or training.num_epochs  # of full batches, an epoch is a step
    if given_steps is None:
        return _with_rate(replace(recipe, training=replace(training, num_steps=steps)), rate)
    return _with_rate(recipe, rate * steps / given_steps)


def _with_rate(recipe: Recipe, rate: float) -> Recipe:
    """The recipe with this learning rate, unless it gives one."""
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
    """The recipe with public facts of the images among the model's options, where the recipe gives none.

    These are the image size; and ``mirror=False`` for known sets where a mirrored image may be of another
    class, such as digits.
    """
    known = KNOWN_SETS.get(images.name)
    facts: dict[str, int | bool] = {"image_size": images.images.shape[-1]}
    if known is not None and not known.mirror:
        facts["mirror"] = False
    accepted = find_variant(recipe.model.name).options()
    options = {name: value for name, value in facts.items() if name in accepted}
    return replace(recipe, model=replace(recipe.model, options={**options, **recipe.model.options}))


def fit_extractor(
    model: nn.Module,
    recipe: Recipe,
    *,
    folder: Path | None = None,
    on_note: Callable[[str], None] | None = None,
    on_progress: OnProgress | None = None,
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
    extractor = model.extractor
    if not isinstance(extractor, FittedExtractor):
        return
    seed, num_images = recipe.features.seed, recipe.features.num_images
    entry = _entry(extractor, recipe.features, folder)
    if _loaded(extractor, entry):
        return
    if on_note is not None:
        on_note(f"Fitting features on {num_images:,} generated images; kept for later runs.")
    extractor.fit(num_images=num_images, seed=seed, on_progress=on_progress)
    weights = {name: value.contiguous() for name, value in extractor.state_dict().items()}
    try:
        with workspace(entry.parent) as work:
            save_file(weights, work / "extractor")
            put(work / "extractor", entry)
    except (OSError, SafetensorError) as error:
        raise not_writable(entry.parent, error) from error


def load_extractor(model: nn.Module, recipe: Recipe) -> bool:
    """Take the fitted features from the cache; False if they are not there and would have to be fitted.

    Then they get numbers of their shape and of no meaning, enough to see what they cost.
    """
    if recipe.features is None or not isinstance(model, FixedFeatures):
        return True
    extractor = model.extractor
    if not isinstance(extractor, FittedExtractor):
        return True
    if _loaded(extractor, _entry(extractor, recipe.features, None)):
        return True
    for value in extractor.state_dict().values():
        if value.is_floating_point():
            value.copy_(0.01 * torch.randn(value.shape))
    return False


def fitting_note(recipe: Recipe, shape: Sequence[int]) -> str:
    """What an estimate leaves out as long as features for images of ``shape`` are not fitted."""
    assert recipe.features is not None  # else nothing is fitted
    num_images, few = recipe.features.num_images, _DRAWN_TO_TIME
    start = time.perf_counter()
    fitting_images(few, image_size=shape[-1], channels=shape[1], seed=recipe.features.seed)
    minutes = math.ceil((time.perf_counter() - start) * num_images / few / 60)
    return (
        f"Features are not fitted yet. Training draws {num_images:,} images for them first, about {minutes} "
        "min, and fits them; both once for this size, and not in the time below."
    )


def _entry(extractor: nn.Module, settings: FeatureSettings, folder: Path | None) -> Path:
    """Where it is kept, by the shapes and settings of the unfitted module."""
    key = checksum(extractor, torch.zeros(0, 1, 1, 1, dtype=torch.uint8))
    name = f"extractor-{key}-{settings.num_images}-{settings.seed}.safetensors"
    return (folder or cache_home("features")) / name


def _loaded(extractor: nn.Module, entry: Path) -> bool:
    """Whether the entry was there, whole, and is now in the extractor."""
    try:
        fitted = load_file(entry) if entry.is_file() else {}
        if fitted.keys() != extractor.state_dict().keys():
            return False
        extractor.load_state_dict(fitted)
        return True
    except (OSError, SafetensorError, RuntimeError):
        return False  # absent or damaged: it is fitted again


def feature_views(
    model: nn.Module,
    recipe: Recipe,
    train: ImageSet,
    *,
    on_progress: OnProgress | None = None,
    compute: bool = True,
    ranks: Ranks = ALONE,
) -> FeatureViews | None:
    """The training images' features, from the cache if they are there; None without a [features] section.

    Without ``compute`` they have their shape alone.
    """
    if recipe.features is None or not isinstance(model, FixedFeatures):
        return None
    if compute:
        features = share_features(model.extractor, train.images, ranks, on_progress=on_progress)
    else:
        features = torch.empty(len(train), model.extractor.num_features, device="meta")
    linear = isinstance(model, FeatureClassifier)
    return FeatureViews(features=features, rows_at_once=ROWS_AT_ONCE if linear else 1)


def share_features(
    extractor: nn.Module, images: Pixels, ranks: Ranks, *, on_progress: OnProgress | None = None
) -> Tensor:
    """The features of ``images``; what is not in the cache the ranks of each host compute together."""
    if ranks.size > 1:
        worker = (ranks.number_on_host, ranks.size_on_host)
        complete_parts(extractor, images, worker=worker, on_progress=on_progress)
        ranks.agree()  # all parts are there
    with first_on_host(ranks):  # puts them together
        return features_of(extractor, images, on_progress=on_progress)
