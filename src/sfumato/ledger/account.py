"""The account of one run, held by one process: every step is on record before it is used or seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from sfumato.errors import PrivacyError, RunError
from sfumato.ledger.totals import Record

_BLOCKS = 200  # a run reserves its steps in about so many portions, one durable write each


class Book(Protocol):
    """Where an account is kept: ``Ledger``."""

    def reserve(self, record: Record, leases: Sequence[str], folder: Path) -> tuple[str, ...]:
        """Raise what a run may have used or shown, durably; returns its leases."""


@dataclass
class Account:
    """The spending of one run. Get one with ``Ledger.begin``.

    ``copy_of`` names the run whose older or forked folder this was: it is now a run of its own.
    """

    ledger: Book
    record: Record
    folder: Path
    leases: tuple[str, ...]
    copy_of: str | None = None

    @property
    def begun_steps(self) -> int:
        """Steps that were begun for certain: the first of the last portion, and all before it."""
        return min(self.record.reserved_steps, max(1, self.record.reserved_steps - self._portion + 1))

    @property
    def _portion(self) -> int:
        plan = self.record.plan
        return 1 if plan is None else max(1, plan.num_steps // _BLOCKS)

    def spend(self, step: int) -> None:
        """Record that ``step`` steps may have been used: durable, in ledger and folder, on return."""
        self._check_open(step)
        if step <= self.record.reserved_steps:
            return
        plan = self.record.plan
        reserved = step
        if plan is not None:
            if step > plan.num_steps:
                raise PrivacyError(
                    "beyond-plan",
                    f"step {step} was to be spent, but the plan has {plan.num_steps}.",
                    fix="Plan more steps in a new run.",
                )
            reserved = min(plan.num_steps, step - 1 + self._portion)
        self._reserve(replace(self.record, reserved_steps=reserved))

    def confirm(self, step: int) -> None:
        """The state after ``step`` steps is saved; once this returns, its results may be seen.

        Guarantee: refused, with nothing recorded, if the run was closed or another process has it. From now
        on a folder with an earlier state is a run of its own: it would take steps again whose results were
        seen.
        """
        if self.record.finished and step <= self.record.saved_steps:
            return
        self._check_open(step)
        self._reserve(replace(self.record, saved_steps=max(step, self.record.saved_steps)))

    def finish(self) -> None:
        """The run is over: what it did not use is free again, and copies of its folder are runs of their own.

        Call it before anything is published: it is refused if another process has the run.
        """
        if not self.record.finished:
            self._reserve(replace(self.record, finished=True))

    def _check_open(self, step: int) -> None:
        if self.record.finished:
            raise RunError(
                "run-finished",
                f"step {step} was to be taken in run {self.record.run_id}, which is finished.",
                why="Its record covers the model that it left, not another one.",
                fix="Start a new run in another folder.",
            )

    def _reserve(self, record: Record) -> None:
        self.leases = self.ledger.reserve(record, self.leases, self.folder)
        self.record = record
