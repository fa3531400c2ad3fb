"""What an officer files: which run this is, when, how its units were recognised, and what came before it.

A release says it from public values alone. A fingerprint of the images would let whoever holds a candidate
data set confirm it, down to one image, and so would an id computed from it: the release has the run's id, a
random number, under which the ledger knows the images. Earlier runs are those on data of the same name; which
of them share an image or a patient is a fact about private data, and stands in ``state/filing.json`` alone.
"""

from __future__ import annotations

import csv
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.data.readers.folder import FROM_DICOM
from sfumato.files import replacing
from sfumato.ledger.ledger import Ledger
from sfumato.ledger.totals import Record, Total, total_of
from sfumato.privacy.plan import Plan
from sfumato.privacy.statement import EarlierRuns
from sfumato.recipes.recipe import Recipe
from sfumato.release.documents import Filing

FILING_FILE = "filing.json"
_HEADERS = "the PatientID in each file's DICOM header"


@dataclass(frozen=True, kw_only=True)
class History:
    """What the ledger knows when a run is released."""

    run_id: str
    named: tuple[Record, ...]  # runs on data of the same name, this one included
    related: tuple[Record, ...]  # runs that a unit of these data may be part of: private knowledge
    fingerprint: str
    parent: str = ""  # the search that has paid for this run: it is no earlier one

    @classmethod
    def of(cls, ledger: Ledger, record: Record) -> History:
        """The history of a run's data, as of now."""
        unit = "image" if record.plan is None else record.plan.unit
        return cls(
            run_id=record.run_id,
            named=tuple(ledger.records_named(record.name)),
            related=tuple(ledger.records(record.fingerprint, unit=unit)),
            fingerprint=record.fingerprint,
            parent=record.parent,
        )

    def earlier(self, plan: Plan) -> EarlierRuns | None:
        """Private runs before this one on data of this name, and what all cost together; None if none."""
        total = _total(self.named, plan)
        earlier = total.num_runs - sum(record.counted for record in self.named if self._is_this(record))
        if earlier < 1:
            return None
        return EarlierRuns(num_runs=earlier, epsilon=total.epsilon, delta=total.delta)

    def _is_this(self, record: Record) -> bool:
        return record.run_id in (self.run_id, self.parent)


def filing_of(history: History, recipe: Recipe, plan: Plan | None) -> Filing:
    """The part of ``privacy.json`` that identifies the run; public values only."""
    earlier = None if plan is None else history.earlier(plan)
    return Filing(
        date=date_of_today(),
        run_id=history.run_id,
        units_from=units_from(recipe),
        earlier_runs=0 if earlier is None else earlier.num_runs,
        total_epsilon=None if earlier is None else earlier.finite_epsilon,
    )


def date_of_today() -> str:
    """By the clock of the machine, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def units_from(recipe: Recipe) -> str:
    """How the units of a run were told apart, in words."""
    if recipe.privacy.unit == "image":
        return "each image is a unit"
    if recipe.data.patient_from == FROM_DICOM:
        return _HEADERS
    if recipe.data.patient_from is not None:
        return f"the regular expression {recipe.data.patient_from} in each file's path"
    if recipe.data.name is None or not Path(recipe.data.name).is_dir():
        return "the patient that the data name for each image"
    return "the patient column of manifest.csv" if _has_patient_column(Path(recipe.data.name)) else _HEADERS


def _has_patient_column(folder: Path) -> bool:
    """Whether a manifest names the patients; in a folder where none does, only headers can."""
    try:
        with (folder / "manifest.csv").open(encoding="utf-8-sig", newline="") as file:
            return "patient" in next(csv.reader(file), [])
    except (OSError, ValueError, csv.Error):  # no manifest any more: the run has read its data long ago
        return False


def keep_filing(folder: Path, history: History, plan: Plan | None) -> None:
    """The whole of it for the owner's file, in the run's ``state/``: fingerprint, and total by content."""
    total = None if plan is None else _total(history.related, plan)
    document: dict[str, Any] = {
        "run_id": history.run_id,
        "fingerprint": history.fingerprint,
        "related_runs": [record.run_id for record in history.related if record.counted],
        "total_epsilon": None if total is None or math.isinf(total.epsilon) else total.epsilon,
        "total_delta": None if total is None else total.delta,
    }
    with replacing(folder / FILING_FILE, mode=0o600) as temporary:
        temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _total(records: tuple[Record, ...], plan: Plan) -> Total:
    return total_of(records, unit=plan.unit, delta=plan.delta)
