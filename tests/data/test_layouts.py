"""Folders and manifests as newcomers have them are understood or refused, not silently taken for others."""

from __future__ import annotations

import shutil

import pytest

from sfumato.data import load_data
from sfumato.errors import DataError


@pytest.mark.parametrize(
    ("train", "val", "test"), [("Train", "Valid", "Test"), ("training", "validation", "testing")]
)
def test_splits_are_known_under_the_names_that_people_give_them(image_folder, train, val, test):
    folder = image_folder(**{train: 3, val: 1, test: 2})
    data = load_data(folder)
    assert [len(part) for part in (data.train, data.val, data.test)] == [6, 2, 4]
    assert data.train.classes == ("cat", "dog")
    assert data.survey.examples[0][0].startswith(f"{train}/")


@pytest.mark.parametrize("above", ["download/xrays/{split}/{name}", "download/{name}/{split}"])
def test_splits_inside_what_would_be_classes_are_refused(above, image_folder, tmp_path):
    folder = image_folder(train=2, test=2)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            place = tmp_path / above.format(split=split.title(), name=name)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(folder / split / name, place)
    (tmp_path / "download" / "more").mkdir()  # a second class, so that there are enough of them
    shutil.copytree(folder / "train" / "cat", tmp_path / "download" / "more" / "cat")
    with pytest.raises(DataError, match="split-inside-class"):
        load_data(tmp_path / "download")
    # the control: one such folder inside a class may be of anything
    for place in (tmp_path / "download").rglob("Test"):
        shutil.rmtree(place)
    assert load_data(tmp_path / "download").train.num_units("image") > 4


def test_a_split_under_two_names_is_refused_and_so_is_a_folder_of_tests_alone(image_folder):
    folder = image_folder(Train=1, Test=1)
    shutil.copytree(folder / "Train", folder / "training")
    with pytest.raises(DataError, match=r"split-named-twice(.|\n)*Train and training"):
        load_data(folder)
    shutil.rmtree(folder / "training")
    (folder / "Train").rename(folder / "Control")  # classes called Control and Test, perhaps
    with pytest.raises(DataError, match="no-train-split"):
        load_data(folder)
    (folder / "Test").rename(folder / "Treated")
    assert load_data(folder).train.classes == ("Control", "Treated")


@pytest.mark.parametrize("mark", [";", "\t"])
def test_a_manifest_may_be_separated_as_spreadsheets_do_it(image_folder, mark):
    folder = image_folder(train=2)
    files = sorted((folder / "train").rglob("*.png"))
    rows = [
        [path.relative_to(folder).as_posix(), path.parent.name, f"P,{path.stem}", "Training"]
        for path in files
    ]
    lines = [mark.join(row) for row in [["path", "label", "patient", "split"], *rows]]
    (folder / "manifest.csv").write_text("\n".join(lines))
    data = load_data(folder)
    assert len(data.train) == 4
    assert data.patient_names == ("p,p0-0", "p,p0-1")
    (folder / "manifest.csv").write_text("\n".join(lines).replace("Training", "trian"))
    with pytest.raises(DataError, match=r"unknown-split(.|\n)*Did you mean train"):
        load_data(folder)
