"""sfumato evaluate as a user calls it: measures, subgroups, gaps, held-out images, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from sfumato.cli import main
from sfumato.data.subgroups import subgroup_column
from sfumato.errors import DataError

SETTINGS = ("--epsilon", 8, "--delta", 1e-2, "--recipe", "default/folder", "--set", "model.options.width=4")
SETTINGS += (
    "--set",
    "model.options.groups=2",
    "--set",
    "data.image_size=12",
    "--set",
    "training.num_epochs=1",
)


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(capsys):
    def run(*arguments):
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def write_manifest(folder, *, train=24, test=16):
    """Bright and dark images of patients with four images each, and their sex for the evaluation."""
    folder.mkdir()
    random = np.random.default_rng(1)
    lines = ["path,label,patient,split,group_sex"]
    for number in range(train + test):
        label = number % 2
        pixels = random.integers(0, 150, (12, 12, 3)) + 100 * label
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        split = "train" if number < train else "test"
        lines.append(
            f"{number}.png,{'ill' if label else 'well'},P{number // 4},{split},{'fm'[number % 3 == 0]}"
        )
    (folder / "manifest.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_measures_subgroups_and_the_gap_to_another_run_are_printed_and_in_json(call, own_place):
    data = write_manifest(own_place / "data")
    assert call("train", data, *SETTINGS, "--out", "private", "--set", "decision.positive=ill")[0] == 0
    assert call("train", data, "--no-privacy", *SETTINGS[4:], "--out", "plain")[0] == 0
    code, out, _ = call("evaluate", "private", "--by", "sex", "--against", "plain", "--json")
    found = json.loads(out)
    assert (code, found["num_examples"], found["num_people"], found["positive"]) == (0, 16, 4, "ill")
    for key in ("accuracy", "balanced_accuracy", "auc", "sensitivity", "specificity", "f1", "mcc"):
        assert key in found
        assert found[key] is None or -1 <= found[key] <= 1
    sizes = {key: group["num_examples"] for key, group in found["subgroups"]["sex"].items()}
    assert sizes == {"f": 10, "m": 6}
    assert set(found["gap"]["auc"]) == {"value", "lower", "upper"}
    code, out, _ = call("evaluate", "private", "--by", "sex", "--against", "plain")
    for words in ("area under the ROC curve", "specificity", "MCC", "sex", "plain above this run"):
        assert words in out
    assert call("evaluate", "private", "--by", "age")[0] == 1
    report = (own_place / "private" / "report.html").read_text()
    for words in ("ROC curve", "Calibration", "specificity", "Each class against the others"):
        assert words in report


def test_held_out_images_are_the_split_val_and_not_among_train(call, image_folder):
    data = image_folder(train=24, test=4)
    settings = (*SETTINGS, "--set", "data.holdout=0.3")
    assert call("train", data, *settings, "--out", "run")[0] == 0
    found = {}
    for split in ("val", "train", "test"):
        found[split] = json.loads(call("evaluate", "run", "--split", split, "--json")[1])["num_examples"]
    assert found["val"] + found["train"] == 48
    assert 0 < found["val"] < 40
    assert found["test"] == 8
    scores = json.loads(call("evaluate", "run", "--json")[1])
    assert (scores["split"], scores["sensitive"], scores["num_examples"]) == ("val", True, found["val"])


def test_a_run_without_test_images_says_so_and_what_to_do(call, image_folder):
    data = image_folder(train=8)
    code, out, _ = call("train", data, *SETTINGS, "--out", "run")
    assert code == 0
    assert "there are no test images" in out
    code, _, err = call("evaluate", "run")
    assert code == 0
    assert "trained on" in err


def test_columns_of_subgroups_follow_the_order_of_the_images_and_others_are_refused(own_place):
    data = write_manifest(own_place / "data")
    values = subgroup_column(data, "sex", split="test", num_images=16)
    assert values == ["fm"[number % 3 == 0] for number in range(24, 40)]
    for column in ("sexx", "patient"):
        with pytest.raises(DataError, match="no-subgroup-column"):
            subgroup_column(data, column, split="test", num_images=16)
    text = (data / "manifest.csv").read_text().replace("group_sex", "sex")
    (data / "manifest.csv").write_text(text)
    with pytest.raises(DataError, match="no-subgroup-column"):
        subgroup_column(data, "sex", split="test", num_images=16)
