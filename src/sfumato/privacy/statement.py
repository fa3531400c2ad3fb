"""The guarantee in whole sentences: what was run, what is protected, what is assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import TYPE_CHECKING

from sfumato import accounting
from sfumato.privacy.noise_mechanisms import find_mechanism
from sfumato.privacy.sampling_schemes import find_scheme

if TYPE_CHECKING:
    from sfumato.privacy.plan import Plan

FALSE_ALARMS = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5)  # where the trade-off curve is stated
_PLURAL = {"image": "images", "patient": "patients"}


@dataclass(frozen=True, kw_only=True)
class EarlierRuns:
    """Private runs that a ledger holds of the same data; ``epsilon`` is of all together with this one."""

    num_runs: int
    epsilon: float  # infinite if one of them does not protect this run's unit
    delta: float

    @property
    def finite_epsilon(self) -> float | None:
        """As JSON writes it."""
        return _json(self.epsilon)

    @property
    def sentence(self) -> str:
        runs = "1 earlier private run" if self.num_runs == 1 else f"{self.num_runs:,} earlier private runs"
        return (
            f"The ledger holds {runs} on data of this name: what they showed is public too, and if settings "
            f"or this model were chosen by it, the ε above does not count that choice. Together with this "
            f"run they come to ε = {round_up(self.epsilon)} at δ = {self.delta:g}."
        )


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A guarantee that a person can read and a program can check."""

    run: str
    guarantee: str
    protects: str
    assumes: tuple[str, ...]
    releasable: bool
    values: dict[str, object] = field(repr=False)  # the figures, as JSON values

    @property
    def text(self) -> str:
        """Everything, as one paragraph per question."""
        assumptions = " ".join(self.assumes)
        lines = [
            self.run,
            self.guarantee,
            self.protects,
            f"This holds under these assumptions. {assumptions}",
        ]
        if not self.releasable:
            lines.insert(0, _NOT_RELEASABLE)
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """The fields of privacy.json."""
        return {**self.values, "releasable": self.releasable, "statement": self.text}


_NOT_RELEASABLE = (
    "NOT RELEASABLE: the randomness came from a seed, and whoever knows or guesses the seed can subtract "
    "the noise. The figures below describe the same run with secure randomness."
)


def make_statement(
    plan: Plan,
    *,
    releasable: bool,
    images_per_person: int | None,
    earlier: EarlierRuns | None = None,
) -> Statement:
    """Say what ``plan`` guarantees, and what was run on the data before."""
    mu, kind = accounting.mu_gdp(plan.events(), delta=plan.delta, neighbouring=plan.neighbouring)
    misses = accounting.trade_off(
        plan.events(), FALSE_ALARMS, accountant=plan.accountant, neighbouring=plan.neighbouring
    )
    error = misses[FALSE_ALARMS.index(0.01)]
    groups = _groups(plan, images_per_person)
    values: dict[str, object] = {
        "epsilon": _json(plan.epsilon),
        "delta": plan.delta,
        "unit": plan.unit,
        "neighbouring": plan.neighbouring,
        "accountant": plan.accountant,
        "noise_multiplier": plan.noise_multiplier,
        "clip_norm": plan.clip_norm,
        "sampling": find_scheme(plan.sampling).name,
        "sampling_rate": plan.sampling_rate,
        "batch_size": plan.batch_size,
        "num_steps": plan.num_steps,
        "num_examples": plan.num_examples,
        "mechanism": find_mechanism(plan.mechanism).name,
        "mu_gdp": _json(mu),
        "mu_gdp_kind": kind,
        "largest_true_positive_rate_at_1_percent": 1 - error,
        "trade_off": [list(pair) for pair in zip(FALSE_ALARMS, misses, strict=True)],
        "events": [accounting.event_to_dict(event) for event in plan.events()],
        "tuning_runs": plan.tuning_runs,
        "uncounted_search": plan.uncounted_search,
        "search": None if plan.search is None else plan.search.as_dict(),
        "groups": [{"images": size, "epsilon": _json(eps), "method": how} for size, eps, how in groups],
    }
    return Statement(
        run=_run(plan),
        guarantee=_guarantee(plan, mu, kind, error),
        protects=_protects(plan, groups),
        assumes=_assumes(plan, earlier),
        releasable=releasable,
        values=values,
    )


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None


def round_up(value: float, digits: int = 4) -> str:
    """A figure with so many significant digits, never below the value: a guarantee is not rounded down.

    Every ε that people see is written by this function, so that two places never disagree.
    """
    if not math.isfinite(value):
        return "no bound"
    # repr: the shortest decimal that is this float, so that a budget of 0.1 stays 0.1
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    return f"{float(rounded):.{digits}g}"


def round_down(value: float, digits: int = 4) -> str:
    """A lower bound with so many significant digits, never above the value."""
    rounded = Context(prec=digits, rounding=ROUND_FLOOR).create_decimal(repr(float(value)))
    return f"{float(rounded):.{digits}g}"


def _run(plan: Plan) -> str:
    batch = plan.sampling_sentence()
    noise = find_mechanism(plan.mechanism).words
    bound = ""
    if plan.unit == "patient" and plan.max_images_per_unit:
        bound = f" (the mean over at most {plan.max_images_per_unit} of their images in a step)"
    text = (
        f"The model was trained by {plan.num_steps:,} steps of differentially private SGD, {batch}. In "
        f"every step each {plan.unit}'s gradient{bound} was clipped to norm {plan.clip_norm:g}, and "
        f"{noise} noise of standard deviation {plan.noise_multiplier * plan.clip_norm:.4g} "
        f"({plan.noise_multiplier:.4g} times the clip norm) was added to the sum."
    )
    if plan.extra_events:
        text += f" {len(plan.extra_events)} further noisy release(s) from the same data are counted in."
    if plan.tuning_runs is not None:
        text += (
            f" It is the best of a random number of such runs, {plan.tuning_runs:g} on average "
            "(geometric); the choice is counted in (Papernot and Steinke 2022)."
        )
    return text if plan.search is None else f"{text} {plan.search.sentence(plan.unit)}"


def _guarantee(plan: Plan, mu: float, kind: str, error: float) -> str:
    change = {
        "add-or-remove": f"one {plan.unit} is added to or removed from",
        "replace-one": f"one {plan.unit} is replaced by another in",
    }[plan.neighbouring]
    gdp = "exactly" if kind == "exact" else "about"
    method = accounting.ACCOUNTANTS[plan.accountant].title
    return (
        f"Its weights are (ε = {round_up(plan.epsilon)}, δ = {plan.delta:g})-differentially private when "
        f"{change} the training data, by {method} ({plan.accountant}), {gdp} μ = "
        f"{round_up(mu)} in Gaussian differential privacy. Whoever tests from the model whether a certain "
        f"{plan.unit} was in the training data, and wrongly accuses 1 % of those that were not, finds at "
        f"most {round_up(100 * (1 - error), 3)} % of those that were."
    )


def _protects(plan: Plan, groups: list[tuple[int, float, str]]) -> str:
    if plan.unit == "patient":
        return "One patient is protected with all their images together."
    listed = "; ".join(
        f"{size} images: ε = {round_up(eps, 3)}" if math.isfinite(eps) else f"{size} images: no bound"
        for size, eps, _ in groups
    )
    return (
        "Only single images are protected. A person with several images in the training data has a "
        f"weaker guarantee, at the same δ ({listed}). Name a patient column to protect people."
    )


def _groups(plan: Plan, images_per_person: int | None) -> list[tuple[int, float, str]]:
    """ε of a person with several images, if images are the unit."""
    if plan.unit == "patient":
        return []
    sizes = sorted({2, 5, 10} if images_per_person is None else {2, images_per_person} - {1})
    groups = []
    for size in sizes:
        eps, how = accounting.group_epsilon(
            plan.events(),
            delta=plan.delta,
            group_size=size,
            accountant=plan.accountant,
            neighbouring=plan.neighbouring,
        )
        groups.append((size, eps, how))
    return groups


def _assumes(plan: Plan, earlier: EarlierRuns | None) -> tuple[str, ...]:
    search = (
        "Settings were fixed beforehand or chosen on other data." if earlier is None else earlier.sentence
    )
    if plan.search is not None and not plan.search.is_counted:
        search = f"Nobody whose images are private is among those of the trials. {search}"
    elif plan.search is not None or plan.tuning_runs is not None:
        counted = "No run outside the counted search looked at the private data."
        search = counted if earlier is None or plan.search is None else f"{counted} {earlier.sentence}"
    elif plan.uncounted_search:
        search = (
            "Settings were chosen by runs on the same private data, and ε does NOT count that search: "
            "the true cost is higher."
        )
    assumptions = [
        search,
        f"The number of {_PLURAL[plan.unit]}, the class names, the normalisation constants and every "
        "setting are public.",
        "Nothing but the released files is published: losses, norms and the state folder stay private.",
        "The operating system's entropy and AES are sound.",
    ]
    numeric = find_mechanism(plan.mechanism).assumption
    if numeric is not None:
        assumptions.append(numeric)
    if plan.delta > 1 / plan.num_examples:
        assumptions.append(
            f"δ = {plan.delta:g} is above 1/{plan.num_examples}: that it is so large was accepted explicitly."
        )
    return tuple(assumptions)
