"""The ledger: what each data set has spent over all runs, durable before it is used.

One SQLite file per user. A data set is known by its content, never by its path or by a clock, and runs on
data sets that share images or patients add up. Every process takes a lease on its run, so that a copied run
folder cannot spend unseen beside the original. The run folder keeps a copy of its own record, from which
a lost ledger is rebuilt; of two records of a run the larger counts. The folder's copy is always written
before the ledger, so that a folder that knows less than the ledger is not the run's own.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.errors import PrivacyError
from sfumato.files import ledger_home
from sfumato.ledger.account import Account
from sfumato.ledger.database import connect, links_in, packed, receipt_of, store_run, transaction
from sfumato.ledger.links import Links, key_beside, links_of, read_links, write_links
from sfumato.ledger.receipt import CLOSED, Receipt, lineage, plan_values, read_receipt, write_receipt
from sfumato.ledger.refusals import changed_source, over_cap, run_closed, taken_over
from sfumato.ledger.searches import PAYS_ITSELF, check_first_step, paid_by
from sfumato.ledger.totals import Cap, Record, Total, Unit, total_of
from sfumato.privacy.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Account", "Cap", "Ledger", "Record", "Total"]


class Ledger:
    """The record of all spending, safe for several processes at once. Get one with ``Ledger.open``."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self.path = connection, path

    @classmethod
    def open(cls, path: str | Path | None = None) -> Ledger:
        """The ledger at ``path`` (by default ``files.ledger_home()``), created if it is not there."""
        place = Path(path) if path is not None else ledger_home()
        return cls(connect(place), place)

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
        patient_names: Sequence[str] | None = None,
        saved_steps: int = -1,
        parent: str = "",
    ) -> Account:
        """Open the account of a run, new or resumed, whose sensitive state lies in ``folder``.

        ``image_ids`` and ``patient_names`` (only keyed hashes of them are kept) tell which other data sets
        are about the same people; what is not given counts as shared with all. ``saved_steps`` is how far
        the state in ``folder`` is, -1 if there is none. ``parent`` is the run of the search that has paid for
        this one; see ``searches.paid_by``.

        Guarantee: returns only if the whole plan fits under the cap, together with everything spent or
        still planned on related data; otherwise refuses, with nothing recorded. A folder that is not the
        run's latest is a run of its own. Runs without privacy (``plan`` None) or from a seed
        (``releasable`` False) are recorded and shown, but have no ε that could be added.
        """
        new = Record(
            run_id=secrets.token_hex(8),
            fingerprint=fingerprint,
            label=label,
            name=name,
            plan=plan,
            releasable=releasable,
            reserved_steps=max(0, saved_steps),
            finished=False,
            started=time.strftime("%Y-%m-%d %H:%M"),
            saved_steps=saved_steps,
            parent=parent,
        )
        held = read_receipt(folder)
        if held is not None and not _alike(held.record, new):
            held = None  # another run was here before
        with self._transaction():
            links = self._remember(fingerprint, name, image_ids, patient_names)
            resumed = None if held is None else self._resumed(new, held)
            record, leases = (new, ()) if resumed is None else (resumed.record, resumed.leases)
            record = self._with_payer(replace(record, parent=parent), links)
            leases = leases if record.finished else (*leases, secrets.token_hex(8))
            self._store(record, leases)
            if not record.finished and not record.parent:
                self._check_caps(record)  # taken back with all the rest if it refuses
            write_links(folder, links, fingerprint=fingerprint)
            write_receipt(folder, Receipt(record=record, leases=leases))
        copy_of = None if held is None or resumed is not None else held.record.run_id
        return Account(self, record, folder, leases, copy_of)

    def _resumed(self, new: Record, held: Receipt) -> Receipt | None:
        """What the folder's own record goes on as; None if that is to be a run of its own.

        A folder that knows less than the ledger, or whose lease is not the latest, was copied or restored,
        and the other copy went on meanwhile: both results can be seen. So can the result of a finished run:
        it may be opened again only with its last state, and only to publish that once more.
        """
        known = self._known(held.record.run_id) or held
        if {held.record.releasable, known.record.releasable} != {new.releasable}:
            raise changed_source(held.record)
        finished = held.record.finished or (known.record.finished and not known.closed)
        saved = new.saved_steps
        if (
            lineage(known.leases, held.leases) in ("older", "apart")
            or held.record.reserved_steps < known.record.reserved_steps
            or saved < max(known.record.saved_steps, held.record.saved_steps)
            or (finished and saved < 0)
        ):
            return None
        name = new.name if new.name == held.record.name else ""  # of two names neither hides it
        record = replace(held.record, label=new.label, name=name, saved_steps=saved, finished=finished)
        return Receipt(record=record, leases=held.leases)

    def reserve(self, record: Record, leases: Sequence[str], folder: Path) -> tuple[str, ...]:
        """Raise what a run may have used or shown, durably, in folder and ledger; returns its leases.

        Guarantee: refused, with nothing recorded, if another process took the run over or it was closed. A
        finished run takes one more lease, so that no copy made before can go on under its record.
        """
        with self._transaction():
            known = self._known(record.run_id)
            if known is not None and known.leases[-1] != leases[-1]:
                raise run_closed(record) if known.closed else taken_over(record)
            check_first_step(record, known, self.children(record.parent))
            held = (*leases, secrets.token_hex(8)) if record.finished else tuple(leases)
            write_receipt(folder, Receipt(record=record, leases=held))
            self._store(record, held)  # also if the row is gone: a ledger that was replaced is filled again
        return held

    def set_cap(
        self,
        fingerprint: str,
        cap: Cap | None,
        *,
        unit: Unit,
        name: str = "",
        image_ids: Tensor | None = None,
        patient_names: Sequence[str] | None = None,
    ) -> None:
        """Set or, with None, lift the cap of a data set for a unit."""
        with self._transaction():
            self._remember(fingerprint, name, image_ids, patient_names)
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

    def records(self, fingerprint: str, *, unit: Unit = "patient") -> list[Record]:
        """Every run that one ``unit`` of this data set may be part of; of a search its own record alone.

        An image is in every data set that holds it; a patient also in those that only name the same patient.
        """
        fingerprints = self.related(fingerprint, unit=unit)
        places = ",".join("?" * len(fingerprints))
        rows = self._connection.execute(
            f"SELECT * FROM runs WHERE fingerprint IN ({places}) AND {PAYS_ITSELF} ORDER BY rowid",
            fingerprints,
        )
        return [receipt_of(row).record for row in rows]

    def children(self, run_id: str) -> list[Record]:
        """The runs of a search that its own record pays for; how many there are is sensitive."""
        rows = self._connection.execute("SELECT * FROM runs WHERE parent = ? ORDER BY rowid", (run_id,))
        return [receipt_of(row).record for row in rows]

    def records_named(self, name: str) -> list[Record]:
        """Every run on data of this name, whatever their content: of names alone, which are public.

        A run whose name is not known (earlier versions kept none), or that had two, counts under every name.
        """
        query = f"SELECT * FROM runs WHERE (name IN (?1, '') OR ?1 = '') AND {PAYS_ITSELF} ORDER BY rowid"
        return [receipt_of(row).record for row in self._connection.execute(query, (name,))]

    def related(self, fingerprint: str, *, unit: Unit) -> list[str]:
        """This data set and all that share a ``unit`` with it, or might: see ``unknown``."""
        links = self._links()
        links_of_set = links.get(fingerprint)
        if links_of_set is None:
            return [fingerprint]
        related = {name for name, other in links.items() if links_of_set.share_images(other)} | {fingerprint}
        if unit == "patient":
            related |= {name for name, other in links.items() if links_of_set.share_patients(other)}
            unnamed = {name for name in self._with_patients() & links.keys() if not links[name].has_patients}
            related |= links.keys() if fingerprint in unnamed else unnamed
        return [name for name in links if name in related]

    def unknown(self, fingerprint: str) -> list[str]:
        """Which of "images" and "patients" of a data set are not known: for them it counts with all others.

        Patients must be known where they are protected or capped; elsewhere nothing is promised to them.
        """
        links = self._links().get(fingerprint, Links())
        images = ["images"] if links.image_ids is None else []
        unnamed = fingerprint in self._with_patients() and not links.has_patients
        return [*images, *(["patients"] if unnamed else [])]

    def _with_patients(self) -> set[str]:
        """The data sets on which a run protects patients, or whose patients have a cap."""
        rows = self._connection.execute("SELECT fingerprint, plan FROM runs WHERE plan IS NOT NULL")
        protected = {row["fingerprint"] for row in rows if json.loads(row["plan"])["unit"] == "patient"}
        rows = self._connection.execute("SELECT fingerprint FROM caps WHERE unit = 'patient'")
        return protected | {row["fingerprint"] for row in rows}

    def share_images(self, fingerprint: str, image_ids: Tensor) -> bool:
        """Whether the data set on record under ``fingerprint`` is known to hold one of these images."""
        links = self._links().get(fingerprint, Links())
        return links.image_ids is not None and links.share_images(links_of(image_ids, None))

    def knows_images(self, fingerprint: str) -> bool:
        """Whether it is on record which images the data set holds."""
        return self._links().get(fingerprint, Links()).image_ids is not None

    def close_run(self, run_id: str) -> None:
        """Close a run that will not go on: from now on only what it may have used counts.

        Guarantee: a process that still works on it is refused before it uses a step that is not on record,
        and before it shows or publishes anything more. Resuming the run is checked against the caps again.
        """
        with self._transaction():
            known = self._known(run_id)
            if known is not None and not known.record.finished:
                self._store(replace(known.record, finished=True), (*known.leases, CLOSED))

    def import_folder(self, folder: Path) -> bool:
        """Take over a run folder's own copy of its spending and of what links its data with others.

        Of two records of one run the larger counts; folders that went on apart from each other count as two
        runs.
        """
        held = read_receipt(folder)
        if held is None:
            return False
        fingerprint = held.record.fingerprint
        with self._transaction():
            self._merge(fingerprint, "", read_links(folder, fingerprint=fingerprint))
            known = self._known(held.record.run_id)
            if known is not None and lineage(known.leases, held.leases) == "apart":
                forked = next(lease for lease in held.leases if lease not in known.leases)
                forked_id = hashlib.sha256(f"{held.record.run_id} {forked}".encode()).hexdigest()[:16]
                held = replace(held, record=replace(held.record, run_id=forked_id))  # at the next import too
                known = self._known(forked_id)
            if known is not None and lineage(known.leases, held.leases) in ("same", "older"):
                finished = known.record.finished or held.record.finished
                held = Receipt(record=replace(held.record, finished=finished), leases=known.leases)
            try:
                record = self._with_payer(held.record, read_links(folder, fingerprint=fingerprint))
            except PrivacyError:  # a file can name any parent; who is not its parent does not pay
                record = replace(held.record, parent="")
            held = replace(held, record=record)
            self._store(held.record, held.leases)
        return True

    def _with_payer(self, record: Record, links: Links) -> Record:
        if not record.parent:
            return record
        known = self._known(record.parent)
        payer = None if known is None else known.record
        return paid_by(payer, record, self.children(record.parent), self._links(), links)

    def _transaction(self) -> AbstractContextManager[None]:
        return transaction(self._connection, self.path)

    def _known(self, run_id: str) -> Receipt | None:
        row = self._connection.execute("SELECT * FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        return None if row is None else receipt_of(row)

    def _links(self) -> dict[str, Links]:
        rows = self._connection.execute("SELECT * FROM datasets ORDER BY rowid")
        return {row["fingerprint"]: links_in(row) for row in rows}

    def _remember(
        self, fingerprint: str, name: str, image_ids: Tensor | None, names: Sequence[str] | None
    ) -> Links:
        """Record what is given about a data set; returns all that is known of it by now."""
        key = key_beside(self.path) if names else None
        return self._merge(fingerprint, name, links_of(image_ids, names, key=key))

    def _merge(self, fingerprint: str, name: str, links: Links) -> Links:
        links = self._links().get(fingerprint, Links()).joined(links)
        self._connection.execute(
            "INSERT INTO datasets (fingerprint, name, image_ids, patient_tags, patient_key) "
            "VALUES (?, ?, ?, ?, ?) ON CONFLICT (fingerprint) DO UPDATE SET image_ids = excluded.image_ids, "
            "patient_tags = excluded.patient_tags, patient_key = excluded.patient_key, "
            "name = CASE name WHEN '' THEN excluded.name ELSE name END",
            (fingerprint, name, packed(links.image_ids), packed(links.patient_tags), links.key_id),
        )
        return links

    def _store(self, record: Record, leases: Sequence[str]) -> None:
        store_run(self._connection, record, leases)

    def _check_caps(self, record: Record) -> None:
        """Refuse a counted run that could exceed a cap on any data set that is related to its own."""
        if not record.counted:
            return
        for fingerprint in self.datasets():
            for cap in self.caps(fingerprint):
                if record.fingerprint not in self.related(fingerprint, unit=cap.unit):
                    continue
                known = self.records(fingerprint, unit=cap.unit)
                others = [other for other in known if other.run_id != record.run_id]
                total = total_of([*others, record], unit=cap.unit, delta=cap.delta, planned=True)
                if total.epsilon > cap.epsilon:
                    raise over_cap(fingerprint, cap, total, total_of(others, unit=cap.unit, delta=cap.delta))


def _alike(held: Record, new: Record) -> bool:
    return held.fingerprint == new.fingerprint and plan_values(held.plan) == plan_values(new.plan)
