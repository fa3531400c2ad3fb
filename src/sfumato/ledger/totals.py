"""Composition over runs: what several plans on the same images cost together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sfumato import accounting
from sfumato.accounting import Event
from sfumato.privacy.plan import Plan

Unit = Literal["image", "patient"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run as the ledger knows it."""

    run_id: str
    fingerprint: str
    label: str
    plan: Plan | None  # None: trained without privacy
    releasable: bool
    reserved_steps: int  # steps that may have been used
    finished: bool
    started: str  # by the clock of that day: for reading, never for deciding
    name: str = ""  # of the data, as this run called them: public; empty if not known
    saved_steps: int = -1  # the furthest saved state whose results may have been seen; -1: none
    parent: str = ""  # the run of the search that has paid for this one; empty: it pays for itself

    @property
    def counted(self) -> bool:
        """Whether noise protects what the run may publish; other runs have no ε to add."""
        return self.plan is not None and self.releasable

    def events(self, *, planned: bool) -> tuple[Event, ...]:
        """What the run has done or, while it is open and ``planned``, may still do."""
        assert self.plan is not None  # only counted runs have events
        whole = planned and not self.finished
        return self.plan.events(self.plan.num_steps if whole else self.reserved_steps)


@dataclass(frozen=True, kw_only=True)
class Cap:
    """The most that may be spent on a data set for one unit."""

    unit: Unit
    epsilon: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class Total:
    """What the counted runs cost one unit together."""

    unit: Unit
    epsilon: float  # infinite if a run does not protect this unit
    delta: float
    neighbouring: str
    accountant: str
    num_runs: int


def total_of(records: Iterable[Record], *, unit: Unit, delta: float, planned: bool = False) -> Total:
    """Compose all counted runs for one unit, image or patient.

    Guarantee: an upper bound for the joint release of all runs. A run that protects patients lets one
    image change a patient's clipped gradient to any other, so for an image it counts as replacing. A
    run that protects images promises a patient nothing, so then the patient's total is infinite.
    """
    counted = [record for record in records if record.counted]
    plans = [record.plan for record in counted if record.plan is not None]
    replaced = any(plan.neighbouring == "replace-one" or plan.unit != unit for plan in plans)
    neighbouring: accounting.Neighbouring = "replace-one" if replaced else "add-or-remove"
    events = [event for record in counted for event in record.events(planned=planned)]
    accountant = accounting.default_accountant(events)
    unprotected = unit == "patient" and any(plan.unit == "image" for plan in plans)
    epsilon = math.inf
    if not unprotected:
        epsilon = accounting.epsilon(events, delta=delta, accountant=accountant, neighbouring=neighbouring)
    return Total(
        unit=unit,
        epsilon=epsilon,
        delta=delta,
        neighbouring=neighbouring,
        accountant=accountant,
        num_runs=len(counted),
    )


def units_of(records: Sequence[Record]) -> list[Unit]:
    """The units that the counted runs protect, images first."""
    return sorted({record.plan.unit for record in records if record.counted and record.plan is not None})
