"""A copied or restored run folder never spends under the original's record, whenever it is resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sfumato.errors import PrivacyError, RunError
from sfumato.ledger.ledger import Account, Cap, Ledger
from sfumato.ledger.receipt import CLOSED, lineage
from sfumato.ledger.totals import total_of
from sfumato.privacy.plan import Plan

DATA = "1" * 64
PLAN = Plan(num_examples=5000, batch_size=250, num_steps=100, noise_multiplier=2.0, delta=1e-5)
LONG = Plan(num_examples=5000, batch_size=250, num_steps=1000, noise_multiplier=2.0, delta=1e-5)


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "ledger.sqlite") as book:
        yield book


class Worker:
    """A run as the ledger sees it: a folder with the number of its saved steps, and what was seen of it."""

    def __init__(self, ledger: Ledger, folder: Path, *, plan: Plan = PLAN, releasable: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.state = folder, folder / "step"
        self.step = int(self.state.read_text()) if self.state.exists() else -1
        self.account: Account = ledger.begin(
            fingerprint=DATA,
            name="images",
            plan=plan,
            folder=folder,
            releasable=releasable,
            saved_steps=self.step,
        )
        self.step = max(0, self.step)

    def go_to(self, step: int) -> Worker:
        """Take the steps up to ``step`` and save the state."""
        for number in range(self.step + 1, step + 1):
            self.account.spend(number)
        self.step = step
        self.state.write_text(str(step))
        self.account.confirm(step)
        return self

    def finish(self) -> Worker:
        self.account.finish()
        return self


def recorded(ledger: Ledger) -> list[int]:
    return [record.reserved_steps for record in ledger.records(DATA)]


def copied(worker: Worker, place: Path) -> Path:
    shutil.copytree(worker.folder, place)
    return place


def test_a_copy_resumed_after_the_original_finished_is_paid_for(ledger, tmp_path):
    original = Worker(ledger, tmp_path / "a").go_to(30)
    place = copied(original, tmp_path / "b")
    original.go_to(100).finish()
    copy = Worker(ledger, place)
    assert copy.account.copy_of == original.account.record.run_id
    copy.go_to(100).finish()
    assert recorded(ledger) == [100, 100]
    total = total_of(ledger.records(DATA), unit="image", delta=1e-5)
    assert total.epsilon > 1.2 * PLAN.epsilon


@pytest.mark.parametrize("end", ["saved", "spent", "finished"])
def test_whatever_the_original_did_since_makes_the_copy_a_run_of_its_own(ledger, tmp_path, end):
    """Within one process, so that the lease is the same; steps lie in portions of five."""
    original = Worker(ledger, tmp_path / "a", plan=LONG).go_to(2)
    place = copied(original, tmp_path / "b")
    if end == "saved":
        original.go_to(4)  # of the same portion: no further step is recorded, but more was seen
        assert recorded(ledger) == [5]
    elif end == "spent":
        original.account.spend(6)
    else:
        original.finish()
    copy = Worker(ledger, place, plan=LONG)
    assert copy.account.copy_of == original.account.record.run_id
    copy.go_to(4)
    assert len(recorded(ledger)) == 2


def test_the_control_of_a_copy_is_a_resumed_run(ledger, tmp_path):
    """Nothing was seen beyond what the copy knows: it takes over, and the original is the copy then."""
    original = Worker(ledger, tmp_path / "a").go_to(30)
    place = copied(original, tmp_path / "b")
    assert Worker(ledger, place).go_to(50).account.copy_of is None
    assert recorded(ledger) == [50]
    assert Worker(ledger, tmp_path / "a").account.copy_of == original.account.record.run_id
    assert recorded(ledger) == [50, 30]  # what the original had saved counts for it too


def test_a_copy_resumed_beside_a_live_original_stops_it_before_it_shows_anything_more(ledger, tmp_path):
    original = Worker(ledger, tmp_path / "a", plan=LONG).go_to(2)
    Worker(ledger, copied(original, tmp_path / "b"), plan=LONG).go_to(3)
    with pytest.raises(RunError, match="run-taken-over"):
        original.go_to(4)  # steps of its portion, which the ledger has counted already
    with pytest.raises(RunError, match="run-taken-over"):
        original.finish()
    assert recorded(ledger) == [5]


def test_of_copies_resumed_at_once_one_goes_on_and_the_others_are_paid_for(ledger, tmp_path):
    original = Worker(ledger, tmp_path / "a").go_to(30)
    places = [copied(original, tmp_path / name) for name in "bcd"]
    copies = [Worker(ledger, place) for place in places]
    assert [copy.account.copy_of is None for copy in copies] == [True, False, False]
    for copy in copies:
        copy.go_to(100).finish()
    assert recorded(ledger) == [100, 100, 100]
    for place in places:  # each is now itself
        assert Worker(ledger, place).account.copy_of is None
    assert recorded(ledger) == [100, 100, 100]


def test_a_restored_backup_counts_although_the_original_is_gone(ledger, tmp_path):
    original = Worker(ledger, tmp_path / "a").go_to(30)
    copied(original, tmp_path / "backup")
    original.go_to(60)
    shutil.rmtree(original.folder)
    shutil.move(tmp_path / "backup", original.folder)
    Worker(ledger, original.folder).go_to(100).finish()
    assert recorded(ledger) == [60, 100]


def test_an_old_state_under_a_new_record_is_a_run_of_its_own(ledger, tmp_path):
    worker = Worker(ledger, tmp_path / "a").go_to(30)
    worker.go_to(100).finish()
    worker.state.write_text("30")  # only this file comes from a backup
    assert Worker(ledger, worker.folder).account.copy_of is not None
    worker.state.unlink()
    assert Worker(ledger, worker.folder).account.copy_of is not None


def test_a_finished_run_can_be_opened_again_anywhere_but_takes_no_step(ledger, tmp_path):
    original = Worker(ledger, tmp_path / "a").go_to(100).finish()
    place = copied(original, tmp_path / "b")
    for folder in (place, original.folder, place):
        again = Worker(ledger, folder)
        assert again.account.copy_of is None
        again.account.confirm(100)
        again.finish()
        with pytest.raises(RunError, match="run-finished"):
            again.account.spend(1)
    assert recorded(ledger) == [100]


def test_a_run_that_keeps_no_state_begins_anew_once_it_is_finished(ledger, tmp_path):
    for expected in ([100], [100, 100]):
        account = ledger.begin(fingerprint=DATA, name="images", plan=PLAN, folder=tmp_path)
        account.spend(100)
        account.finish()
        assert recorded(ledger) == expected


def test_closing_a_live_run_cannot_pass_the_cap(ledger, tmp_path):
    ledger.set_cap(DATA, Cap(unit="image", epsilon=1.2 * PLAN.epsilon, delta=1e-5), unit="image")
    live = Worker(ledger, tmp_path / "a").go_to(10)
    ledger.close_run(live.account.record.run_id)
    Worker(ledger, tmp_path / "b").go_to(100).finish()
    for more in (lambda: live.go_to(11), lambda: live.account.confirm(10), live.finish):
        with pytest.raises(RunError, match="run-closed"):
            more()
    assert total_of(ledger.records(DATA), unit="image", delta=1e-5).epsilon <= 1.2 * PLAN.epsilon
    with pytest.raises(PrivacyError, match="over-cap"):
        Worker(ledger, live.folder)  # its plan was given back, and is taken
    ledger.set_cap(DATA, None, unit="image")
    resumed = Worker(ledger, live.folder)
    assert resumed.account.copy_of is None  # the control: it may go on as itself where there is room
    resumed.go_to(100).finish()
    assert recorded(ledger) == [100, 100]
    ledger.close_run(resumed.account.record.run_id)  # nothing is left to give back
    assert Worker(ledger, live.folder).account.record.finished


@pytest.mark.parametrize("seeded_first", [True, False])
def test_a_run_never_changes_between_seeded_and_private(ledger, tmp_path, seeded_first):
    worker = Worker(ledger, tmp_path / "a", releasable=not seeded_first).go_to(30)
    copied(worker, tmp_path / "b")
    for folder in (worker.folder, tmp_path / "b"):
        with pytest.raises(PrivacyError, match="changed-source"):
            Worker(ledger, folder, releasable=seeded_first)
    assert [record.releasable for record in ledger.records(DATA)] == [not seeded_first]
    Worker(ledger, worker.folder, releasable=not seeded_first).go_to(100)
    assert [record.counted for record in ledger.records(DATA)] == [not seeded_first]


def test_leases_tell_who_descends_from_whom():
    known = ["a", "b", "c"]
    folders = {
        "same": ["a", "b", "c"],
        "newer": ["a", "b", "c", "d"],
        "older": ["a", "b"],
        "apart": ["a", "x"],
    }
    assert {verdict: lineage(known, leases) for verdict, leases in folders.items()} == {
        verdict: verdict for verdict in folders
    }
    assert lineage([*known, CLOSED], known) == "same"


def test_folders_that_went_on_apart_under_two_ledgers_count_as_two_when_imported(tmp_path):
    with Ledger.open(tmp_path / "first.sqlite") as first, Ledger.open(tmp_path / "second.sqlite") as second:
        original = Worker(first, tmp_path / "a").go_to(30)
        place = copied(original, tmp_path / "b")
        older = copied(original, tmp_path / "older")
        original.go_to(100).finish()
        Worker(second, place).go_to(80)  # this ledger knows nothing of the original
    with Ledger.open(tmp_path / "third.sqlite") as third:
        for folder in (place, original.folder, older, place, original.folder):
            assert third.import_folder(folder)
        assert sorted(recorded(third)) == [80, 100]  # each once; the older copy never went on
