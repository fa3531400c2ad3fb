"""Data sets about the same people count together: by images, by patients, and where nothing is known."""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from sfumato.cli import cli
from sfumato.errors import PrivacyError, RunError
from sfumato.ledger.ledger import Cap, Ledger
from sfumato.ledger.links import LINKS_FILE, read_links
from sfumato.ledger.receipt import SPENDING_FILE
from sfumato.ledger.totals import total_of
from sfumato.privacy.plan import Plan

IMAGES = Plan(num_examples=5000, batch_size=250, num_steps=100, noise_multiplier=2.0, delta=1e-5)
PATIENTS = replace(IMAGES, unit="patient")
A, B, C = "a" * 64, "b" * 64, "c" * 64
PEOPLE = [f"patient {number}" for number in range(300)]
NEXT_YEAR = [f"patient {number}" for number in range(299, 600)]  # one of them came again
OTHERS = [f"stranger {number}" for number in range(300)]


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "ledger.sqlite") as book:
        yield book


def train(ledger: Ledger, folder: Path, fingerprint: str, *, plan: Plan = IMAGES, **told) -> None:
    folder.mkdir(exist_ok=True)
    account = ledger.begin(fingerprint=fingerprint, name="images", plan=plan, folder=folder, **told)
    account.spend(100)
    account.finish()


def runs(ledger: Ledger, fingerprint: str, unit: str = "patient") -> int:
    return len(ledger.records(fingerprint, unit=unit))


def spent(ledger: Ledger, fingerprint: str, unit: str) -> float:
    return total_of(ledger.records(fingerprint, unit=unit), unit=unit, delta=1e-5).epsilon


def test_a_rebuilt_ledger_knows_which_data_sets_share_images(tmp_path):
    with Ledger.open(tmp_path / "old.sqlite") as old:
        train(old, tmp_path / "a", A, image_ids=torch.arange(0, 100))
        train(old, tmp_path / "b", B, image_ids=torch.arange(99, 200))
        train(old, tmp_path / "c", C, image_ids=torch.arange(500, 600))
        before = [spent(old, mark, "image") for mark in (A, B, C)]
    with Ledger.open(tmp_path / "new.sqlite") as new:
        for name in "abc":
            assert new.import_folder(tmp_path / name)
        assert [spent(new, mark, "image") for mark in (A, B, C)] == before
        assert [new.unknown(mark) for mark in (A, B, C)] == [[], [], []]
    assert before[0] == before[1] > before[2]  # the control shares nothing


def test_what_an_older_folder_does_not_tell_counts_with_everything(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "new.sqlite"))
    with Ledger.open(tmp_path / "old.sqlite") as old:
        for name, mark in {"a": A, "b": B, "c": C}.items():
            train(old, tmp_path / name, mark, image_ids=torch.arange(100) + 1000 * ord(name))
    (tmp_path / "a" / LINKS_FILE).unlink()
    with Ledger.open() as new:
        for name in "abc":
            new.import_folder(tmp_path / name)
        assert new.unknown(A) == ["images"]
        assert [runs(new, mark, "image") for mark in (A, B, C)] == [3, 2, 2]
        cap = Cap(unit="image", epsilon=1.2 * IMAGES.epsilon, delta=1e-5)
        new.set_cap(B, cap, unit="image")
        with pytest.raises(PrivacyError, match="over-cap"):
            train(new, tmp_path / "d", A)
        shown = CliRunner().invoke(cli, ["ledger", "show", A[:12]]).stdout
        assert "images are not known, so it counts together with every data set" in shown
        assert (
            json.loads(CliRunner().invoke(cli, ["ledger", "show", "--json"]).stdout)["datasets"][1]["unknown"]
            == []
        )
        train(new, tmp_path / "e", A, image_ids=torch.arange(100))  # seen again: from now on it is known
        assert [runs(new, mark, "image") for mark in (A, B, C)] == [2, 1, 1]


def test_next_years_scans_of_the_same_patients_count_with_this_years(ledger, tmp_path):
    told = {
        A: {"image_ids": torch.arange(0, 100), "patient_names": PEOPLE},
        B: {"image_ids": torch.arange(100, 200), "patient_names": NEXT_YEAR},
        C: {"image_ids": torch.arange(200, 300), "patient_names": OTHERS},
    }
    for number, (mark, what) in enumerate(told.items()):
        train(ledger, tmp_path / str(number), mark, plan=PATIENTS, **what)
    assert [runs(ledger, mark) for mark in told] == [2, 2, 1]
    assert spent(ledger, A, "patient") == spent(ledger, B, "patient") > spent(ledger, C, "patient")
    assert [runs(ledger, mark, "image") for mark in told] == [1, 1, 1]  # no image is in two of them


def test_a_cap_on_one_years_patients_sees_the_other_year(ledger, tmp_path):
    cap = Cap(unit="patient", epsilon=1.2 * PATIENTS.epsilon, delta=1e-5)
    ledger.set_cap(A, cap, unit="patient", image_ids=torch.arange(0, 100), patient_names=PEOPLE)
    train(ledger, tmp_path / "a", A, plan=PATIENTS)
    strangers = {"image_ids": torch.arange(200, 300), "patient_names": OTHERS}
    train(ledger, tmp_path / "c", C, plan=PATIENTS, **strangers)  # the control
    again = {"image_ids": torch.arange(100, 200), "patient_names": NEXT_YEAR}
    with pytest.raises(PrivacyError, match="over-cap"):
        train(ledger, tmp_path / "b", B, plan=PATIENTS, **again)
    with pytest.raises(PrivacyError, match="over-cap"):  # patients that nobody names may be anybody
        train(ledger, tmp_path / "d", "d" * 64, plan=PATIENTS, image_ids=torch.arange(300, 400))
    train(ledger, tmp_path / "e", "e" * 64, image_ids=torch.arange(400, 500))  # the unit is the image


def test_images_as_units_leave_the_same_patients_without_a_bound(ledger, tmp_path):
    train(ledger, tmp_path / "a", A, image_ids=torch.arange(100), patient_names=PEOPLE)
    train(ledger, tmp_path / "b", B, plan=PATIENTS, image_ids=torch.arange(100, 200), patient_names=NEXT_YEAR)
    assert spent(ledger, B, "patient") == float("inf")


def test_names_differ_only_if_more_than_case_and_spaces_differ(ledger, tmp_path):
    names = {A: ["Zoë Adams"], B: [" zoe\u0308 ADAMS "], C: ["Zoe Adams"]}
    for number, (mark, people) in enumerate(names.items()):
        told = {"image_ids": torch.arange(10) + 10 * number, "patient_names": people}
        train(ledger, tmp_path / str(number), mark, plan=PATIENTS, **told)
    assert [runs(ledger, mark) for mark in names] == [2, 2, 1]


def test_no_name_is_written_and_hashes_need_the_key(ledger, tmp_path):
    name = "Wilhelmina Przybyszewski"
    train(ledger, tmp_path / "a", A, plan=PATIENTS, image_ids=torch.arange(9), patient_names=[name])
    key = tmp_path / "ledger.sqlite.key"
    for path in (key, ledger.path, tmp_path / "a" / LINKS_FILE):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ledger.close()
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        content = path.read_bytes().lower()
        assert b"wilhelmina" not in content
        assert (key.read_bytes() in path.read_bytes()) == (path == key)  # the tags lie apart from it
    with Ledger.open(tmp_path / "other.sqlite") as other:
        train(other, tmp_path / "b", A, plan=PATIENTS, image_ids=torch.arange(9), patient_names=[name])
    kept = [read_links(tmp_path / run, fingerprint=A) for run in "ab"]
    assert kept[0].image_ids.tolist() == kept[1].image_ids.tolist()
    assert kept[0].patient_tags.tolist() != kept[1].patient_tags.tolist()  # the same name, another key


def test_patients_hashed_under_another_key_count_with_everything_until_they_are_seen_again(tmp_path):
    told = {
        A: {"image_ids": torch.arange(0, 100), "patient_names": PEOPLE},
        B: {"image_ids": torch.arange(100, 200), "patient_names": NEXT_YEAR},
        C: {"image_ids": torch.arange(200, 300), "patient_names": OTHERS},
    }
    with Ledger.open(tmp_path / "old.sqlite") as old:
        for name, mark in {"a": A, "b": B, "c": C}.items():
            train(old, tmp_path / name, mark, plan=PATIENTS, **told[mark])
    with Ledger.open(tmp_path / "new.sqlite") as new:
        for name in "abc":
            new.import_folder(tmp_path / name)
        assert [runs(new, mark) for mark in told] == [2, 2, 1]  # under one key they can be compared
        train(
            new,
            tmp_path / "d",
            "d" * 64,
            plan=PATIENTS,
            image_ids=torch.arange(700, 800),
            patient_names=["Dora"],
        )
        assert [runs(new, mark) for mark in told] == [3, 3, 2]  # Dora's key is another one
        for name, mark in {"a": A, "b": B, "c": C}.items():
            train(new, tmp_path / f"{name}2", mark, plan=PATIENTS, **told[mark])
        assert [runs(new, mark) for mark in told] == [4, 4, 2]
        assert runs(new, "d" * 64) == 1
    shutil.copy(tmp_path / "old.sqlite.key", tmp_path / "third.sqlite.key")
    with Ledger.open(tmp_path / "third.sqlite") as third:  # the control: the key was kept
        third.import_folder(tmp_path / "a")
        train(
            third,
            tmp_path / "d3",
            "d" * 64,
            plan=PATIENTS,
            image_ids=torch.arange(700, 800),
            patient_names=["Dora"],
        )
        assert runs(third, A) == 1
    (tmp_path / "third.sqlite.key").write_bytes(b"short")
    with Ledger.open(tmp_path / "third.sqlite") as third, pytest.raises(RunError, match="ledger-unavailable"):
        train(third, tmp_path / "d4", "d" * 64, plan=PATIENTS, patient_names=["Dora"])


def test_a_ledger_of_the_first_version_is_read_and_its_patients_are_not_known(tmp_path):
    import sqlite3

    plan = json.dumps(PATIENTS.as_dict())
    with sqlite3.connect(tmp_path / "ledger.sqlite") as old:
        old.execute(
            "CREATE TABLE datasets (fingerprint TEXT PRIMARY KEY, name TEXT NOT NULL, image_ids BLOB)"
        )
        old.execute(
            "CREATE TABLE runs (run_id TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, label TEXT NOT NULL, "
            "plan TEXT, releasable INTEGER NOT NULL, reserved_steps INTEGER NOT NULL, "
            "finished INTEGER NOT NULL, lease TEXT NOT NULL, started TEXT NOT NULL)"
        )
        ids = np.arange(100, dtype="<i8").tobytes()
        old.execute("INSERT INTO datasets VALUES (?, 'images', ?)", (A, ids))
        old.execute("INSERT INTO runs VALUES ('r', ?, 'x', ?, 1, 70, 1, '00ff', '2024')", (A, plan))
    old.close()
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        assert [record.reserved_steps for record in ledger.records(A)] == [70]
        assert ledger.unknown(A) == ["patients"]
        train(
            ledger, tmp_path / "b", B, plan=PATIENTS, image_ids=torch.arange(500, 600), patient_names=PEOPLE
        )
        assert (runs(ledger, B), runs(ledger, B, "image")) == (2, 1)


def manifest_folder(folder: Path, people: list[str], seed: int) -> Path:
    folder.mkdir()
    random = np.random.default_rng(seed)
    rows = ["path,label,patient"]
    for number, person in enumerate(people):
        pixels = random.integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append(f"{number}.png,{'ab'[number % 2]},{person}")
    (folder / "manifest.csv").write_text("\n".join(rows) + "\n")
    return folder


def test_names_reach_the_ledger_from_manifest_and_file_names(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    first = manifest_folder(tmp_path / "first", ["anna", "ben", "carl", "dora"], seed=1)
    second = manifest_folder(tmp_path / "second", ["emil", "fay", "anna", "gus"], seed=2)
    third = tmp_path / "third"
    for number, person in enumerate(["ben", "hanna", "ida", "jon"]):
        (third / "train" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        pixels = np.full((8, 8), number, dtype=np.uint8)
        Image.fromarray(pixels).save(third / "train" / "ab"[number % 2] / f"{person}_1.png")
    cap = ["--epsilon", "5", "--unit", "patient", "--json"]
    sheets = []
    for words in ([str(first)], [str(second)], [str(third), "--patient-from", r"/(\w+)_\d"]):
        done = CliRunner().invoke(cli, ["ledger", "cap", *words, *cap], catch_exceptions=False)
        sheets.append(json.loads(done.stdout))
    assert [sheet["unknown"] for sheet in sheets] == [[], [], []]
    with Ledger.open() as ledger:
        related = [set(ledger.related(sheet["fingerprint"], unit="patient")) for sheet in sheets]
    one, two, three = (sheet["fingerprint"] for sheet in sheets)
    assert related == [{one, two, three}, {one, two}, {one, three}]  # anna links two of them, ben two others


def test_spending_is_synced_to_the_disk_with_its_folder(ledger, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    account = ledger.begin(fingerprint=A, name="images", plan=IMAGES, folder=folder)
    synced, real = [], os.fsync

    def fsync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    account.spend(7)
    assert any(SPENDING_FILE in name for name in synced)
    assert synced[-1] == str(folder)
    assert synced.index(str(folder)) > min(i for i, name in enumerate(synced) if SPENDING_FILE in name)


@pytest.mark.parametrize("damage", [b"", b"\x80\x04pickle", b'{"format": 1}' * 9])
def test_damaged_links_are_a_coded_error(ledger, tmp_path, damage):
    train(ledger, tmp_path / "a", A, image_ids=torch.arange(9))
    (tmp_path / "a" / LINKS_FILE).write_bytes(damage)
    with Ledger.open(tmp_path / "new.sqlite") as new, pytest.raises(RunError, match="damaged-spending"):
        new.import_folder(tmp_path / "a")


@pytest.mark.parametrize(
    "change",
    [
        {"leases": []},
        {"leases": ["a b"]},
        {"leases": ["closed"]},
        {"leases": 3},
        {"reserved_steps": "many"},
        {"reserved_steps": -5},
        {"reserved_steps": 2**70},
        {"plan": {"unit": "image"}},
        {"plan": []},
        {"run_id": None},
        {"fingerprint": 1.5},
    ],
)
def test_a_strangers_record_is_refused_with_a_code(ledger, tmp_path, change):
    train(ledger, tmp_path / "a", A)
    path = tmp_path / "a" / SPENDING_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with Ledger.open(tmp_path / "new.sqlite") as new:
        with pytest.raises(RunError, match="damaged-spending"):
            new.import_folder(tmp_path / "a")
        assert new.datasets() == {}
