"""The ledger's file: tables, transactions, and how hashes and leases are packed into them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from sfumato.errors import RunError, SfumatoError
from sfumato.ledger.links import Links
from sfumato.ledger.receipt import Receipt, receipt_from
from sfumato.ledger.totals import Record

_TABLES = (
    "CREATE TABLE IF NOT EXISTS datasets (fingerprint TEXT PRIMARY KEY, name TEXT NOT NULL, image_ids BLOB)",
    "CREATE TABLE IF NOT EXISTS caps ("
    "fingerprint TEXT NOT NULL, unit TEXT NOT NULL, epsilon REAL NOT NULL, delta REAL NOT NULL, "
    "PRIMARY KEY (fingerprint, unit))",
    "CREATE TABLE IF NOT EXISTS runs ("
    "run_id TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, label TEXT NOT NULL, plan TEXT, "
    "releasable INTEGER NOT NULL, reserved_steps INTEGER NOT NULL, finished INTEGER NOT NULL, "
    "lease TEXT NOT NULL, started TEXT NOT NULL)",  # lease: all of them, the latest last, with blanks between
)
_LATER = {  # columns that the first version did not have
    "datasets": {"patient_tags": "BLOB", "patient_key": "TEXT NOT NULL DEFAULT ''"},
    "runs": {
        "saved_steps": "INTEGER NOT NULL DEFAULT -1",
        "name": "TEXT NOT NULL DEFAULT ''",
        "parent": "TEXT NOT NULL DEFAULT ''",
    },
}


def connect(path: Path) -> sqlite3.Connection:
    """Open the file, or make it (mode 0600); tables of an older version get the columns they lack."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # it holds hashes of private images
        connection = sqlite3.connect(path, timeout=60, isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")  # a commit returns only once it is on the disk
    except (OSError, sqlite3.Error) as error:
        raise RunError(
            "ledger-unavailable",
            f"the ledger {path} cannot be used: {error}.",
            why="Spending that is not recorded could be spent again.",
            fix="Point SFUMATO_LEDGER to a file on a local disk that you can write.",
        ) from error
    with transaction(connection, path):
        for statement in _TABLES:
            connection.execute(statement)
        for table, columns in _LATER.items():
            there = {row["name"] for row in connection.execute(f"PRAGMA table_info({table})")}
            for column in columns.keys() - there:
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {columns[column]}")
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """All or nothing, alone among processes, on the disk when it ends."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise RunError(
            "ledger-unavailable",
            f"the ledger {path} could not be written: {error}.",
            why="Spending that is not recorded could be spent again.",
            fix="Make room on the disk, or wait for the process that holds the file.",
        ) from error


def receipt_of(row: sqlite3.Row) -> Receipt:
    """A row of ``runs``."""
    plan = None if row["plan"] is None else json.loads(row["plan"])
    try:
        return receipt_from(row, plan=plan, leases=row["lease"].split())
    except (ValueError, TypeError, SfumatoError) as error:
        raise RunError(
            "ledger-unavailable",
            f"the record of run {row['run_id']!r} cannot be counted: {error}",
            why="Leaving it out could understate what was spent.",
            fix="Move the ledger away and rebuild it from the other runs' folders: sfumato ledger import.",
        ) from error


def store_run(connection: sqlite3.Connection, record: Record, leases: Sequence[str]) -> None:
    """Write a row of ``runs``, new or changed; nothing that was spent becomes less."""
    connection.execute(
        "INSERT INTO runs (run_id, fingerprint, label, name, plan, releasable, reserved_steps, "
        "saved_steps, finished, lease, started, parent) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
        # releasable stays as it is: what a seed made is never private
        "ON CONFLICT (run_id) DO UPDATE SET "
        "reserved_steps = max(reserved_steps, excluded.reserved_steps), "
        "saved_steps = max(saved_steps, excluded.saved_steps), finished = excluded.finished, "
        "lease = excluded.lease, label = excluded.label, "
        # a run that once paid for itself goes on doing so
        "parent = CASE parent WHEN excluded.parent THEN parent ELSE '' END, "
        "name = CASE name WHEN excluded.name THEN name ELSE '' END",
        (
            record.run_id,
            record.fingerprint,
            record.label,
            record.name,
            None if record.plan is None else json.dumps(record.plan.as_dict()),
            record.releasable,
            record.reserved_steps,
            record.saved_steps,
            record.finished,
            " ".join(leases),
            record.started,
            record.parent,
        ),
    )


def links_in(row: sqlite3.Row) -> Links:
    """The hashes in a row of ``datasets``."""
    ids, tags = (
        None if row[column] is None else np.frombuffer(row[column], dtype="<i8")
        for column in ("image_ids", "patient_tags")
    )
    return Links(
        image_ids=None if ids is None else np.unique(ids), patient_tags=tags, key_id=row["patient_key"]
    )


def packed(hashes: np.ndarray | None) -> bytes | None:
    """As ``links_in`` reads them back."""
    return None if hashes is None else hashes.astype("<i8").tobytes()
