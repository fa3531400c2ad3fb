"""Spending records from strangers: what no accountant can count is refused, and never enters the ledger."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from sfumato.errors import ConfigError, RunError
from sfumato.ledger.ledger import Ledger
from sfumato.ledger.receipt import SPENDING_FILE, read_receipt
from sfumato.ledger.totals import total_of
from sfumato.privacy.plan import Plan

PLAN = Plan(num_examples=5000, batch_size=250, num_steps=100, noise_multiplier=2.0, delta=1e-5)
A = "a" * 64
EVENT = {
    "kind": "sampled-gaussian",
    "noise_multiplier": 1.0,
    "sampling_rate": 0.5,
    "num_steps": 1,
    "discrete": False,
}
SEARCH = {"kind": "selection", "events": [EVENT], "mean_runs": 5.0, "shape": 1.0}
SCHEME = {"name": "x", "rate": 0.1, "text": "each", "release": EVENT, "event": EVENT, "per_step": True}
SCHEME["num_steps"] = 10**6
HOSTILE_PLANS = {
    "noise underflows": {"noise_multiplier": 1e-200},
    "noise overflows": {"noise_multiplier": 1e300},
    "noise is text": {"noise_multiplier": "1"},
    "half a step": {"num_steps": 10.5},
    "steps are true": {"num_steps": True},
    "steps without end": {"num_steps": 10**30},
    "half a unit": {"num_examples": 5000.5},
    "events without end": {"extra_events": [{**EVENT, "noise_multiplier": 1 + n / 999} for n in range(2000)]},
    "event of half a step": {"extra_events": [{**EVENT, "num_steps": 1.5}]},
    "event of tiny noise": {"extra_events": [{**EVENT, "noise_multiplier": 1e-200}]},
    "discrete noise under pld": {"extra_events": [{**EVENT, "discrete": True}]},
    "a search in a search": {"extra_events": [{**SEARCH, "events": [SEARCH]}], "accountant": "rdp"},
    "a search without end": {"tuning_runs": 1e308, "accountant": "rdp"},
    "a scheme without an event": {"sampling": {"name": "x", "rate": 0.1, "text": "each"}},
    "a scheme without words": {"sampling": {**SCHEME, "text": 5}},
    "a scheme of more steps": {"sampling": {**SCHEME, "num_steps": 1}},
    "a scheme for other noise": {"sampling": {**SCHEME, "release": {**EVENT, "noise_multiplier": 9.0}}},
    "a scheme with a search": {"sampling": {**SCHEME, "event": SEARCH}},
    "noise without an event": {"mechanism": {"name": "x", "words": "x", "assumption": None}},
    "noise that is a number": {"mechanism": 5},
}
HOSTILE_RECORDS = {
    "steps below zero": {"reserved_steps": -1},
    "steps as text": {"reserved_steps": "7"},
    "no text": {"label": "\ud800"},
    "no lease": {"leases": []},
    "finished perhaps": {"finished": "perhaps"},
    "no plan but a list": {"plan": [1]},
}


@pytest.fixture
def folder(tmp_path) -> Path:
    state = tmp_path / "run"
    state.mkdir()
    with Ledger.open(tmp_path / "theirs.sqlite") as theirs:
        told = {"image_ids": torch.arange(9)}
        account = theirs.begin(fingerprint=A, name="theirs", plan=PLAN, folder=state, **told)
        account.spend(100)
        account.finish()
    return state


def spoil(folder: Path, **changes: object) -> None:
    file = folder / SPENDING_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def check_refused(folder: Path) -> None:
    with Ledger.open(folder.parent / "mine.sqlite") as mine:
        with pytest.raises(RunError, match="damaged-spending"):
            mine.import_folder(folder)
        assert mine.datasets() == {}


def test_the_control_is_taken_over(folder):
    with Ledger.open(folder.parent / "mine.sqlite") as mine:
        assert mine.import_folder(folder)
        assert total_of(mine.records(A), unit="image", delta=1e-5).epsilon == pytest.approx(PLAN.epsilon)


@pytest.mark.parametrize("name", HOSTILE_PLANS)
def test_a_plan_that_cannot_be_counted_is_refused(folder, name):
    plan = json.loads((folder / SPENDING_FILE).read_text())["plan"]
    spoil(folder, plan={**plan, **HOSTILE_PLANS[name]})
    check_refused(folder)


@pytest.mark.parametrize("name", HOSTILE_RECORDS)
def test_a_record_that_cannot_be_is_refused(folder, name):
    spoil(folder, **HOSTILE_RECORDS[name])
    check_refused(folder)


def test_deep_nesting_is_refused(folder):
    (folder / SPENDING_FILE).write_text("[" * 200_000)
    check_refused(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_is_refused_and_not_waited_for(folder):
    (folder / SPENDING_FILE).unlink()
    os.mkfifo(folder / SPENDING_FILE)
    with pytest.raises(RunError, match="not a plain file"):
        read_receipt(folder)


def test_what_a_ledger_cannot_count_is_named(folder):
    with Ledger.open(folder.parent / "mine.sqlite") as mine:
        mine.import_folder(folder)
        plan = json.dumps({**PLAN.as_dict(), "noise_multiplier": 1e-200})
        mine._connection.execute("UPDATE runs SET plan = ?", (plan,))
        run_id = read_receipt(folder).record.run_id
        with pytest.raises(RunError, match=run_id) as caught:
            mine.records(A)
        assert caught.value.code == "ledger-unavailable"


@pytest.mark.parametrize("noise", [1e300, 1e160, 1e-200, -1.0, float("nan"), float("inf")])
def test_noise_that_no_accountant_takes_is_a_coded_error(noise):
    with pytest.raises(ConfigError, match="noise-out-of-range"):
        Plan(num_examples=200, batch_size=20, num_steps=10, noise_multiplier=noise, delta=1e-3)


@pytest.mark.parametrize("noise", [1e-9, 1e9])
@pytest.mark.parametrize("sampling", ["poisson", "full"])
def test_the_bounds_themselves_can_be_counted(noise, sampling):
    size = 200 if sampling == "full" else 20
    plan = Plan(
        num_examples=200, batch_size=size, num_steps=10, noise_multiplier=noise, delta=1e-3, sampling=sampling
    )
    assert plan.epsilon >= 0.0


def test_an_old_ledger_that_was_restored_learns_from_the_folders_what_it_missed(tmp_path):
    file, told = (
        tmp_path / "ledger.sqlite",
        {"fingerprint": A, "name": "images", "image_ids": torch.arange(9)},
    )
    Ledger.open(file).close()
    old = file.read_bytes()
    totals = []
    with Ledger.open(file) as book:
        for name in "ab":
            (tmp_path / name).mkdir()
            account = book.begin(plan=PLAN, folder=tmp_path / name, **told)
            account.spend(100)
            account.finish()
        totals.append(total_of(book.records(A), unit="image", delta=1e-5))
    for leftover in tmp_path.glob("ledger.sqlite-*"):
        leftover.unlink()
    file.write_bytes(old)
    with Ledger.open(file) as book:
        assert book.records(A) == []  # as docs/ledger.md says: this is not noticed
        for name in "ab":
            book.import_folder(tmp_path / name)
        totals.append(total_of(book.records(A), unit="image", delta=1e-5))
    assert totals[0] == totals[1]
