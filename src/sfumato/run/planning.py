"""Steps, batch size and noise of a run: what a recipe's budget gives for its number of units."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from sfumato.errors import ConfigError, PrivacyError
from sfumato.privacy.plan import Plan, PlanSettings
from sfumato.privacy.sampling_schemes import SamplingScheme, find_scheme
from sfumato.run.private_releases import private_releases
from sfumato.sampling import PoissonSampling

if TYPE_CHECKING:
    from sfumato.recipes.recipe import PrivacySettings, Recipe
    from sfumato.run.provenance import Provenance
    from sfumato.training.components import SearchedRun


def check_holdout(recipe: Recipe, fraction: float | None) -> None:
    """Refuse to set units aside by their content where neighbours have equally many units."""
    if fraction and recipe.privacy.enabled and recipe.privacy.neighbouring == "replace-one":
        raise PrivacyError(
            "holdout-with-replace-one",
            f"{100 * fraction:g} % of the units are set aside, and neighbouring data have one unit replaced.",
            why="Each unit's own content decides whether it is set aside, so that the number that is trained "
            "on, which the plan states, can tell neighbours apart with certainty.",
            fix='Use neighbouring = "add-or-remove", or give validation images of their own.',
        )


def build_plan(
    recipe: Recipe,
    *,
    num_units: int,
    force: bool = False,
    provenance: Provenance | None = None,
    sampling: SamplingScheme | None = None,
    searched: SearchedRun | None = None,
) -> Plan | None:
    """The plan that the recipe's budget gives for ``num_units``; None without privacy.

    What the first weights cost the same images, as ``provenance`` says, is part of the plan and of its ε.
    ``sampling`` replaces the recipe's scheme; ``searched`` is the search that the run is part of. ``force``
    accepts a delta above 1 / ``num_units``.
    """
    settings = recipe.privacy
    if not settings.enabled:
        return None
    weights_events = () if provenance is None else provenance.events
    plan_settings = PlanSettings(
        clip_norm=settings.clip_norm,
        unit=settings.unit,
        accountant=settings.accountant,
        neighbouring=settings.neighbouring,
        sampling=sampling or settings.sampling,
        mechanism=settings.mechanism,
        extra_events=(*(release.event for release in private_releases(recipe)), *weights_events),
        tuning_runs=settings.tuning_runs,
        uncounted_search=settings.uncounted_search,
        search=None if searched is None else searched.search,
        search_part="trial" if searched is None else searched.part,
        max_images_per_unit=settings.max_images_per_patient if settings.unit == "patient" else None,
        allow_large_delta=force,
    )
    delta = delta_of(settings, num_units)
    batch_size, num_steps = planned_size(recipe, num_units, sampling=sampling)
    if settings.epsilon is not None:
        return Plan.calibrate(
            epsilon=settings.epsilon,
            delta=delta,
            num_examples=num_units,
            batch_size=batch_size,
            num_steps=num_steps,
            noise_multiplier=settings.noise_multiplier,
            **plan_settings,
        )
    if settings.noise_multiplier is None:
        raise _no_budget()
    if batch_size is None or num_steps is None:
        raise _no_steps()
    return Plan(
        num_examples=num_units,
        batch_size=batch_size,
        num_steps=num_steps,
        noise_multiplier=settings.noise_multiplier,
        delta=delta,
        **plan_settings,
    )


def planned_size(
    recipe: Recipe, num_units: int, *, sampling: SamplingScheme | None = None
) -> tuple[float | None, int | None]:
    """Expected batch size and number of steps; None for the one that the budget has to determine.

    A private run without a batch size has that of its scheme, ``sampling`` or the recipe's, if there is one.
    """
    training, privacy = recipe.training, recipe.privacy
    batch_size: float | None = training.batch_size
    if privacy.enabled and batch_size is None:
        batch_size = find_scheme(sampling or privacy.sampling).default_batch_size(num_units)
    solve_batch = None not in (privacy.epsilon, privacy.noise_multiplier, training.num_steps)
    if batch_size is None and not (privacy.enabled and solve_batch):
        batch_size = max(1, math.ceil(num_units / 8))
    num_steps = training.num_steps
    if training.num_epochs is not None and batch_size is not None:
        num_steps = max(1, round(training.num_epochs * num_units / batch_size))
    return batch_size, num_steps


def plain_sampler(recipe: Recipe, num_units: int) -> PoissonSampling:
    """Batches for training without privacy."""
    batch_size, num_steps = planned_size(recipe, num_units)
    if batch_size is None or num_steps is None:
        raise _no_steps()
    return PoissonSampling(sampling_rate=min(1.0, batch_size / num_units), num_steps=num_steps)


def with_delta(recipe: Recipe, num_units: int) -> Recipe:
    """The recipe with its delta filled in; unchanged without privacy."""
    if not recipe.privacy.enabled:
        return recipe
    return replace(recipe, privacy=replace(recipe.privacy, delta=delta_of(recipe.privacy, num_units)))


def delta_of(settings: PrivacySettings, num_units: int) -> float:
    """The delta that the settings give, else the default for so many units."""
    return default_delta(num_units) if settings.delta is None else settings.delta


def default_delta(num_units: int) -> float:
    """The largest power of ten that is at most 1 / (2 num_units): above it the doctor calls delta weak."""
    exponent = -1
    while 10.0**exponent > 0.5 / num_units:
        exponent -= 1
    return 10.0**exponent


def _no_budget() -> ConfigError:
    return ConfigError(
        "no-budget",
        "neither epsilon nor noise_multiplier is given",
        why="How much privacy to keep is your decision; there is no safe default.",
        fix="Give --epsilon (8 is weak, 3 medium, 1 strong), or --no-privacy for data that need none.",
    )


def _no_steps() -> ConfigError:
    return ConfigError(
        "no-steps",
        "the recipe does not say how long to train",
        fix="Give training.num_steps or num_epochs.",
    )
