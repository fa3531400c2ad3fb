"""Planted faults where a hostile review found holes: people, weights, labels, and what can be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

SPELLINGS = "test_one_person_in_several_spellings_is_one_unit_in_training_and_in_the_ledger"


@fault("two-spellings-two-units", tests=(f"data/test_manifest.py::{SPELLINGS}",))
def two_spellings_two_units(patch: MonkeyPatch) -> None:
    rewrite(
        patch, "sfumato.data.readers.folder:_number_patients", "one_spelling(entry.patient)", "entry.patient"
    )
