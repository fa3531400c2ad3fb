"""A search pays beforehand for its runs, once for each, and for nothing else."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sfumato.accounting import SampledGaussian
from sfumato.errors import PrivacyError
from sfumato.ledger.ledger import Account, Ledger
from sfumato.ledger.totals import total_of
from sfumato.privacy.plan import Plan
from sfumato.privacy.search import Search

IDS = torch.arange(100, dtype=torch.int64)
TRIAL, FINAL = (
    SampledGaussian(noise_multiplier=30.0, num_steps=9),
    SampledGaussian(noise_multiplier=8.0, num_steps=16),
)
SEARCH = Search(strategy="scaled", num_trials=3, trial=(TRIAL,), final=(FINAL,), scored_on="public images")


def plan(event: SampledGaussian = TRIAL, **changes: object) -> Plan:
    values = {
        "num_examples": 100,
        "batch_size": 100,
        "sampling": "full",
        "delta": 1e-3,
        "num_steps": event.num_steps,
        "noise_multiplier": event.noise_multiplier,
        "search": SEARCH,
        "search_part": "trial" if event is TRIAL else "final",
    }
    return Plan(**{**values, **changes})


def begin(ledger: Ledger, place: Path, run: Plan | None, parent: str = "", **values: object) -> Account:
    place.mkdir(parents=True, exist_ok=True)
    given = {"fingerprint": "whole", "name": "data", "image_ids": IDS, "label": place.name, **values}
    return ledger.begin(plan=run, folder=place, parent=parent, **given)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(tmp_path / "ledger.sqlite")


@pytest.fixture
def search(tmp_path: Path, ledger: Ledger) -> str:
    account = begin(ledger, tmp_path / "search", plan(FINAL))
    account.spend(FINAL.num_steps)
    account.finish()
    return account.record.run_id


def spent(ledger: Ledger) -> float:
    return total_of(ledger.records("whole"), unit="image", delta=1e-3).epsilon


def test_a_search_is_counted_whole_from_its_beginning_and_its_runs_add_nothing(
    tmp_path: Path, ledger: Ledger, search: str
) -> None:
    whole = plan(FINAL).epsilon
    assert spent(ledger) == pytest.approx(whole)
    for number in range(3):
        child = begin(
            ledger, tmp_path / f"{number:04d}", plan(), search, fingerprint="part", image_ids=IDS[:80]
        )
        child.spend(9)
        child.finish()
    begin(ledger, tmp_path / "run", plan(FINAL), search).spend(16)
    assert spent(ledger) == pytest.approx(whole)
    assert len(ledger.children(search)) == 4
    assert [record.run_id for record in ledger.records_named("data")] == [search]
    # the control: the same runs without their search are paid for one by one
    begin(ledger, tmp_path / "other", plan(search=None)).spend(9)
    assert spent(ledger) > whole


def test_what_the_search_has_not_paid_for_is_refused(tmp_path: Path, ledger: Ledger, search: str) -> None:
    other = replace(SEARCH, num_trials=4)
    for name, run, values in (
        ("unknown", plan(), {"parent": "0" * 16}),
        ("another search", plan(search=other), {}),
        ("another delta", plan(delta=2e-3), {}),
        ("no search", plan(search=None), {}),
        ("a seed", plan(), {"releasable": False}),
        ("more images", plan(), {"image_ids": torch.arange(101), "fingerprint": "more"}),
        ("unknown images", plan(), {"image_ids": None, "fingerprint": "unknown"}),
    ):
        with pytest.raises(PrivacyError, match="not-paid-by-search"):
            begin(ledger, tmp_path / name, run, values.pop("parent", search), **values)
    assert ledger.children(search) == []


def test_a_search_that_was_not_spent_pays_for_nothing(tmp_path: Path, ledger: Ledger) -> None:
    account = begin(ledger, tmp_path / "search", plan(FINAL))
    account.spend(1)
    if account.record.reserved_steps < FINAL.num_steps:
        with pytest.raises(PrivacyError, match="not-paid-by-search"):
            begin(ledger, tmp_path / "0000", plan(), account.record.run_id)
    account.spend(FINAL.num_steps)
    begin(ledger, tmp_path / "0000", plan(), account.record.run_id)


def test_each_part_is_paid_for_once(tmp_path: Path, ledger: Ledger, search: str) -> None:
    whole = spent(ledger)
    begin(ledger, tmp_path / "a" / "0000", plan(), search).spend(9)
    assert spent(ledger) == pytest.approx(whole)
    resumed = begin(ledger, tmp_path / "a" / "0000", plan(), search)
    assert resumed.record.parent == search  # the same folder goes on
    again = begin(ledger, tmp_path / "b" / "0000", plan(), search)
    assert again.record.parent == ""
    again.spend(9)
    assert spent(ledger) > 1.2 * whole
    # begun, but never a step of it: nothing was used, and the part is still to be had
    begin(ledger, tmp_path / "a" / "0001", plan(), search)
    assert begin(ledger, tmp_path / "c" / "0001", plan(), search).record.parent == search


def test_no_more_runs_are_paid_for_than_were_counted(tmp_path: Path, ledger: Ledger, search: str) -> None:
    whole = spent(ledger)
    for number in range(3):
        begin(ledger, tmp_path / f"{number:04d}", plan(), search).spend(9)
    begin(ledger, tmp_path / "run", plan(FINAL), search).spend(16)
    assert spent(ledger) == pytest.approx(whole)
    for name, event in (("0003", TRIAL), ("final", FINAL)):
        more = begin(ledger, tmp_path / name, plan(event), search)
        assert more.record.parent == ""  # it pays for itself
        more.spend(event.num_steps)
    assert spent(ledger) > 1.2 * whole


def test_of_two_that_were_begun_at_once_one_goes_on(tmp_path: Path, ledger: Ledger, search: str) -> None:
    whole = spent(ledger)
    one = begin(ledger, tmp_path / "a" / "run", plan(FINAL), search)
    two = begin(ledger, tmp_path / "b" / "run", plan(FINAL), search)
    assert one.record.parent == two.record.parent == search
    one.spend(16)
    with pytest.raises(PrivacyError, match="not-paid-by-search"):
        two.spend(16)
    assert spent(ledger) == pytest.approx(whole)
    again = begin(ledger, tmp_path / "b" / "run", plan(FINAL), search)
    again.spend(16)
    assert spent(ledger) > 1.2 * whole


def test_a_rebuilt_ledger_counts_the_search_once_and_a_run_without_it_by_itself(
    tmp_path: Path, ledger: Ledger, search: str
) -> None:
    child = begin(ledger, tmp_path / "0000", plan(), search)
    child.spend(9)
    whole = spent(ledger)
    rebuilt = Ledger.open(tmp_path / "rebuilt.sqlite")
    rebuilt.import_folder(tmp_path / "search")
    rebuilt.import_folder(tmp_path / "0000")
    assert spent(rebuilt) == pytest.approx(whole)
    orphaned = Ledger.open(tmp_path / "orphaned.sqlite")
    orphaned.import_folder(tmp_path / "0000")
    assert spent(orphaned) == pytest.approx(whole)  # it counts as much as the search that it was part of
    with sqlite3.connect(tmp_path / "rebuilt.sqlite") as damaged:
        damaged.execute("DELETE FROM runs WHERE run_id = ?", (search,))
    assert spent(rebuilt) == pytest.approx(whole)  # so it does if the search's own row is lost
