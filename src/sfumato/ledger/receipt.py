"""A run folder's own record of its spending: from it a lost ledger is rebuilt, and copies are recognised."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sfumato.errors import RunError
from sfumato.ledger.totals import Record
from sfumato.privacy.plan import Plan

SPENDING_FILE = "spending.json"


def write_copy(folder: Path, record: Record, leases: list[str]) -> None:
    """Replace the run folder's own record, durably."""
    values = {
        "run_id": record.run_id,
        "fingerprint": record.fingerprint,
        "label": record.label,
        "plan": plan_values(record.plan),
        "releasable": record.releasable,
        "reserved_steps": record.reserved_steps,
        "finished": record.finished,
        "started": record.started,
        "leases": leases,
    }
    temporary = folder / f".{SPENDING_FILE}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / SPENDING_FILE)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(
            "cannot-save",
            f"{folder / SPENDING_FILE} could not be written: {error}",
            why="The disk may be full or read-only. Nothing was used that is not recorded.",
            fix="Make room, then continue with --resume.",
        ) from error


def read_copy(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / SPENDING_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(
            "damaged-spending",
            f"{folder / SPENDING_FILE} cannot be read: {error}",
            why="It says how much of the budget this run may have used.",
            fix="Restore the file; or remove it, and the run is paid for anew.",
        ) from error


def plan_values(plan: Plan | None) -> dict[str, object] | None:
    """As JSON reads it back, so that stored and present plans compare equal."""
    return None if plan is None else json.loads(json.dumps(plan.as_dict()))
