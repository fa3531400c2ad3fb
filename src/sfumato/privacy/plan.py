"""The plan of a private run: sampling, clip, noise and accounting in one frozen object that fits together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from sfumato import accounting
from sfumato.accounting import Accountant, Event, Neighbouring, Selection
from sfumato.errors import ConfigError
from sfumato.privacy.noise_mechanisms import NoiseMechanism, check_sensitivity, find_mechanism
from sfumato.privacy.plan_rules import check_plan, wrong_number_given
from sfumato.privacy.records import (
    RecordedMechanism,
    RecordedScheme,
    read_mechanism,
    read_scheme,
    record_mechanism,
    record_scheme,
)
from sfumato.privacy.sampling_schemes import Batches, SamplingScheme, find_scheme
from sfumato.privacy.search import Part, Search
from sfumato.privacy.statement import EarlierRuns, Statement, make_statement

if TYPE_CHECKING:
    from torch import Tensor

    from sfumato.gradients import ClippedSum
    from sfumato.randomness import RandomSource

__all__ = ["Plan", "Statement"]

_CURVE_POINTS = 50


class PlanSettings(TypedDict, total=False):
    """The settings of a plan that have defaults: what ``Plan.calibrate`` passes on as it is."""

    clip_norm: float
    unit: Literal["image", "patient"]
    accountant: Accountant
    neighbouring: Neighbouring
    sampling: str | SamplingScheme
    mechanism: str | NoiseMechanism
    extra_events: tuple[Event, ...]
    tuning_runs: float | None
    uncounted_search: bool
    search: Search | None
    search_part: Part
    max_images_per_unit: int | None
    allow_large_delta: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be done to the private data, and what it costs.

    Guarantee: training on ``num_examples`` units with ``sampler()``, sums whose sensitivity is at most
    ``clip_norm``, and ``noise()`` once per step is (``epsilon``, ``delta``)-differentially private.
    """

    num_examples: int  # units N: images, or patients
    batch_size: float  # expected: sampling_rate · N
    num_steps: int
    noise_multiplier: float  # σ: standard deviation of the noise / clip_norm
    clip_norm: float = 1.0
    delta: float
    unit: Literal["image", "patient"] = "image"
    accountant: Accountant = "pld"  # a name only: whoever reads a file must be able to count it again
    neighbouring: Neighbouring = "add-or-remove"
    sampling: str | SamplingScheme = "poisson"  # a name of sampling_schemes, or a scheme of your own
    mechanism: str | NoiseMechanism = "gaussian"  # a name of noise_mechanisms, or one of your own
    extra_events: tuple[Event, ...] = ()  # other releases from the same data, such as a private mean
    tuning_runs: float | None = None  # mean number of runs of a counted search (geometric); None: no search
    uncounted_search: bool = False  # settings chosen on the same data at a cost that ε leaves out
    search: Search | None = None  # that this run is part of: ε is then that of all of it
    search_part: Part = "trial"
    max_images_per_unit: int | None = None  # bound on a patient's images in one step
    allow_large_delta: bool = False  # accept δ above 1/N

    def __post_init__(self) -> None:
        check_plan(self)

    @classmethod
    def calibrate(
        cls,
        *,
        epsilon: float,
        delta: float,
        num_examples: int,
        batch_size: float | None = None,
        num_steps: int | None = None,
        noise_multiplier: float | None = None,
        **settings: Unpack[PlanSettings],
    ) -> Plan:
        """The plan that spends ``epsilon``: finds the one of batch size, steps and noise that is not given.

        Guarantee: ``plan.epsilon <= epsilon``.
        """
        if batch_size is None:
            batch_size = find_scheme(settings.get("sampling", "poisson")).default_batch_size(num_examples)
        given = {"batch_size": batch_size, "num_steps": num_steps, "noise_multiplier": noise_multiplier}
        missing = [name for name, value in given.items() if value is None]
        if len(missing) != 1:
            raise wrong_number_given(missing)
        accounting.check_budget(epsilon)
        draft = cls(
            num_examples=num_examples,
            batch_size=1 if batch_size is None else batch_size,
            num_steps=1 if num_steps is None else num_steps,
            noise_multiplier=1.0 if noise_multiplier is None else noise_multiplier,
            delta=delta,
            **settings,
        )
        return draft._solved(missing[0], epsilon)

    def with_epsilon(self, epsilon: float, *, tolerance: float = 1e-4) -> Plan:
        """The same plan with the least noise, to ``tolerance``, that keeps ε at most ``epsilon``.

        The search starts at the present noise, which makes a series of similar plans cheap.
        """

        def epsilon_of(value: float) -> float:
            return replace(self, noise_multiplier=value).epsilon

        noise_multiplier = accounting.solve_noise_multiplier(
            epsilon_of, epsilon, tolerance=tolerance, guess=self.noise_multiplier
        )
        return replace(self, noise_multiplier=noise_multiplier)

    def _solved(self, name: str, target: float) -> Plan:
        """This plan with one value changed so that ε comes to ``target`` from below."""

        def epsilon_of(value: float) -> float:
            return replace(self, batch_size=value).epsilon

        def epsilon_after(num_steps: int) -> float:
            return replace(self, num_steps=num_steps).epsilon

        if name == "noise_multiplier":
            return self.with_epsilon(target)
        if name == "num_steps":
            return replace(self, num_steps=accounting.solve_num_steps(epsilon_after, target))
        size = accounting.solve_batch_size(epsilon_of, target, num_examples=self.num_examples)
        return replace(self, batch_size=size)

    @property
    def sampling_rate(self) -> float:
        """q: the probability of each unit to be in a step."""
        return self._scheme.sampling_rate(self.batch_size, self.num_examples)

    @property
    def _scheme(self) -> SamplingScheme:
        return find_scheme(self.sampling)

    @property
    def _mechanism(self) -> NoiseMechanism:
        return find_mechanism(self.mechanism)

    def events(self, num_steps: int | None = None) -> tuple[Event, ...]:
        """Everything that touches the private data, up to a step or to the end."""
        if self.search is not None and self.search.is_counted:
            return self.search.events()
        events = self.own_events(num_steps)
        if self.tuning_runs is None:
            return events
        return (Selection(events=accounting.without_selections(events), mean_runs=self.tuning_runs),)

    def own_events(self, num_steps: int | None = None) -> tuple[Event, ...]:
        """What this run does by itself, whatever search it is part of."""
        steps = self._scheme.event(
            self._mechanism.event(self.noise_multiplier),
            sampling_rate=self.sampling_rate,
            num_steps=self.num_steps if num_steps is None else num_steps,
        )
        return (*self.extra_events, steps)

    @cached_property
    def epsilon(self) -> float:
        """ε of the whole plan at ``delta``."""
        return self._epsilon(self.num_steps)

    def epsilon_after(self, step: int) -> float:
        """ε once ``step`` steps are done, never understated.

        At most 50 points of the curve are computed; between two, the later one's ε is given.
        """
        if not 0 <= step <= self.num_steps:
            raise ConfigError(
                "num-steps-out-of-range",
                f"step {step} of a plan of {self.num_steps}.",
                fix="Stay in the plan.",
            )
        spacing = max(1, math.ceil(self.num_steps / _CURVE_POINTS))
        return self._epsilon(min(self.num_steps, math.ceil(step / spacing) * spacing))

    def epsilon_curve(self) -> tuple[list[int], list[float]]:
        """Steps and the ε after each, at the points that ``epsilon_after`` computes: for plots."""
        spacing = max(1, math.ceil(self.num_steps / _CURVE_POINTS))
        steps = sorted({*range(0, self.num_steps, spacing), self.num_steps})
        return steps, [self._epsilon(step) for step in steps]

    def _epsilon(self, num_steps: int) -> float:
        return accounting.epsilon(
            self.events(num_steps),
            delta=self.delta,
            accountant=self.accountant,
            neighbouring=self.neighbouring,
        )

    @cached_property
    def mu_gdp(self) -> float:
        """μ of Gaussian DP: exact for full batches, else fitted to the curve (see ``accounting.mu_gdp``)."""
        return accounting.mu_gdp(self.events(), delta=self.delta, neighbouring=self.neighbouring)[0]

    def sampler(self) -> Batches:
        """The batches, as they are accounted."""
        return self._scheme.batches(sampling_rate=self.sampling_rate, num_steps=self.num_steps)

    def noise(self, total: ClippedSum, *, source: RandomSource, step: int) -> dict[str, Tensor]:
        """The sum with the plan's noise. Call once per step, after adding up microbatches and ranks.

        Guarantee: the noise has ``noise_multiplier`` times the sum's sensitivity. A sum that one unit
        can move further than ``clip_norm`` is refused. Tensors have the dtypes of their parameters.
        """
        check_sensitivity(total.sensitivity, self.clip_norm)
        noisy = self._mechanism.add(total, noise_multiplier=self.noise_multiplier, source=source, step=step)
        # sums are in float64; once private they may be rounded to what the parameters are
        return {name: value.to(total.dtypes.get(name, value.dtype)) for name, value in noisy.items()}

    def statement(
        self,
        *,
        releasable: bool = True,
        images_per_person: int | None = None,
        earlier: EarlierRuns | None = None,
    ) -> Statement:
        """The guarantee in whole sentences; ``images_per_person``: the most that any one person has."""
        return make_statement(
            self, releasable=releasable, images_per_person=images_per_person, earlier=earlier
        )

    def as_dict(self) -> dict[str, object]:
        """All fields as JSON values; of components of a caller's own, what ``records`` keeps of them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["extra_events"] = [accounting.event_to_dict(event) for event in self.extra_events]
        for name, held in self._records.items():
            values[name] = held if isinstance(held, str) else held.as_dict()
        search, part = values.pop("search"), values.pop("search_part")
        if search is not None:  # plans of earlier versions have none, and must stay equal to themselves
            values |= {"search": search.as_dict(), "search_part": part}
        return values

    @cached_property
    def _records(self) -> dict[str, str | RecordedScheme | RecordedMechanism]:
        scheme = record_scheme(
            self._scheme,
            self._mechanism.event(self.noise_multiplier),
            sampling_rate=self.sampling_rate,
            num_steps=self.num_steps,
            text=self.sampling_sentence(),
        )
        mechanism = record_mechanism(self._mechanism, noise_multiplier=self.noise_multiplier)
        return {"sampling": scheme, "mechanism": mechanism}

    def sampling_sentence(self) -> str:
        """How the units of a step are drawn, in words."""
        return self._scheme.sentence(
            unit=self.unit,
            units=f"{self.unit}s",
            num_examples=self.num_examples,
            batch_size=self.batch_size,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The plan that ``as_dict`` described."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                "unknown-plan-field", f"{unknown[0]!r} is not a field of a plan.", fix="Update sfumato."
            )
        accounting.check_many(values.get("extra_events", ()))
        events = tuple(accounting.event_from_dict(event) for event in values.get("extra_events", ()))
        recorded: dict[str, Any] = {
            name: read(values[name])
            for name, read in (("sampling", read_scheme), ("mechanism", read_mechanism))
            if isinstance(values.get(name), Mapping)
        }
        if isinstance(values.get("search"), Mapping):
            recorded["search"] = Search.from_dict(values["search"])
        return cls(**{**values, "extra_events": events, **recorded})
