"""What a recipe asks to be released besides the steps: one list, which is planned, checked, done and told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.training.private_counts import PrivateRelease

if TYPE_CHECKING:
    from sfumato.recipes.recipe import Recipe

MEAN_ROW, CLASS_COUNTS, SCORE_HISTOGRAM = "mean row", "class counts", "score histogram"
_SENTENCES = {
    MEAN_ROW: "the mean of the fixed features over all {unit}s",
    CLASS_COUNTS: "the number of {unit}s of each class",
    SCORE_HISTOGRAM: "a histogram of the trained model's scores of the {unit}s of either class",
}
_OF_FINDINGS = {
    CLASS_COUNTS: "the number of {unit}s with and without each finding",
    SCORE_HISTOGRAM: "a histogram, for each finding, of the trained model's scores of the {unit}s with and "
    "without it",
}


def private_releases(recipe: Recipe) -> tuple[PrivateRelease, ...]:
    """Every noisy release of a run with this recipe besides its steps; none without privacy."""
    if not recipe.privacy.enabled:
        return ()
    features, decision = recipe.features, recipe.decision
    found = []
    if features is not None and features.mean_noise_multiplier:
        found.append(PrivateRelease(what=MEAN_ROW, noise_multiplier=features.mean_noise_multiplier))
    if recipe.data.class_counts == "released":
        noise = decision.class_counts_noise_multiplier
        found.append(PrivateRelease(what=CLASS_COUNTS, noise_multiplier=noise))
    if decision.threshold == "released":
        noise = decision.threshold_noise_multiplier
        found.append(PrivateRelease(what=SCORE_HISTOGRAM, noise_multiplier=noise))
    return tuple(found)


def release_of(recipe: Recipe, what: str) -> PrivateRelease | None:
    """The one of this name, if the recipe asks for it."""
    return next((release for release in private_releases(recipe) if release.what == what), None)


def release_sentences(recipe: Recipe) -> list[str]:
    """The releases in words, for the statement."""
    unit = recipe.privacy.unit
    many = recipe.training.loss == "binary-cross-entropy"
    sentences = _SENTENCES | (_OF_FINDINGS if many else {})
    return [
        f"Besides the steps, {sentences[release.what].format(unit=unit)} was released once, with Gaussian "
        f"noise of standard deviation {release.noise_multiplier:g} times what one {unit} can change, and is "
        "counted in ε."
        for release in private_releases(recipe)
    ]
