"""What a search was asked to be: everything that may not change when the same command goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from sfumato.errors import ConfigError, PrivacyError
from sfumato.recipes.recipe import Recipe
from sfumato.recipes.settings import to_table
from sfumato.tune.ranges import STEPS, Range

Strategy = Literal["scaled", "random-stopping", "public", "uncounted"]
Sampler = Literal["tpe", "random", "grid"]
Pruner = Literal["none", "median", "threshold"]
STRATEGIES: tuple[Strategy, ...] = ("scaled", "random-stopping", "public", "uncounted")


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """A search: the recipe with its budget, what is varied, and how it is paid for."""

    recipe: Recipe  # with data and epsilon: the total
    ranges: tuple[Range, ...]
    num_trials: int  # under random stopping their mean
    strategy: Strategy = "scaled"
    sampler: Sampler | None = None  # None: random where trials must be alike, else tpe
    pruner: Pruner = "none"
    prune_below: float = 0.0  # accuracy, of the threshold pruner
    search_share: float = 0.4  # scaled: of ε, for all trials together
    shape: float = 1.0  # random stopping: of the distribution of the number of trials
    holdout: float = 0.1  # of the units, to score trials on, where no public images are named
    search_data: str | None = None  # public: where the trials train

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_sampler(self)
        _check_pruner(self)
        _check_data(self)

    @property
    def chosen_sampler(self) -> Sampler:
        return self.sampler or ("random" if self.strategy == "random-stopping" else "tpe")

    @property
    def scores_are_public(self) -> bool:
        """Whether scoring a trial tells nothing of private images."""
        return self.strategy == "public" or self.recipe.data.val_is_public

    @property
    def has_final_run(self) -> bool:
        """Whether a last run follows the trials; otherwise the best trial is what comes out."""
        return self.strategy != "random-stopping"

    def identity(self) -> dict[str, Any]:
        """As JSON values: what the same search is recognised by."""
        recipe = to_table(self.recipe)
        recipe.pop("performance", None)
        recipe.pop("reference", None)
        return {
            "recipe": recipe,
            "over": {one.key: one.text for one in self.ranges},
            "num_trials": self.num_trials,
            "strategy": self.strategy,
            "sampler": self.chosen_sampler,
            "pruner": self.pruner,
            "prune_below": self.prune_below,
            "search_share": self.search_share if self.strategy == "scaled" else None,
            "shape": self.shape if self.strategy == "random-stopping" else None,
            "holdout": self.holdout,
            "search_data": self.search_data,
        }


def _check_numbers(settings: TuneSettings) -> None:
    if not 2 <= settings.num_trials <= 10_000:
        raise ConfigError(
            "search-out-of-range",
            f"{settings.num_trials} trials cannot be searched.",
            fix="Give --trials between 2 and 10,000.",
        )
    if not 0 < settings.search_share < 1 or not 0 < settings.holdout < 1:
        raise ConfigError(
            "search-out-of-range",
            f"--search-share {settings.search_share:g} or --holdout {settings.holdout:g} is no share.",
            fix="Give numbers above 0 and below 1.",
        )
    privacy = settings.recipe.privacy
    if privacy.mechanism != "gaussian" and settings.strategy in ("scaled", "random-stopping"):
        raise ConfigError(
            "search-needs-gaussian",
            f"privacy.mechanism = {privacy.mechanism!r} with --strategy {settings.strategy}.",
            why="Which trials cost no more than others is known for Gaussian noise.",
            fix='Use privacy.mechanism = "gaussian".',
        )
    if not privacy.enabled or privacy.epsilon is None or privacy.noise_multiplier is not None:
        raise ConfigError(
            "no-budget",
            "a search needs epsilon, the total that it may spend, and no fixed noise.",
            why="The noise of every trial is calibrated, so that all of it costs no more.",
            fix="Give --epsilon (8 is weak, 3 medium, 1 strong).",
        )
    if privacy.tuning_runs is not None or (privacy.uncounted_search and settings.strategy != "uncounted"):
        raise ConfigError(
            "contradictory-search",
            "the recipe says already how its search is counted.",
            fix="Leave privacy.tuning_runs and privacy.uncounted_search to sfumato tune.",
        )


def _check_sampler(settings: TuneSettings) -> None:
    if settings.strategy == "random-stopping" and settings.chosen_sampler != "random":
        raise PrivacyError(
            "adaptive-search",
            f"--sampler {settings.chosen_sampler} with random stopping.",
            why="The theorem of Papernot and Steinke is about trials that are drawn independently of each "
            "other; a sampler that learns from scores makes later trials depend on earlier ones.",
            fix="Use --sampler random, or --strategy scaled, whose trials may learn from each other.",
        )
    if settings.chosen_sampler == "grid" and any(one.kind != "choices" for one in settings.ranges):
        raise ConfigError(
            "no-grid",
            "--sampler grid needs points, and a range has none.",
            fix="Give choices a,b,c or a number of points: log:0.1:10:5.",
        )
    points = math.prod(len(one.choices) for one in settings.ranges)
    if settings.chosen_sampler == "grid" and settings.num_trials > points:
        raise ConfigError(
            "no-grid",
            f"a grid of {points} points has no {settings.num_trials} trials.",
            why="Trials beyond the grid would spend budget on points that were tried already.",
            fix=f"Give --trials {points} or fewer, or more points.",
        )
    varied = [one.key for one in settings.ranges if one.key in STEPS]
    sampled = settings.recipe.privacy.sampling != "full"
    if settings.strategy == "scaled" and sampled and varied:
        raise PrivacyError(
            "search-varies-steps",
            f"--over {varied[0]} with --strategy scaled on sampled batches.",
            why="The steps of later runs would follow the scores of earlier ones, and no loss distribution "
            "bounds runs whose cost is chosen on the way.",
            fix="Search over other settings: at fixed steps the learning rate is what counts. Or use "
            "--strategy random-stopping, public, or a recipe of whole-set steps such as fast/patches.",
        )


def _check_pruner(settings: TuneSettings) -> None:
    if settings.pruner == "none":
        return
    if not settings.scores_are_public and settings.strategy != "uncounted":
        raise PrivacyError(
            "private-pruning",
            f"--pruner {settings.pruner} would decide by scores of private images during each trial.",
            why="Every such score is one more release; the search counts one at the end of a trial.",
            fix="Leave the pruner out, or name public validation images (data.val_is_public).",
        )
    if settings.strategy == "random-stopping" and settings.pruner == "median":
        raise PrivacyError(
            "adaptive-search",
            "--pruner median with random stopping.",
            why="It ends a trial because of other trials, which must be independent of each other.",
            fix="Use --pruner threshold, or none.",
        )


def _check_data(settings: TuneSettings) -> None:
    if (settings.strategy == "public") != (settings.search_data is not None):
        raise ConfigError(
            "no-search-data",
            "--strategy public and --search-data belong together.",
            why="The trials then train on public images, and cost nothing.",
            fix="For example --strategy public --search-data cifar100, or generated.",
        )
    if settings.recipe.data.holdout:
        raise ConfigError(
            "contradictory-search",
            f"data.holdout = {settings.recipe.data.holdout:g} is set in the recipe.",
            why="The search sets images aside for its trials; the model that comes out needs none.",
            fix="Leave data.holdout out and give --holdout.",
        )
