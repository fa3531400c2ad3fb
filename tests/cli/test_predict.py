"""``sfumato predict``: every file is answered for, whatever lies beside it."""

from __future__ import annotations

import csv
import json

import pytest
from PIL import Image

import sfumato
from sfumato.cli import main
from small_releases import CLASSES, small_release


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return small_release(tmp_path_factory.mktemp("predict") / "release")


@pytest.fixture
def pictures(image_folder):
    return image_folder(test=3, classes=("cat", "dog")) / "test"


@pytest.fixture
def call(capsys):
    def run(*arguments):
        code = 0
        try:
            main(["predict", *map(str, arguments)])
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_one_broken_file_costs_no_other_its_prediction_and_is_listed(call, release, pictures):
    (pictures / "cat" / "p0-00.png").write_bytes(b"no image")
    code, out, err = call(release, pictures)
    assert code == 1
    assert len(out.splitlines()) == 6
    assert "1 of 7 files could not be read" in err
    assert "[corrupt-image]" in err
    assert "p0-00.png" in err
    code, out, err = call(release, pictures / "dog")  # the control: whole files alone end with 0
    assert (code, len(out.splitlines()), err) == (0, 3, "")


def test_files_that_are_no_images_are_named_and_not_guessed_at(call, release, pictures):
    (pictures / "notes.txt").write_text("x")
    (pictures / "dog" / "scan").write_bytes(b"x")
    code, out, err = call(release, pictures)
    assert (code, len(out.splitlines())) == (0, 6)
    assert "Skipped 2 files" in err
    assert "notes.txt" in err
    code, _, err = call(release, pictures / "notes.txt")  # named by the user: an answer is owed
    assert code == 1
    assert "[corrupt-image]" in err


def test_the_likeliest_classes_are_shown_in_order_and_add_up(call, release, pictures):
    _, out, _ = call(release, pictures, "--top", 2)
    for line in out.splitlines():
        assert line.count("%") == 2
    _, out, _ = call(release, pictures, "--top", 1)
    assert all(line.count("%") == 1 for line in out.splitlines())
    _, out, _ = call(release, pictures, "--json")
    for row in json.loads(out):
        assert list(row["probabilities"]) == list(CLASSES)
        assert sum(row["probabilities"].values()) == pytest.approx(1)
        assert row["probabilities"][row["label"]] == row["probability"] == max(row["probabilities"].values())


def test_the_table_has_a_row_for_every_file_and_says_what_python_says(call, release, pictures, tmp_path):
    broken = pictures / "dog" / "p1-9.png"
    broken.write_bytes(b"")
    code, _, _ = call(release, pictures, "--csv", tmp_path / "table.csv")
    assert code == 1
    rows = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert len(rows) == 7
    assert [row["file"] for row in rows if row["error"]] == [str(broken)]
    classifier = sfumato.load(release)
    for row in rows:
        if not row["error"]:
            expected = classifier.predict([row["file"]])[0]
            assert row["label"] == expected.label
            for name, chance in zip(CLASSES, expected.probabilities, strict=True):
                assert float(row[f"probability of {name}"]) == pytest.approx(chance, abs=1e-5)


def test_a_folder_without_images_is_refused(call, release, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("x")
    code, _, err = call(release, tmp_path / "empty")
    assert code == 1
    assert "[no-images]" in err


def test_a_wide_image_is_still_classified_as_python_does(call, release, tmp_path):
    Image.new("L", (40, 9), 120).save(tmp_path / "wide.png")
    code, out, _ = call(release, tmp_path / "wide.png", "--json")
    assert code == 0
    assert json.loads(out)[0]["label"] == sfumato.load(release).predict([tmp_path / "wide.png"])[0].label
