"""A run folder's own record of its spending: from it a lost ledger is rebuilt, and copies are recognised.

Every process that works on a run takes a lease, and finishing takes another. Ledger and folder keep the
list of all leases, so that comparing the two lists tells a folder that is up to date from an older copy or
a fork.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from sfumato.errors import RunError, SfumatoError
from sfumato.files import read_json, write_json
from sfumato.ledger.totals import Record
from sfumato.privacy.plan import Plan

SPENDING_FILE = "spending.json"
CLOSED = "closed"  # stands last in the ledger's list after `ledger close`: no process holds the run


_Name = Annotated[str, Meta(max_length=10_000)]


class _Spending(TypedDict):
    """``spending.json``; the plan's own values are checked by ``Plan``."""

    run_id: _Name
    fingerprint: _Name
    label: _Name
    name: NotRequired[_Name]  # of the data; older folders lack it
    plan: dict[str, Any] | None
    releasable: bool
    reserved_steps: Annotated[int, Meta(ge=0, le=2**53)]
    saved_steps: NotRequired[Annotated[int, Meta(ge=-1, le=2**53)]]  # older folders lack it
    finished: bool
    started: _Name
    parent: NotRequired[_Name]  # runs of a search alone have it
    leases: Annotated[list[_Name], Meta(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """A run's record and the leases that processes took on it, the latest last."""

    record: Record
    leases: tuple[str, ...]

    @property
    def closed(self) -> bool:
        return self.leases[-1] == CLOSED


def lineage(known: Sequence[str], folder: Sequence[str]) -> Literal["same", "newer", "older", "apart"]:
    """How a folder stands to what the ledger knows: "apart" means that both went on since they parted."""
    held = [lease for lease in known if lease != CLOSED]
    if held[-1] == folder[-1]:
        return "same"
    if held[-1] in folder:
        return "newer"
    return "older" if folder[-1] in held else "apart"


def write_receipt(folder: Path, receipt: Receipt) -> None:
    """Replace the run folder's own record, durably."""
    record = receipt.record
    values = {
        "run_id": record.run_id,
        "fingerprint": record.fingerprint,
        "label": record.label,
        "name": record.name,
        "plan": plan_values(record.plan),
        "releasable": record.releasable,
        "reserved_steps": record.reserved_steps,
        "saved_steps": record.saved_steps,
        "finished": record.finished,
        "started": record.started,
        "leases": list(receipt.leases),
        **({"parent": record.parent} if record.parent else {}),
    }
    write_json(folder / SPENDING_FILE, values)


def read_receipt(folder: Path) -> Receipt | None:
    """What ``write_receipt`` wrote, or None if the folder holds none."""
    try:
        values = read_json(folder / SPENDING_FILE, _Spending)
        if not all(lease.isalnum() and lease != CLOSED for lease in values["leases"]):
            raise ValueError("it holds leases that no process took")
        return receipt_from(values, plan=values["plan"], leases=values["leases"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SfumatoError) as error:
        # also what a stranger wrote: a record that no accountant can count must not enter the ledger
        raise RunError(
            "damaged-spending",
            f"{folder / SPENDING_FILE} cannot be read: {error}",
            why="It says how much of the budget this run may have used.",
            fix="Restore the file; or remove it, and the run is paid for anew.",
        ) from error


def receipt_from(values: Any, *, plan: dict[str, Any] | None, leases: Sequence[str]) -> Receipt:
    """Of the named values of a file or of a row in the ledger; ValueError if one cannot be."""
    values = {"saved_steps": -1, "name": "", "parent": "", **dict(values)}  # older folders lack these
    counts = [values["reserved_steps"], values["saved_steps"]]
    texts = [
        *(values[key] for key in ("run_id", "fingerprint", "label", "name", "started", "parent")),
        *leases,
    ]
    if not all(isinstance(text, str) for text in texts) or not leases:
        raise ValueError("a name or a lease is not a text")
    if not all(type(count) is int and -1 <= count < 2**62 for count in counts):
        raise ValueError("a number of steps is none")
    record = Record(
        run_id=values["run_id"],
        fingerprint=values["fingerprint"],
        label=values["label"],
        name=values["name"],
        plan=None if plan is None else Plan.from_dict(plan),
        releasable=bool(values["releasable"]),
        reserved_steps=counts[0],
        saved_steps=counts[1],
        finished=bool(values["finished"]),
        started=values["started"],
        parent=values["parent"],
    )
    return Receipt(record=record, leases=tuple(leases))


def plan_values(plan: Plan | None) -> dict[str, object] | None:
    """As JSON reads it back, so that stored and present plans compare equal."""
    return None if plan is None else json.loads(json.dumps(plan.as_dict()))
