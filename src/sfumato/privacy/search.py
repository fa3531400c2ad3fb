"""A search for settings that is counted as a whole: what one trial may cost, and what all of it costs.

A plan that is part of a search states the cost of the search, never that of its own steps: which run came out
was decided by looking at the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, cast

import msgspec

from sfumato.accounting import (
    Event,
    SampledGaussian,
    Selection,
    event_from_dict,
    event_to_dict,
    is_covered,
    without_selections,
)
from sfumato.errors import ConfigError, PrivacyError

Strategy = Literal["random-stopping", "scaled", "public"]
Part = Literal["trial", "final"]
MOST_TRIALS = 100_000


class _Values(TypedDict):
    strategy: Strategy
    num_trials: float
    shape: float | Literal["poisson"]
    trial: list[dict[str, Any]]
    score: list[dict[str, Any]]
    final: list[dict[str, Any]]
    scored_on: str


@dataclass(frozen=True, kw_only=True)
class Search:
    """Trials on private data, or on public ones, and what may be said of them.

    Guarantee: ``events`` bound the joint release of what the search lets out, if every trial is covered by
    ``trial``, every score of private images is noisy as ``score`` says or covered by ``trial`` (a unit is
    trained on or scored, never both), and the last run is covered by ``final``:

    - random-stopping: the model of the best trial and its settings, nothing of the others. Their number is
      drawn beforehand from the truncated negative binomial distribution of mean ``num_trials`` and ``shape``;
      trials are drawn independently of each other (Papernot and Steinke 2022, theorem 2).
    - scaled: everything, since all is composed; later trials may be chosen by earlier ones.
    - public: the last run; no trial saw a private image.
    """

    strategy: Strategy
    num_trials: float  # under random stopping their mean
    scored_on: str  # in words: which images decide
    shape: float = 1.0
    trial: tuple[SampledGaussian, ...] = ()
    score: tuple[SampledGaussian, ...] = ()  # counted besides; empty if ``trial`` covers the score
    final: tuple[SampledGaussian, ...] = ()

    def __post_init__(self) -> None:
        whole = self.strategy == "random-stopping" or float(self.num_trials).is_integer()
        if not (1 <= self.num_trials <= MOST_TRIALS and whole):
            raise ConfigError(
                "search-out-of-range",
                f"a search of {self.num_trials} trials is not possible.",
                fix=f"Give a whole number between 1 and {MOST_TRIALS:,}.",
            )

    @property
    def is_counted(self) -> bool:
        """Whether its trials saw private images; what a search on public ones does is nobody's cost."""
        return self.strategy != "public"

    @property
    def in_renyi(self) -> bool:
        """Whether it is counted in Rényi DP alone, in which unlike trials can be compared."""
        return self.strategy == "random-stopping"

    def events(self) -> tuple[Event, ...]:
        """The whole search, from the first trial on: how many there will be was decided before it."""
        if self.strategy == "random-stopping":
            whole = (*self.trial, *self.score)
            return (Selection(events=whole, mean_runs=self.num_trials, shape=self.shape),)
        count = int(self.num_trials)
        trials = (replace(event, num_steps=event.num_steps * count) for event in (*self.trial, *self.score))
        return (*trials, *self.final)

    def check_part(self, part: Part, events: Sequence[Event]) -> None:
        """Refuse a run that costs more than the search counts for it."""
        allowed = self.trial if part == "trial" else self.final
        if self.is_counted and not is_covered(
            without_selections(events), allowed, in_renyi=self.in_renyi and part == "trial"
        ):
            raise PrivacyError(
                "beyond-search",
                f"a {part} run costs more than the {self.strategy} search counts for one.",
                why="ε of the search is the cost of runs like the one that it was planned with.",
                fix="Give it more noise or fewer steps, as sfumato tune does, or plan another search.",
            )

    def check_score(self, event: SampledGaussian) -> None:
        """Refuse a score of private images that the search does not count."""
        covered = is_covered((event,), self.score or self.trial, in_renyi=self.in_renyi)
        if self.is_counted and not covered:
            raise PrivacyError(
                "beyond-search",
                f"a score with noise {event.noise_multiplier:g} costs more than the search counts for one.",
                why="Scores of private images decide which run comes out.",
                fix="Score with the noise that the search was planned with.",
            )

    def as_dict(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "strategy": self.strategy,
            "num_trials": self.num_trials,
            "shape": "poisson" if math.isinf(self.shape) else self.shape,
            "trial": [event_to_dict(event) for event in self.trial],
            "score": [event_to_dict(event) for event in self.score],
            "final": [event_to_dict(event) for event in self.final],
            "scored_on": self.scored_on,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Search:
        """What ``as_dict`` wrote; ConfigError for whatever else."""
        try:
            read = msgspec.convert(dict(values), _Values)
            if read.keys() != dict(values).keys():
                raise msgspec.ValidationError("unknown or missing values")
        except msgspec.ValidationError as error:
            raise ConfigError(
                "bad-record",
                f"a recorded search cannot be counted: {error}.",
                why="Leaving out what it cost could understate what was spent.",
                fix="Correct the file, or update sfumato.",
            ) from error
        parts = {
            name: without_selections(event_from_dict(event) for event in cast("Any", read)[name])
            for name in ("trial", "score", "final")
        }
        return cls(
            strategy=read["strategy"],
            num_trials=read["num_trials"],
            shape=math.inf if read["shape"] == "poisson" else read["shape"],
            scored_on=read["scored_on"],
            **parts,
        )

    def sentence(self, unit: str) -> str:
        """What was searched and counted, for the statement."""
        trials = f"{self.num_trials:g} trial{'' if self.num_trials == 1 else 's'}"
        scored = f"scored on {self.scored_on}"
        if self.strategy == "public":
            return f"Its settings are the best of {trials} on public images, {scored}: that cost no {unit}."
        if self.strategy == "scaled":
            return (
                f"Its settings are the best of {trials} with more noise and fewer steps on the same data, "
                f"{scored}, scaled up by the linear rule (Panda et al. 2024). The trials, their scores and "
                "this run are counted together: ε is that of the whole search."
            )
        return (
            f"It is the best of a random number of runs, {self.num_trials:g} on average "
            f"({self._distribution}), drawn independently of each other and {scored}; only this one was let "
            "out. ε is that of the whole search (Papernot and Steinke 2022)."
        )

    @property
    def _distribution(self) -> str:
        named = {0.0: "logarithmic", 1.0: "geometric", math.inf: "Poisson"}
        return named.get(self.shape, f"truncated negative binomial of shape {self.shape:g}")
