"""The ledger never shows less than was used: after kills, copies, moves, losses and in competition."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from killed_spending import PLAN

from sfumato import accounting
from sfumato.accounting import SampledGaussian
from sfumato.cli import cli
from sfumato.errors import ConfigError, PrivacyError, RunError
from sfumato.ledger.ledger import Cap, Ledger
from sfumato.ledger.receipt import SPENDING_FILE, write_receipt
from sfumato.ledger.totals import total_of
from sfumato.privacy.plan import Plan

ONE, OTHER = "1" * 64, "2" * 64
SMALL = Plan(num_examples=5000, batch_size=250, num_steps=100, noise_multiplier=2.0, delta=1e-5)


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "ledger.sqlite") as book:
        yield book


def begin(ledger: Ledger, folder: Path, *, plan: Plan | None = SMALL, fingerprint: str = ONE, **more):
    folder.mkdir(parents=True, exist_ok=True)
    return ledger.begin(fingerprint=fingerprint, name="images", plan=plan, folder=folder, **more)


def recorded(ledger: Ledger, fingerprint: str = ONE) -> list[int]:
    return [record.reserved_steps for record in ledger.records(fingerprint)]


def test_what_is_spent_is_on_record_before_the_call_returns(ledger, tmp_path):
    account = begin(ledger, tmp_path / "run")
    for step in range(1, 101):
        account.spend(step)
        with Ledger.open(ledger.path) as another_process:
            assert recorded(another_process)[0] >= step
    assert recorded(ledger) == [100]


def test_a_killed_process_never_leaves_less_on_record_than_it_used(tmp_path):
    """Ten kill -9 at random instants of one run that is resumed each time. The 100 of a whole training are in
    attacks/kill_training.py."""
    random.seed(time.time_ns())
    used, folder, book = tmp_path / "used", tmp_path / "state", tmp_path / "ledger.sqlite"
    used.write_bytes(bytes(8))
    folder.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("killed_spending.py")), book, folder, used]
    steps = []
    for _ in range(10):
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(random.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        steps.append(int.from_bytes(used.read_bytes(), "little"))
        with Ledger.open(book) as after:
            records = after.records("f" * 64)
        assert len(records) == 1  # each continuation is the same run
        assert steps[-1] <= records[0].reserved_steps <= steps[-1] + 2 * PLAN.num_steps // 200 + 1
        copy = json.loads((folder / SPENDING_FILE).read_text())
        assert copy["reserved_steps"] >= steps[-1] - PLAN.num_steps // 200
    assert steps == sorted(steps)
    assert steps[-1] > steps[0] >= 0
    shutil.rmtree(folder)  # the control: without its folder, the run is paid for once more
    folder.mkdir()
    with Ledger.open(book) as after:
        after.begin(fingerprint="f" * 64, name="images", plan=PLAN, folder=folder)
        assert len(after.records("f" * 64)) == 2


def test_a_resumed_run_keeps_its_record(ledger, tmp_path):
    begin(ledger, tmp_path / "run").spend(40)
    account = begin(ledger, tmp_path / "run")
    assert recorded(ledger) == [40]
    account.spend(20)  # lost steps done again: nothing new is recorded
    assert recorded(ledger) == [40]
    account.spend(41)
    assert recorded(ledger) == [41]


def test_steps_are_reserved_in_portions_and_never_beyond_the_plan(ledger, tmp_path):
    account = begin(ledger, tmp_path / "run", plan=replace(SMALL, num_steps=1000))
    account.spend(1)
    assert recorded(ledger) == [5]
    account.spend(999)
    assert recorded(ledger) == [1000]
    with pytest.raises(PrivacyError, match="beyond-plan"):
        account.spend(1001)


def test_a_copied_run_folder_is_paid_for_as_a_run_of_its_own(ledger, tmp_path):
    first = begin(ledger, tmp_path / "run")
    first.spend(30)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    begin(ledger, tmp_path / "run").spend(100)  # the original goes on
    begin(ledger, tmp_path / "copy").spend(100)  # and so does the copy, from the same lease
    assert recorded(ledger) == [100, 100]
    begin(ledger, tmp_path / "copy")
    begin(ledger, tmp_path / "run")
    assert recorded(ledger) == [100, 100]  # the control: resuming either again is no third run


def test_a_process_whose_run_was_taken_over_cannot_spend_on(ledger, tmp_path):
    first = begin(ledger, tmp_path / "run")
    first.spend(10)
    begin(ledger, tmp_path / "run")
    with pytest.raises(RunError, match="run-taken-over"):
        first.spend(11)


def test_a_crash_between_folder_and_ledger_locks_nobody_out(ledger, tmp_path, monkeypatch):
    begin(ledger, tmp_path / "run").spend(10)

    def write_and_crash(*arguments):
        write_receipt(*arguments)
        raise OSError("power cut")

    acts = [
        lambda account: begin(ledger, tmp_path / "run"),
        lambda account: account.spend(20),
        lambda account: account.finish(),
    ]
    for act in acts:
        account = begin(ledger, tmp_path / "run")
        with monkeypatch.context() as patch:
            patch.setattr("sfumato.ledger.ledger.write_receipt", write_and_crash)
            with pytest.raises(OSError, match="power cut"):
                act(account)  # the folder has the new lease, the ledger still the old one
    account = begin(ledger, tmp_path / "run", saved_steps=20)
    assert recorded(ledger) == [20]
    assert account.record.finished


def test_a_lost_ledger_is_rebuilt_from_the_run_folders(tmp_path):
    with Ledger.open(tmp_path / "old.sqlite") as old:
        begin(old, tmp_path / "a").spend(70)
        account = begin(old, tmp_path / "b")
        account.spend(100)
        account.finish()
    with Ledger.open(tmp_path / "new.sqlite") as new:
        begin(new, tmp_path / "a")  # resuming brings its record along
        assert recorded(new) == [70]
        assert new.import_folder(tmp_path / "b")
        assert not new.import_folder(tmp_path)
        assert recorded(new) == [70, 100]
        new.import_folder(tmp_path / "b")
        assert recorded(new) == [70, 100]


def test_an_old_copy_of_the_ledger_cannot_lower_what_the_folder_knows(tmp_path):
    book = tmp_path / "ledger.sqlite"
    with Ledger.open(book) as ledger:
        account = begin(ledger, tmp_path / "run")
        account.spend(10)
        shutil.copy(book, tmp_path / "backup.sqlite")
        for name in os.listdir(tmp_path):
            if name.startswith("ledger.sqlite-"):
                shutil.copy(tmp_path / name, tmp_path / name.replace("ledger", "backup"))
        account.spend(60)
    with Ledger.open(tmp_path / "backup.sqlite") as restored:
        begin(restored, tmp_path / "run")
        assert recorded(restored) == [60]


def test_a_ledger_that_vanishes_under_a_run_is_filled_again(tmp_path):
    with Ledger.open(tmp_path / "a.sqlite") as first:
        account = begin(first, tmp_path / "run")
        account.spend(10)
    with Ledger.open(tmp_path / "b.sqlite") as second:
        account.ledger = second
        account.spend(50)
        assert recorded(second) == [50]


def test_the_clock_decides_nothing(ledger, tmp_path, monkeypatch):
    begin(ledger, tmp_path / "run").spend(10)
    monkeypatch.setattr(time, "strftime", lambda *_: "1970-01-01 00:00")
    begin(ledger, tmp_path / "run").spend(30)
    begin(ledger, tmp_path / "second").spend(20)
    assert recorded(ledger) == [30, 20]


def test_runs_on_data_that_share_images_add_up(ledger, tmp_path):
    begin(ledger, tmp_path / "a", image_ids=torch.arange(0, 100)).spend(10)
    begin(ledger, tmp_path / "b", fingerprint=OTHER, image_ids=torch.arange(99, 200)).spend(20)
    begin(ledger, tmp_path / "c", fingerprint="3" * 64, image_ids=torch.arange(300, 400)).spend(30)
    assert recorded(ledger) == [10, 20]
    assert recorded(ledger, OTHER) == [10, 20]
    assert recorded(ledger, "3" * 64) == [30]  # the control shares nothing


def test_the_total_is_the_composition_of_what_was_used(ledger, tmp_path):
    begin(ledger, tmp_path / "a").spend(100)
    other = replace(SMALL, noise_multiplier=3.0, extra_events=(SampledGaussian(noise_multiplier=40.0),))
    begin(ledger, tmp_path / "b", plan=other).spend(60)
    total = total_of(ledger.records(ONE), unit="image", delta=1e-5)
    expected = accounting.epsilon(
        [
            SampledGaussian(noise_multiplier=2.0, sampling_rate=0.05, num_steps=100),
            SampledGaussian(noise_multiplier=3.0, sampling_rate=0.05, num_steps=60),
            SampledGaussian(noise_multiplier=40.0),
        ],
        delta=1e-5,
    )
    assert total.epsilon == pytest.approx(expected, rel=1e-6)
    assert total.epsilon > SMALL.epsilon
    planned = total_of(ledger.records(ONE), unit="image", delta=1e-5, planned=True)
    assert planned.epsilon > total.epsilon  # the second run is still open


def test_runs_without_noise_are_shown_and_have_no_epsilon(ledger, tmp_path):
    begin(ledger, tmp_path / "a").spend(100)
    begin(ledger, tmp_path / "seeded", releasable=False).spend(100)
    begin(ledger, tmp_path / "plain", plan=None).spend(100)
    total = total_of(ledger.records(ONE), unit="image", delta=1e-5)
    assert total.num_runs == 1
    assert total.epsilon == pytest.approx(SMALL.epsilon, rel=1e-9)
    assert [record.counted for record in ledger.records(ONE)] == [True, False, False]


def test_patients_and_images_are_not_confused(ledger, tmp_path):
    begin(ledger, tmp_path / "a", plan=replace(SMALL, unit="patient")).spend(100)
    patients = total_of(ledger.records(ONE), unit="patient", delta=1e-5)
    assert patients.epsilon == pytest.approx(SMALL.epsilon, rel=1e-9)
    images = total_of(ledger.records(ONE), unit="image", delta=1e-5)
    assert images.neighbouring == "replace-one"  # one image changes a patient's gradient into another
    assert images.epsilon > patients.epsilon
    begin(ledger, tmp_path / "b").spend(100)
    assert total_of(ledger.records(ONE), unit="patient", delta=1e-5).epsilon == float("inf")


def test_a_cap_is_respected_before_anything_is_recorded(ledger, tmp_path):
    ledger.set_cap(ONE, Cap(unit="image", epsilon=1.2 * SMALL.epsilon, delta=1e-5), unit="image")
    begin(ledger, tmp_path / "a", image_ids=torch.arange(100))
    with pytest.raises(PrivacyError, match="over-cap"):
        begin(ledger, tmp_path / "b")  # the first may still use its whole plan
    with pytest.raises(PrivacyError, match="over-cap"):
        begin(ledger, tmp_path / "b", fingerprint=OTHER, image_ids=torch.arange(50, 150))
    assert len(ledger.records(ONE)) == 1
    assert not (tmp_path / "b" / SPENDING_FILE).exists()
    begin(ledger, tmp_path / "a")  # the control: going on with the first is within the cap
    begin(ledger, tmp_path / "c", fingerprint=OTHER, image_ids=torch.arange(200, 300))
    begin(ledger, tmp_path / "seeded", releasable=False)


def test_closing_or_finishing_a_run_gives_back_what_it_did_not_use(ledger, tmp_path):
    ledger.set_cap(ONE, Cap(unit="image", epsilon=1.2 * SMALL.epsilon, delta=1e-5), unit="image")
    account = begin(ledger, tmp_path / "a")
    account.spend(5)
    account.finish()
    other = begin(ledger, tmp_path / "b")
    ledger.close_run(other.record.run_id)
    begin(ledger, tmp_path / "c")
    with pytest.raises(PrivacyError, match="over-cap"):
        begin(ledger, tmp_path / "a")  # it gave its plan back, and the plan is taken now
    ledger.set_cap(ONE, None, unit="image")
    begin(ledger, tmp_path / "a")


def test_of_several_processes_only_as_many_start_as_the_cap_allows(tmp_path):
    book = tmp_path / "ledger.sqlite"
    with Ledger.open(book) as ledger:
        cap = accounting.epsilon([event for _ in range(3) for event in SMALL.events()], delta=1e-5)
        ledger.set_cap(ONE, Cap(unit="image", epsilon=cap * 1.001, delta=1e-5), unit="image")

    def attempt(number: int) -> bool:
        with Ledger.open(book) as mine:
            try:
                account = begin(mine, tmp_path / f"run{number}")
            except PrivacyError:
                return False
            for step in range(1, 101):
                account.spend(step)
            account.finish()
            return True

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(attempt, range(8)))
    assert sum(outcomes) == 3
    with Ledger.open(book) as ledger:
        assert recorded(ledger) == [100, 100, 100]


def test_the_file_is_the_owners_alone_and_a_place_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "deep" / "ledger.sqlite"))
    with Ledger.open() as ledger:
        assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunError, match="ledger-unavailable"):
        Ledger.open(tmp_path / "file" / "ledger.sqlite")
    (tmp_path / "broken.sqlite").write_text("this is no database " * 100)
    with pytest.raises(RunError, match="ledger-unavailable"):
        Ledger.open(tmp_path / "broken.sqlite")


def test_a_damaged_record_in_the_folder_is_an_error_and_not_a_new_run(ledger, tmp_path):
    begin(ledger, tmp_path / "run").spend(10)
    (tmp_path / "run" / SPENDING_FILE).write_text("{")
    with pytest.raises(RunError, match="damaged-spending"):
        begin(ledger, tmp_path / "run")


def test_another_plan_or_other_data_in_the_same_folder_is_another_run(ledger, tmp_path):
    begin(ledger, tmp_path / "run").spend(10)
    begin(ledger, tmp_path / "run", plan=replace(SMALL, noise_multiplier=5.0)).spend(3)
    assert recorded(ledger) == [10, 3]


def ledger_command(*words: str) -> str:
    result = CliRunner().invoke(cli, ["ledger", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_people_can_read_cap_close_and_import(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    assert "No run has been recorded" in ledger_command("show")
    with Ledger.open() as ledger:
        begin(ledger, tmp_path / "run" / "state", label="first").spend(100)
        begin(ledger, tmp_path / "seeded", label="trial", releasable=False).spend(100)
    shown = ledger_command("show", ONE[:12])
    assert "spent per image: ε = " in shown
    assert "(1 run, add-or-remove" in shown
    assert "100 of 100 steps" in shown
    assert "seeded or without privacy" in shown
    ledger_command("cap", ONE[:12], "--epsilon", "3", "--delta", "1e-5")
    sheet = json.loads(ledger_command("show", "--json"))["datasets"][0]
    assert sheet["caps"] == [{"unit": "image", "epsilon": 3.0, "delta": 1e-5}]
    assert sheet["totals"][0]["epsilon"] == pytest.approx(SMALL.epsilon, rel=1e-9)
    assert [run["kind"] for run in sheet["runs"]] == ["private", "seeded"]
    closed = json.loads(ledger_command("close", sheet["runs"][0]["run_id"], "--json"))
    assert closed == {"run_id": sheet["runs"][0]["run_id"], "finished": True}
    assert json.loads(ledger_command("show", "--json"))["datasets"][0]["runs"][0]["finished"]
    ledger_command("cap", ONE[:12], "--lift")
    assert json.loads(ledger_command("show", "--json"))["datasets"][0]["caps"] == []
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "new.sqlite"))
    assert "recorded" in ledger_command("import", str(tmp_path / "run"))
    assert "has no record" in ledger_command("import", str(tmp_path))
    again = json.loads(ledger_command("import", str(tmp_path / "run"), str(tmp_path), "--json"))
    assert [row["recorded"] for row in again] == [True, False]
    assert "is closed" in ledger_command("close", str(tmp_path / "run"))  # by its folder
    (run,) = json.loads(ledger_command("show", "--json"))["datasets"][0]["runs"]
    assert run["finished"]
    with pytest.raises(ConfigError, match="unknown-run"):
        CliRunner().invoke(cli, ["ledger", "close", "nobody"], catch_exceptions=False, standalone_mode=False)
    with pytest.raises(ConfigError, match="no-cap-given"):
        CliRunner().invoke(cli, ["ledger", "cap", "digits"], catch_exceptions=False, standalone_mode=False)
