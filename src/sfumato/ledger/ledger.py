"""The ledger: what each data set has spent over all runs, durable before it is used.

One SQLite file per user. A data set is known by its content, never by its path or by a clock, and runs
on data sets that share images add up. Every process takes a lease on its run, so that a copied run
folder cannot spend in the shadow of the original. The run folder keeps a copy of its own record
(``spending.json``), from which a lost ledger is rebuilt; wherever two records meet, the larger counts.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.errors import PrivacyError, RunError
from sfumato.ledger.receipt import plan_values, read_copy, write_copy
from sfumato.ledger.totals import Cap, Record, Total, Unit, total_of
from sfumato.privacy.plan import Plan
from sfumato.privacy.statement import round_up

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Account", "Cap", "Ledger", "Record", "Total"]

_BLOCKS = 200  # a run reserves its steps in about so many portions, one durable write each
_SCHEMA = """
CREATE TABLE IF NOT EXISTS datasets (fingerprint TEXT PRIMARY KEY, name TEXT NOT NULL, image_ids BLOB);
CREATE TABLE IF NOT EXISTS caps (
    fingerprint TEXT NOT NULL, unit TEXT NOT NULL, epsilon REAL NOT NULL, delta REAL NOT NULL,
    PRIMARY KEY (fingerprint, unit));
CREATE TABLE IF NOT EXISTS runs (
    run_id TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, label TEXT NOT NULL, plan TEXT,
    releasable INTEGER NOT NULL, reserved_steps INTEGER NOT NULL, finished INTEGER NOT NULL,
    lease TEXT NOT NULL, started TEXT NOT NULL);
"""


def default_path() -> Path:
    """SFUMATO_LEDGER, else ledger.sqlite in the user's data folder."""
    if os.environ.get("SFUMATO_LEDGER"):
        return Path(os.environ["SFUMATO_LEDGER"])
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "sfumato" / "ledger.sqlite"


class Ledger:
    """The record of all spending, safe for several processes at once. Get one with ``Ledger.open``."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self.path = connection, path

    @classmethod
    def open(cls, path: str | Path | None = None) -> Ledger:
        """The ledger at ``path`` (by default ``default_path()``), created if it is not there."""
        place = Path(path) if path is not None else default_path()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch(mode=0o600)  # it holds hashes of private images
            connection = sqlite3.connect(place, timeout=60, isolation_level=None)
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")  # a commit returns only once it is on the disk
            connection.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise RunError(
                "ledger-unavailable",
                f"the ledger {place} cannot be used: {error}.",
                why="Spending that is not recorded could be spent again.",
                fix="Point SFUMATO_LEDGER to a file on a local disk that you can write.",
            ) from error
        return cls(connection, place)

    def close(self) -> None:
        """Release the file."""
        self._connection.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(
        self,
        *,
        fingerprint: str,
        name: str,
        plan: Plan | None,
        folder: Path,
        label: str = "",
        releasable: bool = True,
        image_ids: Tensor | None = None,
    ) -> Account:
        """Open the account of a run, new or resumed, whose sensitive state lies in ``folder``.

        Guarantee: returns only if the whole plan fits under the cap, together with everything spent or
        still planned on data that share images; otherwise refuses, with nothing recorded. Runs without
        privacy (``plan`` None) or from a seed (``releasable`` False) are recorded and shown, but have
        no ε that could be added.
        """
        copy = read_copy(folder)
        with self._transaction():
            self._remember(fingerprint, name, image_ids)
            record = Record(
                run_id=secrets.token_hex(8),
                fingerprint=fingerprint,
                label=label,
                plan=plan,
                releasable=releasable,
                reserved_steps=0,
                finished=False,
                started=time.strftime("%Y-%m-%d %H:%M"),
            )
            record = self._resumed(record, copy) or record
            self._check_caps(record)
            lease = secrets.token_hex(8)
            # The folder knows this lease and the one before: a crash between the two writes locks nobody out.
            leases = [*(copy["leases"][-1:] if copy else []), lease]
            write_copy(folder, record, leases)
            self._store(record, lease)
        return Account(self, record, folder, lease)

    def _resumed(self, new: Record, copy: dict[str, Any] | None) -> Record | None:
        """The record that the folder's copy goes on with, or None if this is another run.

        A folder whose lease is no longer the latest was copied or restored, and the other copy went on
        meanwhile: both results can be seen, so this one is paid for as a run of its own.
        """
        if copy is None or copy["fingerprint"] != new.fingerprint or copy["plan"] != plan_values(new.plan):
            return None
        row = self._connection.execute("SELECT * FROM runs WHERE run_id = ?", (copy["run_id"],)).fetchone()
        if row is not None and row["lease"] not in copy["leases"]:
            return None
        known = max(copy["reserved_steps"], row["reserved_steps"] if row is not None else 0)
        started = row["started"] if row is not None else new.started
        return replace(new, run_id=copy["run_id"], reserved_steps=known, started=started)

    def reserve(self, record: Record, lease: str) -> None:
        """Raise what a run may have used, durably; refused if another process has taken the run over."""
        with self._transaction():
            row = self._connection.execute(
                "SELECT lease FROM runs WHERE run_id = ?", (record.run_id,)
            ).fetchone()
            if row is not None and row["lease"] != lease:
                raise RunError(
                    "run-taken-over",
                    f"another process went on with run {record.run_id}.",
                    why="Two continuations of one run would spend the same record twice.",
                    fix="Stop one of them; resume from this folder to go on as a run of its own.",
                )
            self._store(record, lease)  # also if the row is gone: a ledger that was replaced is filled again

    def set_cap(
        self,
        fingerprint: str,
        cap: Cap | None,
        *,
        unit: Unit,
        name: str = "",
        image_ids: Tensor | None = None,
    ) -> None:
        """Set or, with None, lift the cap of a data set for a unit."""
        with self._transaction():
            self._remember(fingerprint, name, image_ids)
            self._connection.execute(
                "DELETE FROM caps WHERE fingerprint = ? AND unit = ?", (fingerprint, unit)
            )
            if cap is not None:
                self._connection.execute(
                    "INSERT INTO caps VALUES (?, ?, ?, ?)", (fingerprint, cap.unit, cap.epsilon, cap.delta)
                )

    def caps(self, fingerprint: str) -> list[Cap]:
        """The caps of a data set, at most one per unit."""
        rows = self._connection.execute(
            "SELECT * FROM caps WHERE fingerprint = ? ORDER BY unit", (fingerprint,)
        )
        return [Cap(unit=row["unit"], epsilon=row["epsilon"], delta=row["delta"]) for row in rows]

    def datasets(self) -> dict[str, str]:
        """Fingerprint → name of every data set on record."""
        rows = self._connection.execute("SELECT fingerprint, name FROM datasets ORDER BY rowid")
        return {row["fingerprint"]: row["name"] for row in rows}

    def records(self, fingerprint: str) -> list[Record]:
        """Every run on this data set or on one that shares an image with it."""
        marks = self._related(fingerprint)
        rows = self._connection.execute(
            f"SELECT * FROM runs WHERE fingerprint IN ({','.join('?' * len(marks))}) ORDER BY rowid", marks
        )
        return [_record(row) for row in rows]

    def share_images(self, fingerprint: str, image_ids: Tensor) -> bool:
        """Whether the data set on record under ``fingerprint`` holds one of these images."""
        import numpy as np

        row = self._connection.execute(
            "SELECT image_ids FROM datasets WHERE fingerprint = ?", (fingerprint,)
        ).fetchone()
        known = np.frombuffer(b"" if row is None else row["image_ids"] or b"", dtype="<i8")
        return bool(np.isin(image_ids.cpu().numpy(), known).any())

    def finish(self, run_id: str) -> None:
        """Close a run that will not go on: from now on only what it may have used counts."""
        with self._transaction():
            self._connection.execute("UPDATE runs SET finished = 1 WHERE run_id = ?", (run_id,))

    def import_folder(self, folder: Path) -> bool:
        """Take over a run folder's own copy of its spending; the larger of two records counts."""
        copy = read_copy(folder)
        if copy is None:
            return False
        with self._transaction():
            known = self._connection.execute(
                "SELECT * FROM runs WHERE run_id = ?", (copy["run_id"],)
            ).fetchone()
            self._remember(copy["fingerprint"], "", None)
            record = _record({**copy, "plan": json.dumps(copy["plan"]) if copy["plan"] else None})
            if known is not None:
                record = replace(record, finished=record.finished or bool(known["finished"]))
            self._store(record, copy["leases"][-1] if known is None else known["lease"])
        return True

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, alone among processes, on the disk when it ends."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise RunError(
                "ledger-unavailable",
                f"the ledger {self.path} could not be written: {error}.",
                why="Spending that is not recorded could be spent again.",
                fix="Make room on the disk, or wait for the process that holds the file.",
            ) from error

    def _remember(self, fingerprint: str, name: str, image_ids: Tensor | None) -> None:
        packed = None if image_ids is None else image_ids.cpu().numpy().astype("<i8").tobytes()
        self._connection.execute(
            "INSERT INTO datasets VALUES (?, ?, ?) ON CONFLICT (fingerprint) DO UPDATE SET "
            "image_ids = coalesce(image_ids, excluded.image_ids), "
            "name = CASE name WHEN '' THEN excluded.name ELSE name END",
            (fingerprint, name, packed),
        )

    def _store(self, record: Record, lease: str) -> None:
        self._connection.execute(
            "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (run_id) DO UPDATE SET "
            "reserved_steps = max(reserved_steps, excluded.reserved_steps), finished = excluded.finished, "
            "lease = excluded.lease, label = excluded.label",
            (
                record.run_id,
                record.fingerprint,
                record.label,
                None if record.plan is None else json.dumps(record.plan.as_dict()),
                record.releasable,
                record.reserved_steps,
                record.finished,
                lease,
                record.started,
            ),
        )

    def _related(self, fingerprint: str) -> list[str]:
        """This data set and all that share an image with it."""
        import numpy as np

        rows = self._connection.execute("SELECT fingerprint, image_ids FROM datasets").fetchall()
        ids = {row["fingerprint"]: np.frombuffer(row["image_ids"] or b"", dtype="<i8") for row in rows}
        mine = ids.get(fingerprint, np.empty(0, dtype="<i8"))
        return [
            other for other, theirs in ids.items() if other == fingerprint or np.isin(mine, theirs).any()
        ] or [fingerprint]

    def _check_caps(self, record: Record) -> None:
        """Refuse a counted run that could exceed a cap on any data set it shares images with."""
        if not record.counted:
            return
        for fingerprint in self._related(record.fingerprint):
            for cap in self.caps(fingerprint):
                others = [other for other in self.records(fingerprint) if other.run_id != record.run_id]
                total = total_of([*others, record], unit=cap.unit, delta=cap.delta, planned=True)
                if total.epsilon > cap.epsilon:
                    raise _over_cap(fingerprint, cap, total, total_of(others, unit=cap.unit, delta=cap.delta))


@dataclass
class Account:
    """The spending of one run, held by one process."""

    ledger: Ledger
    record: Record
    folder: Path
    lease: str

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

    def finish(self) -> None:
        """The run is over; what it did not use is free again."""
        self._reserve(replace(self.record, finished=True))

    def _reserve(self, record: Record) -> None:
        self.ledger.reserve(record, self.lease)
        write_copy(self.folder, record, [self.lease])
        self.record = record


def _record(row: Any) -> Record:
    return Record(
        run_id=row["run_id"],
        fingerprint=row["fingerprint"],
        label=row["label"],
        plan=None if row["plan"] is None else Plan.from_dict(json.loads(row["plan"])),
        releasable=bool(row["releasable"]),
        reserved_steps=row["reserved_steps"],
        finished=bool(row["finished"]),
        started=row["started"],
    )


def _over_cap(fingerprint: str, cap: Cap, total: Total, spent: Total) -> PrivacyError:
    return PrivacyError(
        "over-cap",
        f"with this run, data set {fingerprint[:12]} would reach ε = {round_up(total.epsilon)} per "
        f"{cap.unit} at δ = {cap.delta:g}; its cap is {cap.epsilon:g}, and {round_up(spent.epsilon)} is "
        f"spent by {spent.num_runs} runs.",
        why="What all published runs reveal about the same images adds up.",
        fix="Plan a smaller epsilon, or decide to raise the cap (sfumato ledger cap).",
    )
