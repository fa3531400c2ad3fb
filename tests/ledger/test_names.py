"""Runs by the name of their data: what a release says came before it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sfumato.ledger.ledger import Account, Ledger
from sfumato.ledger.receipt import SPENDING_FILE
from sfumato.privacy.plan import Plan

ONE = "1" * 64
SMALL = Plan(num_examples=5000, batch_size=250, num_steps=100, noise_multiplier=2.0, delta=1e-5)


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "ledger.sqlite") as book:
        yield book


def begin(ledger: Ledger, folder: Path, *, name: str = "images") -> Account:
    folder.mkdir(exist_ok=True)
    return ledger.begin(fingerprint=ONE, name=name, plan=SMALL, folder=folder, label=folder.name)


def named(ledger: Ledger, name: str) -> list[str]:
    return [record.label for record in ledger.records_named(name)]


def test_a_run_is_found_under_its_own_name_whatever_its_data_were_called_before(ledger, tmp_path):
    ledger.set_cap(ONE, None, unit="image", name="capped")
    for number, name in enumerate("abbb"):
        begin(ledger, tmp_path / str(number), name=name)
    assert (named(ledger, "a"), named(ledger, "b"), named(ledger, "capped")) == (["0"], ["1", "2", "3"], [])
    with Ledger.open(tmp_path / "rebuilt.sqlite") as new:
        for number in range(4):
            new.import_folder(tmp_path / str(number))
        assert (named(new, "a"), named(new, "b")) == (["0"], ["1", "2", "3"])


def test_a_run_without_a_known_name_or_with_two_counts_under_every_name(ledger, tmp_path):
    begin(ledger, tmp_path / "older")
    begin(ledger, tmp_path / "renamed")
    spending = tmp_path / "older" / SPENDING_FILE
    values = json.loads(spending.read_text())
    del values["name"]  # as an earlier version wrote it
    spending.write_text(json.dumps(values))
    begin(ledger, tmp_path / "renamed", name="others")
    assert named(ledger, "others") == ["renamed"]
    assert named(ledger, "images") == ["older", "renamed"]
    ledger.import_folder(tmp_path / "older")
    assert named(ledger, "others") == ["older", "renamed"]


def test_a_ledger_of_an_earlier_version_counts_its_runs_under_every_name(ledger, tmp_path):
    begin(ledger, tmp_path / "old")
    ledger._connection.execute("ALTER TABLE runs DROP COLUMN name")
    with Ledger.open(ledger.path) as opened:
        assert named(opened, "whatever") == ["old"]
