"""Whole runs that are copied, killed between two writes, closed while at work, or stripped of their seed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from sfumato.data import DataSplits
from sfumato.errors import PrivacyError, RunError
from sfumato.ledger.account import Account
from sfumato.ledger.ledger import Cap, Ledger
from sfumato.ledger.totals import total_of
from sfumato.recipes.recipe import recipe_to_toml
from sfumato.run import persistence, steps
from sfumato.run.session import train
from sfumato.run.state import LineLog
from small_runs import Watcher, small_recipe, small_set, small_splits


@pytest.fixture(autouse=True)
def own_ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))


def break_off(folder: Path, *, after: int, **changes: object) -> None:
    with pytest.raises(RuntimeError, match="as if killed"):
        train(small_recipe(**changes), out=folder, data=small_splits(), observer=Watcher(crash_after=after))


def resume(folder: Path, **changes: object):
    watcher = Watcher()
    result = train(small_recipe(**changes), out=folder, data=small_splits(), resume=True, observer=watcher)
    return result, watcher


def recorded() -> list[int]:
    with Ledger.open() as ledger:
        return [record.reserved_steps for record in ledger.records(small_splits().train.fingerprint)]


def spent() -> float:
    with Ledger.open() as ledger:
        records = ledger.records(small_splits().train.fingerprint)
    return total_of(records, unit="image", delta=1e-3).epsilon


def weights(folder: Path) -> bytes:
    return (folder / "release/model.safetensors").read_bytes()


def test_two_models_from_one_started_run_are_two_runs(tmp_path):
    break_off(tmp_path / "a", after=4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    resume(tmp_path / "a")
    assert recorded() == [8]
    one = spent()
    _, watcher = resume(tmp_path / "b")
    assert recorded() == [8, 8]
    assert spent() > 1.2 * one
    assert any("run of its own" in str(note) for note in watcher.notes)
    assert weights(tmp_path / "a") != weights(tmp_path / "b")


def test_a_finished_run_and_its_copies_publish_the_same_model_for_nothing(tmp_path):
    train(small_recipe(), out=tmp_path / "a", data=small_splits())
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = weights(tmp_path / "a")
    for name in "bab":
        shutil.rmtree(tmp_path / name / "release")
        _, watcher = resume(tmp_path / name)
        assert watcher.records == []  # no step was taken
        assert weights(tmp_path / name) == first
    assert recorded() == [8]


def test_a_run_that_was_taken_over_publishes_nothing(tmp_path, monkeypatch):
    """The copy is resumed when the original has saved its last step but published nothing yet."""
    original = steps.Run.fit

    def fit_then_copied(self, interruption):
        original(self, interruption)
        if not (tmp_path / "b").exists():
            shutil.copytree(tmp_path / "a", tmp_path / "b")
            resume(tmp_path / "b")

    monkeypatch.setattr(steps.Run, "fit", fit_then_copied)
    with pytest.raises(RunError) as caught:
        train(small_recipe(), out=tmp_path / "a", data=small_splits())
    assert caught.value.code == "run-taken-over"
    assert not (tmp_path / "a/release").exists()
    assert (tmp_path / "b/release").exists()  # the control
    assert recorded() == [8]


def test_a_run_killed_after_its_account_was_closed_still_publishes(tmp_path, monkeypatch):
    def killed(*_args, **_kwargs):
        raise RuntimeError("as if killed")

    with monkeypatch.context() as patch:
        patch.setattr("sfumato.run.session.publish", killed)
        with pytest.raises(RuntimeError):
            train(small_recipe(), out=tmp_path / "a", data=small_splits())
    assert not (tmp_path / "a/release").exists()
    result, watcher = resume(tmp_path / "a")
    assert (result.num_steps, watcher.records) == (8, [])
    assert recorded() == [8]


def test_closing_a_run_at_work_stops_it_before_its_next_result(tmp_path):
    fingerprint = small_splits().train.fingerprint

    class Closing(Watcher):
        def stepped(self, record, epsilon):
            super().stepped(record, epsilon)
            if record.step == 3:
                with Ledger.open() as ledger:
                    ledger.close_run(ledger.records(fingerprint)[0].run_id)

    with Ledger.open() as ledger:
        ledger.set_cap(fingerprint, Cap(unit="image", epsilon=8.5, delta=1e-3), unit="image")
    with pytest.raises(RunError) as caught:
        train(small_recipe(), out=tmp_path / "a", data=small_splits(), observer=Closing())
    assert caught.value.code == "run-closed"
    lines = (tmp_path / "a/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 2
    train(small_recipe(privacy__epsilon=5.0), out=tmp_path / "b", data=small_splits())
    assert spent() <= 8.5
    with pytest.raises(PrivacyError) as refused:
        resume(tmp_path / "a")
    assert refused.value.code == "over-cap"
    with Ledger.open() as ledger:
        ledger.set_cap(fingerprint, None, unit="image")
    assert resume(tmp_path / "a")[0].num_steps == 8  # the control: there is room again


@pytest.mark.parametrize(("before", "after"), [(3, None), (None, 3), (3, 4)])
def test_the_seed_belongs_to_the_run_and_not_to_a_file_that_can_be_edited(tmp_path, before, after):
    break_off(tmp_path / "a", after=4, training__seed=before)
    edited = small_recipe(training__seed=after)
    (tmp_path / "a/recipe.toml").write_text(recipe_to_toml(edited))
    with pytest.raises(PrivacyError) as caught:
        resume(tmp_path / "a", training__seed=after)
    assert caught.value.code == "changed-source"
    assert not (tmp_path / "a/release").exists()
    (tmp_path / "a/recipe.toml").write_text(recipe_to_toml(small_recipe(training__seed=before)))
    result, _ = resume(tmp_path / "a", training__seed=before)  # the control
    assert result.privacy["releasable"] is (before is None)


def test_a_seeded_run_without_its_state_does_not_become_private_either(tmp_path, monkeypatch):
    """Killed between the ledger and the first state: only the folder's record knows of the seed."""

    def killed(*_args):
        raise KeyboardInterrupt

    recipe = small_recipe(training__seed=3)
    (tmp_path / "a").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(persistence, "save_state", killed)
        patch.setattr(shutil, "rmtree", lambda *_args, **_kwargs: None)  # kill -9 clears nothing away
        with pytest.raises(KeyboardInterrupt):
            train(recipe, out=tmp_path / "a", data=small_splits())
    (tmp_path / "a/recipe.toml").write_text(recipe_to_toml(small_recipe()))
    with pytest.raises(PrivacyError) as caught:
        resume(tmp_path / "a")
    assert caught.value.code == "changed-source"


def crash(patch, place: str) -> None:
    """Stop the commit of step 5 before, between or inside its writes, as a power cut would."""
    original_save, original_confirm, original_write = persistence.save_state, Account.confirm, LineLog.write

    def save(state, folder):
        if place == "before the state" and state.values["step"] == 5:
            raise RuntimeError("power cut")
        original_save(state, folder)

    def confirm(self, step):
        if place == "behind the state" and step == 5:
            raise RuntimeError("power cut")
        original_confirm(self, step)
        if place == "behind the ledger" and step == 5:
            raise RuntimeError("power cut")

    def write(self):
        here = self.path.name == "metrics.jsonl" and any('"step": 5,' in line for line in self.waiting)
        if place == "inside the log" and here:
            with open(self.path, "a") as file:
                file.write('{"step": 5, "eps')
            raise RuntimeError("power cut")
        original_write(self)
        if place == "behind the log" and here:
            raise RuntimeError("power cut")

    patch.setattr(persistence, "save_state", save)
    patch.setattr(Account, "confirm", confirm)
    patch.setattr(LineLog, "write", write)


def seen_lines(folder: Path) -> list[str]:
    """Whole lines that anybody could have read."""
    return [line for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]


def taken_back(seen: list[str], final: list[str]) -> list[str]:
    """Lines that were seen once and are not in the end: their steps were taken again with fresh noise."""
    return [line for line in seen if line not in final]


@pytest.mark.parametrize(
    "place",
    ["before the state", "behind the state", "behind the ledger", "inside the log", "behind the log"],
)
def test_no_score_is_seen_of_a_step_that_is_taken_again(tmp_path, monkeypatch, place):
    recipe = small_recipe(training__evaluate_every=1)
    with monkeypatch.context() as patch:
        crash(patch, place)
        with pytest.raises(RuntimeError, match="power cut"):
            train(recipe, out=tmp_path / "a", data=small_splits())
    seen = seen_lines(tmp_path / "a")
    assert [json.loads(line)["step"] for line in seen][:4] == [1, 2, 3, 4]
    train(recipe, out=tmp_path / "a", data=small_splits(), resume=True)
    final = seen_lines(tmp_path / "a")
    assert [json.loads(line)["step"] for line in final] == list(range(1, 9))
    assert taken_back(seen, final) == []
    assert recorded() == [8]
    train(recipe, out=tmp_path / "b", data=small_splits())
    assert len(taken_back(seen, seen_lines(tmp_path / "b"))) >= 3  # the control: fresh noise, other scores


def test_patients_of_two_runs_are_linked_by_name(tmp_path):
    recipe = small_recipe(privacy__unit="patient", training__batch_size=12, privacy__delta=1e-2)

    def scans(seed: int, people: str) -> DataSplits:
        names = tuple(f"{people} {number}" for number in range(24))
        return DataSplits(train=small_set(96, seed=seed, patients=24), patient_names=names)

    years = [scans(11, "anna"), scans(12, "anna"), scans(13, "ben")]
    for number, year in enumerate(years):
        train(recipe, out=tmp_path / str(number), data=year)
    with Ledger.open() as ledger:
        assert [len(ledger.records(year.train.fingerprint)) for year in years] == [2, 2, 1]
    subset = dataclasses.replace(years[0], train=years[0].train.select(years[0].train.patients < 3))
    assert subset.names_of(subset.train) == ("anna 0", "anna 1", "anna 2")
    text = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"anna" not in text
