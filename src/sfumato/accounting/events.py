"""Events: what was done to the private data, as plain values that a file can hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from sfumato.errors import ConfigError

Accountant = str  # a name in ``accountants.ACCOUNTANTS``
Neighbouring = Literal["add-or-remove", "replace-one"]

# What the accountants can count, and files of strangers may say.
LEAST_NOISE, MOST_NOISE = 1e-9, 1e9
MOST_STEPS, MOST_EVENTS, MOST_RUNS = 2**53, 256, 1e9


@dataclass(frozen=True, kw_only=True)
class SampledGaussian:
    """``num_steps`` noisy sums, each over units taken independently with probability ``sampling_rate``.

    ``discrete``: the noise is the discrete Gaussian, and ``noise_multiplier`` already counts the rounding.
    """

    noise_multiplier: float
    sampling_rate: float = 1.0
    num_steps: int = 1
    discrete: bool = False

    def __post_init__(self) -> None:
        if not (_is_number(self.noise_multiplier) and _countable(self.noise_multiplier)):
            raise ConfigError(
                "noise-out-of-range",
                f"noise_multiplier is {self.noise_multiplier!r}, but it is 0 or between {LEAST_NOISE:g} and "
                f"{MOST_NOISE:g}.",
                why="Outside, squares of it overflow, and ε means nothing.",
                fix="Typical values lie between 0.5 and 50.",
            )
        if not (_is_number(self.sampling_rate) and 0 < self.sampling_rate <= 1):
            raise ConfigError(
                "sampling-rate-out-of-range",
                f"sampling_rate is {self.sampling_rate}, but it is a probability above 0 and at most 1.",
                fix="Give a batch size between 1 and the number of units.",
            )
        if not (is_whole(self.num_steps) and 0 <= self.num_steps <= MOST_STEPS):
            raise ConfigError(
                "num-steps-out-of-range",
                f"num_steps is {self.num_steps!r}.",
                fix="Give a whole number of 0 or more.",
            )


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The best of a random number of runs, only the best being published (Papernot and Steinke 2022).

    The number of runs is drawn, before the first, from a truncated negative binomial distribution with mean
    ``mean_runs``: ``shape`` 1 is the geometric one, 0 the logarithmic one, infinity the Poisson one.
    """

    events: tuple[SampledGaussian, ...]
    mean_runs: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        check_many(self.events)
        numbers = _is_number(self.mean_runs) and _is_number(self.shape)
        if not (numbers and 1 <= self.mean_runs <= MOST_RUNS and self.shape >= 0):
            raise ConfigError(
                "search-out-of-range",
                f"a search of {self.mean_runs} runs on average with shape {self.shape} is not possible.",
                fix="Give 1 run or more, and a shape of 0 or more.",
            )


Event = SampledGaussian | Selection


def without_selections(events: Iterable[Event]) -> tuple[SampledGaussian, ...]:
    """The events as what they are where no search is among them; one inside a search cannot be counted."""
    found = []
    for event in events:
        if isinstance(event, Selection):
            raise ConfigError(
                "search-out-of-range",
                f"a search of {event.mean_runs} runs on average is part of another event.",
                why="The bound of a counted search is proven for runs that are noisy sums.",
                fix="Count the search as an event of its own.",
            )
        found.append(event)
    return tuple(found)


def is_whole(value: object) -> bool:
    """Whether it is a whole number, of Python's or NumPy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_many(events: Sequence[Event]) -> None:
    """Refuse more events than can be composed in a minute."""
    if len(events) > MOST_EVENTS:
        raise ConfigError(
            "too-many-events",
            f"there are {len(events):,} releases, and at most {MOST_EVENTS} can be counted together.",
            fix="Begin with weights that have a shorter history, or correct the file.",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _countable(noise_multiplier: float) -> bool:
    return noise_multiplier == 0 or LEAST_NOISE <= noise_multiplier <= MOST_NOISE


def check_delta(delta: float) -> None:
    """Refuse a δ that no accountant can use."""
    if not 0 < delta < 1:
        raise ConfigError(
            "delta-out-of-range",
            f"delta is {delta}, but it is a probability above 0 and below 1.",
            why="delta bounds the chance that the guarantee of epsilon does not hold.",
            fix="Use at most 1 / number of units, for example 1e-5 for 50,000 images.",
        )


def check_epsilon(epsilon: float) -> None:
    """Refuse an ε that means nothing."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ConfigError(
            "epsilon-out-of-range",
            f"epsilon is {epsilon:g}, but it is a finite number of 0 or more.",
            fix="Common values lie between 0.5 (strong) and 8 (weak).",
        )


def check_budget(epsilon: float) -> None:
    """Refuse an ε that no mechanism can be calibrated to."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ConfigError(
            "epsilon-out-of-range",
            f"epsilon is {epsilon:g}, but a budget is a finite number above 0.",
            why="With 0 nothing could be learnt; without a bound there would be no guarantee.",
            fix="Common values lie between 0.5 (strong) and 8 (weak).",
        )


def merge(events: Sequence[Event]) -> tuple[Event, ...]:
    """Equal mechanisms together, empty ones gone: fewer convolutions, and one key for the cache."""
    counts: dict[SampledGaussian, int] = {}
    selections: list[Selection] = []
    for event in events:
        if isinstance(event, Selection):
            selections.append(event)
        elif event.num_steps:
            one = SampledGaussian(
                noise_multiplier=event.noise_multiplier,
                sampling_rate=event.sampling_rate,
                discrete=event.discrete,
            )
            counts[one] = counts.get(one, 0) + event.num_steps
    merged = [
        SampledGaussian(
            noise_multiplier=one.noise_multiplier,
            sampling_rate=one.sampling_rate,
            num_steps=count,
            discrete=one.discrete,
        )
        for one, count in counts.items()
    ]
    return (*merged, *selections)


def event_to_dict(event: Event) -> dict[str, object]:
    """The event as JSON values; an infinite shape becomes the word "poisson"."""
    if isinstance(event, Selection):
        return {
            "kind": "selection",
            "events": [event_to_dict(one) for one in event.events],
            "mean_runs": event.mean_runs,
            "shape": "poisson" if math.isinf(event.shape) else event.shape,
        }
    return {
        "kind": "sampled-gaussian",
        "noise_multiplier": event.noise_multiplier,
        "sampling_rate": event.sampling_rate,
        "num_steps": event.num_steps,
        "discrete": event.discrete,
    }


def event_from_dict(fields: Mapping[str, Any]) -> Event:
    """The event that ``event_to_dict`` described."""
    values = dict(fields)
    kind = values.pop("kind", None)
    if kind == "selection":
        if any(one["kind"] == "selection" for one in values["events"]):
            raise ConfigError(
                "unknown-event", "a search lies inside a search.", fix="Update sfumato, or correct the file."
            )
        parts = without_selections(event_from_dict(one) for one in values["events"])
        shape = math.inf if values["shape"] == "poisson" else values["shape"]
        return Selection(events=parts, mean_runs=values["mean_runs"], shape=shape)
    if kind == "sampled-gaussian":
        return SampledGaussian(**values)
    raise ConfigError(
        "unknown-event", f"there is no privacy event {kind!r}.", fix="Update sfumato, or correct the file."
    )
