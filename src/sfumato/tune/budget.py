"""What a search costs: noise for every trial, so that all of it together spends ε and no more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sfumato import accounting
from sfumato.accounting import SampledGaussian, Selection, without_selections
from sfumato.errors import ConfigError
from sfumato.privacy.noise_mechanisms import find_mechanism
from sfumato.privacy.sampling_schemes import find_scheme
from sfumato.privacy.search import Search
from sfumato.recipes.recipe import Recipe, with_settings
from sfumato.run.features import with_budget_settings
from sfumato.run.planning import default_delta, planned_size
from sfumato.run.private_releases import private_releases
from sfumato.tune.ranges import STEPS, Range, Value
from sfumato.tune.settings import TuneSettings
from sfumato.tune.stopping import parameter_of_mean

_SCORE_SHARE = 3.0  # of a trial's μ: a score that is counted besides takes a ninth of the trial's cost


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The cost of a search, complete before its first trial. ``search`` None: it is not counted."""

    settings: TuneSettings
    search: Search | None
    base: Recipe  # the recipe with its delta, steps and rate filled in
    num_trial_units: int
    num_final_units: int
    score_noise: float | None  # in units; None: the scored images are public, or nothing is counted
    step_factor: float  # scaled: a trial's steps over those of the last run

    def trial_recipe(self, chosen: dict[str, Value]) -> Recipe:
        """The recipe of a trial with these settings: more noise, and as many steps as go with it."""
        recipe = with_settings(self.base, dict(chosen))
        if self.settings.strategy == "uncounted":
            return with_settings(recipe, {"privacy.uncounted_search": True})
        if self.search is None or not self.search.is_counted:
            # public images may be fewer than the private ones: their δ is of their own number
            delta = min(self.base.privacy.delta or 1.0, default_delta(self.num_trial_units))
            return with_settings(recipe, {"privacy.delta": delta})
        recipe = with_fewer_steps(recipe, self.step_factor)
        return self._with_noise(recipe, self.search.trial, self.num_trial_units)

    def reference_recipe(self) -> Recipe:
        """The trial that others are compared with: what the account of random stopping is opened with."""
        return self.trial_recipe(_least(self.settings.ranges))

    def final_recipe(self, chosen: dict[str, Value]) -> Recipe:
        """The recipe of the last run."""
        recipe = with_settings(self.base, dict(chosen))
        if self.settings.strategy == "uncounted":
            return with_settings(recipe, {"privacy.uncounted_search": True})
        if self.search is None or not self.search.is_counted:
            return recipe
        return self._with_noise(recipe, self.search.final, self.num_final_units)

    def _with_noise(self, recipe: Recipe, allowed: Sequence[SampledGaussian], num_units: int) -> Recipe:
        assert self.search is not None
        noise = accounting.covered_noise(
            lambda value: events_of(recipe, num_units, value),
            allowed,
            in_renyi=self.search.in_renyi,
            guess=allowed[-1].noise_multiplier,
        )
        changed = {"privacy.epsilon": None, "privacy.noise_multiplier": noise}
        return with_settings(recipe, {**changed, "privacy.accountant": self.accountant})

    @property
    def accountant(self) -> str:
        """The one that can count this search."""
        counted_by = self.base.privacy.accountant
        return "rdp" if self.search is not None and self.search.in_renyi else counted_by

    @property
    def epsilon(self) -> float:
        """Of the whole search, as it is stated; without one that is counted, of one run."""
        if self.search is None or not self.search.is_counted:
            assert self.base.privacy.epsilon is not None
            return self.base.privacy.epsilon
        return _epsilon(self.search.events(), self.base, self.accountant)

    @property
    def trial_epsilon(self) -> float:
        """What one trial costs by itself."""
        if self.search is None or not self.search.is_counted:
            return self.epsilon
        return _epsilon((*self.search.trial, *self.search.score), self.base, self.accountant)


def plan_search(
    settings: TuneSettings, *, num_trial_units: int, num_final_units: int, delta: float
) -> Budget:
    """Calibrate the search to the recipe's ε.

    Guarantee: ``budget.epsilon`` is at most ε, whatever settings the trials turn out to have.
    """
    base = _filled(settings.recipe, num_final_units, delta)
    plain = Budget(
        settings=settings,
        search=None,
        base=base,
        num_trial_units=num_trial_units,
        num_final_units=num_final_units,
        score_noise=None,
        step_factor=1.0,
    )
    if settings.strategy == "public":
        scored = f"images of {settings.search_data}"
        search = Search(strategy="public", num_trials=settings.num_trials, scored_on=scored)
        return replace(plain, search=search)
    if settings.strategy == "uncounted":
        return plain
    return _random_stopping(plain) if settings.strategy == "random-stopping" else _scaled(plain)


def _random_stopping(plain: Budget) -> Budget:
    """Noise for a trial such that the best of a random number of them costs ε.

    All trials are compared with one that has the smallest batches and the fewest steps in the ranges: its
    curve rises most steeply, so that the others need little more noise than an ε of their own would ask for.
    """
    settings, units = plain.settings, plain.num_trial_units
    reference = with_settings(plain.base, _least(settings.ranges))
    mean, shape = float(settings.num_trials), settings.shape
    parameter_of_mean(mean, shape)  # what cannot be drawn is refused here

    def cost(noise: float) -> float:
        whole = Selection(events=events_of(reference, units, noise), mean_runs=mean, shape=shape)
        return _epsilon((whole,), plain.base, "rdp")

    noise = accounting.solve_noise_multiplier(cost, _total(plain))
    trial = events_of(reference, units, noise)
    score = _covering_score(trial, in_renyi=True)
    search = Search(
        strategy="random-stopping",
        num_trials=mean,
        shape=shape,
        trial=trial,
        scored_on=_scored_on(settings),
    )
    return replace(plain, search=search, score_noise=None if settings.scores_are_public else score)


def _scaled(plain: Budget) -> Budget:
    """Noise for trials that take a share of ε together, then for the last run, which takes what is left.

    The linear scaling rule (Panda et al. 2024): how far the weights may go from where they began, rate times
    steps, grows in proportion to what the noise leaves of the sum, μ. So a trial has the rate of the last
    run, and steps in proportion to its smaller μ: it costs less time too, and a rate that is too large for
    the network shows in the trial already.
    """
    whole = _with_noises(plain, plain.base)  # with all steps, to see how μ is divided
    factor = _mu(whole.trial, plain.base) / _mu(whole.final, plain.base)
    search = _with_noises(plain, with_fewer_steps(plain.base, factor))
    score_noise = None
    if not plain.settings.scores_are_public:
        counted = search.score[0].noise_multiplier if search.score else None
        score_noise = counted or _covering_score(search.trial, in_renyi=False)
    return replace(plain, search=search, score_noise=score_noise, step_factor=factor)


def _with_noises(plain: Budget, trial_recipe: Recipe) -> Search:
    settings, base, accountant = plain.settings, plain.base, plain.base.privacy.accountant

    def search_of(noise: float, final: tuple[SampledGaussian, ...]) -> Search:
        trial = events_of(trial_recipe, plain.num_trial_units, noise)
        return Search(
            strategy="scaled",
            num_trials=settings.num_trials,
            trial=trial,
            score=() if settings.scores_are_public else _counted_score(trial),
            final=final,
            scored_on=_scored_on(settings),
        )

    noise = accounting.solve_noise_multiplier(
        lambda value: _epsilon(search_of(value, ()).events(), base, accountant),
        settings.search_share * _total(plain),
    )
    final_noise = accounting.solve_noise_multiplier(
        lambda value: _epsilon(
            search_of(noise, events_of(base, plain.num_final_units, value)).events(), base, accountant
        ),
        _total(plain),
    )
    return search_of(noise, events_of(base, plain.num_final_units, final_noise))


def _counted_score(trial: Sequence[SampledGaussian]) -> tuple[SampledGaussian, ...]:
    """The event of a score that is counted besides; none where whole-set steps cover it.

    A unit is trained on or scored. Where both are plain Gaussian sums, a score that costs no more than the
    training costs nothing besides it; no loss distribution is known to say so of sampled steps.
    """
    if all(event.sampling_rate == 1 for event in trial):
        return ()
    steps = trial[-1]
    rough_mu = steps.sampling_rate * math.sqrt(steps.num_steps) / steps.noise_multiplier
    return (SampledGaussian(noise_multiplier=_SCORE_SHARE / rough_mu),)


def _mu(events: Sequence[SampledGaussian], base: Recipe) -> float:
    assert base.privacy.delta is not None
    return accounting.mu_gdp(events, delta=base.privacy.delta, neighbouring=base.privacy.neighbouring)[0]


def with_fewer_steps(recipe: Recipe, factor: float) -> Recipe:
    """The recipe with ``factor`` times its steps or epochs, at least one step."""
    if factor == 1:
        return recipe
    if recipe.training.num_epochs is not None:
        return with_settings(recipe, {"training.num_epochs": recipe.training.num_epochs * factor})
    assert recipe.training.num_steps is not None  # filled in
    return with_settings(recipe, {"training.num_steps": max(1, round(recipe.training.num_steps * factor))})


def events_of(recipe: Recipe, num_units: int, noise_multiplier: float) -> tuple[SampledGaussian, ...]:
    """What a run of the recipe with this noise does to ``num_units``: its releases, then its steps."""
    scheme, mechanism = find_scheme(recipe.privacy.sampling), find_mechanism(recipe.privacy.mechanism)
    batch_size, num_steps = planned_size(recipe, num_units)
    assert batch_size is not None  # planned for a fixed noise, so that nothing is left open
    steps = scheme.event(
        mechanism.event(noise_multiplier),
        sampling_rate=scheme.sampling_rate(min(batch_size, num_units), num_units),
        num_steps=num_steps or 1,
    )
    return (*(release.event for release in private_releases(recipe)), *without_selections((steps,)))


def _filled(recipe: Recipe, num_units: int, delta: float) -> Recipe:
    """The recipe with what the total budget determines: trials vary it, and do not follow their own."""
    recipe = with_settings(recipe, {"privacy.delta": delta})
    recipe = with_budget_settings(recipe, num_units=num_units, delta=delta)
    if recipe.training.num_steps is None and recipe.training.num_epochs is None:
        raise ConfigError(
            "no-steps",
            "the recipe does not say how long to train",
            fix="Give training.num_steps or num_epochs.",
        )
    return recipe


def _least(ranges: Sequence[Range]) -> dict[str, Value]:
    found = {one.key: one.least for one in ranges if one.key in STEPS}
    whole = ("training.batch_size", "training.num_steps")
    return {key: int(value) if key in whole else value for key, value in found.items() if value is not None}


def _covering_score(trial: Sequence[SampledGaussian], *, in_renyi: bool) -> float:
    """The least noise of a score that costs no more than training: nobody is part of both."""
    return accounting.covered_noise(
        lambda noise: (SampledGaussian(noise_multiplier=noise),), trial, in_renyi=in_renyi
    )


def _scored_on(settings: TuneSettings) -> str:
    if settings.scores_are_public:
        return "public images"
    return f"{100 * settings.holdout:g} % of the private {settings.recipe.privacy.unit}s, with noise"


def _total(plain: Budget) -> float:
    epsilon = plain.base.privacy.epsilon
    assert epsilon is not None  # ``TuneSettings`` refuses a search without
    return epsilon


def _epsilon(events: Sequence[accounting.Event], base: Recipe, accountant: str) -> float:
    assert base.privacy.delta is not None
    return accounting.epsilon(
        events, delta=base.privacy.delta, accountant=accountant, neighbouring=base.privacy.neighbouring
    )
