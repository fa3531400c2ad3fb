"""What an officer files: date, run, units and earlier runs; nothing in it is computed from the images."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest

from sfumato.ledger.ledger import Ledger
from sfumato.recipes.recipe import with_settings
from sfumato.run import prepare as preparing
from sfumato.run.filing import units_from
from sfumato.run.session import train
from small_runs import small_recipe, small_splits


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.setattr(preparing, "check_model", lambda *_, **__: [])  # takes seconds; tested elsewhere


def test_a_release_says_which_run_it_is_and_what_came_before(tmp_path: Path) -> None:
    recipe, splits = small_recipe(training__num_steps=2), small_splits(test=0)
    first = train(recipe, out=tmp_path / "first", data=splits)
    second = train(recipe, out=tmp_path / "second", data=splits)
    filed = [result.privacy["filing"] for result in (first, second)]
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        assert [each["run_id"] for each in filed] == [
            record.run_id for record in ledger.records_named("shades")
        ]
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", each["date"]) for each in filed)
    assert [each["earlier_runs"] for each in filed] == [0, 1]
    assert filed[0]["total_epsilon"] is None
    assert filed[1]["total_epsilon"] > second.privacy["epsilon"]
    assert "Settings were fixed beforehand" in first.privacy["statement"]
    assert "1 earlier private run on data of this name" in second.privacy["statement"]
    assert "Settings were fixed beforehand" not in second.privacy["statement"]
    card = (tmp_path / "second" / "release" / "README.md").read_text(encoding="utf-8")
    assert f"| run | {filed[1]['run_id']} |" in card
    assert "| earlier private runs on data of this name | 1 |" in card


def test_the_fingerprint_and_the_total_by_content_stay_with_the_owner(tmp_path: Path) -> None:
    splits = small_splits(test=0)
    train(small_recipe(training__num_steps=2), out=tmp_path / "run", data=splits)
    kept = tmp_path / "run" / "state" / "filing.json"
    document = json.loads(kept.read_text(encoding="utf-8"))
    assert document["fingerprint"] == splits.train.fingerprint
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    for file in (tmp_path / "run" / "release").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
        assert splits.train.fingerprint[:12].encode() not in file.read_bytes()


def test_how_units_were_recognised_is_said(tmp_path: Path) -> None:
    recipe = small_recipe()
    assert units_from(recipe) == "each image is a unit"
    patients = with_settings(recipe, {"privacy.unit": "patient", "data.name": str(tmp_path)})
    assert units_from(with_settings(patients, {"data.patient_from": r"(P\d+)_"})) == (
        r"the regular expression (P\d+)_ in each file's path"
    )
    assert "that the data name" in units_from(with_settings(patients, {"data.name": "array"}))
    headers = "the PatientID in each file's DICOM header"
    assert units_from(with_settings(patients, {"data.patient_from": "dicom"})) == headers
    assert units_from(patients) == headers  # in a folder nothing else can name them
    (tmp_path / "manifest.csv").write_text("path,label\n", encoding="utf-8")
    assert units_from(patients) == headers
    (tmp_path / "manifest.csv").write_text("path,label,patient\n", encoding="utf-8")
    assert units_from(patients) == "the patient column of manifest.csv"
