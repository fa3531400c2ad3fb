import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.data import load_data, shared_images, shared_patients
from sfumato.data.counting import count_units
from sfumato.data.readers import listing, matching, patients
from sfumato.errors import ConfigError, DataError


def test_a_folder_becomes_its_splits_classes_and_pixels(image_folder):
    folder = image_folder(train=4, val=1, test=2)
    data = load_data(folder, image_size=12)
    assert [len(part) for part in (data.train, data.val, data.test)] == [8, 2, 4]
    assert data.train.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4
    assert data.train.name == "images"
    with Image.open(folder / "test" / "dog" / "p0-1.png") as image:
        expected = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)
    assert torch.equal(data.test.images[3], expected)
    assert not torch.equal(data.test.images[2], expected)


def test_class_folders_alone_are_all_training_images(image_folder):
    folder = image_folder(train=3)
    data = load_data(folder / "train")
    assert len(data.train) == 6
    assert data.val is None
    assert data.test is None


def test_the_fingerprint_survives_moving_renaming_resizing_and_lossless_copies(image_folder, tmp_path):
    folder = image_folder(train=4, grey=True)
    original = load_data(folder).train
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    for number, path in enumerate(sorted(moved.rglob("*.png"))):
        with Image.open(path) as image:
            image.convert("RGB").save(path.with_name(f"{99 - number}.bmp"))
        path.unlink()
    copy = load_data(moved, image_size=20).train
    assert copy.fingerprint == original.fingerprint
    assert len(shared_images(original, copy)) == 8
    with Image.open(moved / "train" / "cat" / "99.bmp") as image:
        image.putpixel((0, 0), (1, 2, 3))
        image.save(moved / "train" / "cat" / "99.bmp")
    assert load_data(moved).train.fingerprint != original.fingerprint


def test_size_and_colour_are_what_was_set_or_fixed_defaults_whatever_the_images_are(image_folder):
    folder = image_folder(train=2, grey=True)
    assert load_data(folder).train.images.shape == (4, 3, 64, 64)
    assert load_data(folder, image_size=20, channels=1).train.images.shape == (4, 1, 20, 20)
    Image.new("RGB", (30, 40)).save(folder / "train" / "cat" / "other.png")
    assert load_data(folder).train.images.shape == (5, 3, 64, 64)
    assert load_data(folder, image_size=20, channels=1).train.images.shape == (5, 1, 20, 20)


def test_what_all_files_share_is_only_suggested_and_said_to_be_sensitive(image_folder):
    folder = image_folder(train=2, grey=True)
    (note,) = load_data(folder).notes
    assert note.startswith("sensitive:")
    assert "data.image_size=12 and data.channels=1" in note
    assert load_data(folder, image_size=20, channels=1).notes == ()
    Image.new("RGB", (30, 40)).save(folder / "train" / "cat" / "other.png")
    assert load_data(folder).notes == ()


def test_patients_come_out_of_file_names_and_mean_the_same_person_in_every_split(image_folder):
    folder = image_folder(train=4, test=2)
    data = load_data(folder, patient_from=r"(cat|dog)/(p\d+)-")
    assert data.patient_names == ("cat/p0", "cat/p1", "dog/p0", "dog/p1")
    assert data.train.patients.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert shared_patients(data) == ["cat/p0", "dog/p0"]
    assert load_data(folder, patient_from=r"/(?P<patient>p\d+)-(\d)").patient_names == ("p0", "p1")
    assert load_data(folder, patient_from=r"p\d").train.num_units("patient") == 2
    assert load_data(folder).train.patients is None


def test_links_to_images_and_class_folders_are_followed(image_folder, tmp_path):
    folder = image_folder(train=2)
    (folder / "train" / "dog").rename(tmp_path / "kennel")
    (folder / "train" / "dog").symlink_to(tmp_path / "kennel")
    assert load_data(folder).train.labels.tolist() == [0, 0, 1, 1]


def test_what_operating_systems_leave_behind_is_ignored(image_folder):
    folder = image_folder(train=2)
    for name in (".DS_Store", "Thumbs.db", "._cat.png"):
        (folder / "train" / "cat" / name).write_bytes(b"x")
    (folder / ".git").mkdir()
    assert len(load_data(folder).train) == 4


def broken(folder, how):
    train = folder / "train"
    if how == "corrupt-image":
        (train / "cat" / "p0-0.png").write_bytes(b"not an image")
    elif how == "empty-class":
        (train / "bird").mkdir()
    elif how == "class-not-in-train":
        shutil.copytree(train / "cat", folder / "test" / "bird")
    elif how == "not-an-image":
        (train / "cat" / "notes.txt").write_text("see dog")
    elif how == "image-without-class":
        shutil.copy(train / "cat" / "p0-0.png", train / "lost.png")
    elif how == "no-train-split":
        train.rename(folder / "test")
    elif how == "one-class":
        shutil.rmtree(train / "dog")
    elif how == "no-images":
        shutil.rmtree(train)
    elif how == "bad-classes":
        (folder / "classes.txt").write_text("cat\ncat\n")
    elif how == "unreadable-folder":
        (train / "cat" / "again").symlink_to(train / "cat")
    elif how == "missing-folder":
        shutil.rmtree(folder)


BROKEN = (
    "corrupt-image",
    "empty-class",
    "class-not-in-train",
    "not-an-image",
    "image-without-class",
    "no-train-split",
    "one-class",
    "no-images",
    "bad-classes",
    "unreadable-folder",
    "missing-folder",
)


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_folder_is_refused_with_its_own_code(image_folder, how):
    folder = image_folder(train=2)
    load_data(folder)  # the control: unbroken, it loads
    broken(folder, how)
    with pytest.raises(DataError) as caught:
        load_data(folder)
    assert caught.value.code == how
    assert caught.value.fix
    assert "images" in caught.value.what  # it names the file or folder


def test_classes_txt_is_the_public_list_of_classes(image_folder):
    folder = image_folder(train=2)
    (folder / "classes.txt").write_text("dog\ncat\n")
    assert load_data(folder).train.classes == ("dog", "cat")
    assert load_data(folder).classes_are_declared
    (folder / "classes.txt").write_text("dog\n")
    with pytest.raises(DataError, match="label-out-of-range"):
        load_data(folder)
    (folder / "classes.txt").write_bytes(b"dog\n\xff\n")
    with pytest.raises(DataError, match="bad-classes"):
        load_data(folder)


def test_whether_a_declared_class_has_images_decides_nothing(image_folder):
    folder = image_folder(train=2, test=2)
    assert not load_data(folder).classes_are_declared
    names = ("dog", "bird", "cat")
    declared = load_data(folder, classes=names)
    assert declared.train.classes == names
    assert declared.train.labels.tolist() == [2, 2, 0, 0]
    shutil.copytree(folder / "train" / "cat", folder / "test" / "bird")  # no training image of its class
    assert load_data(folder, classes=names).train.classes == names
    with pytest.raises(DataError, match="class-not-in-train"):  # the control: found, and not declared
        load_data(folder)
    with pytest.raises(DataError, match="label-out-of-range"):
        load_data(folder, classes=("dog", "cat"))
    (folder / "classes.txt").write_text("cat\ndog\nbird\n")
    with pytest.raises(DataError, match="bad-classes"):
        load_data(folder, classes=names)


@pytest.mark.parametrize("name", ["²", "٣", "9" * 200])
def test_a_class_may_be_called_by_any_number(image_folder, name):
    folder = image_folder(train=2, classes=("1", name))
    assert load_data(folder).train.classes == tuple(sorted(("1", name)))


def test_a_class_whose_name_is_no_text_is_refused(image_folder):
    folder = image_folder(train=2)
    (folder / "train" / "cat").rename(os.fsdecode(os.fsencode(folder / "train") + b"/c\xff"))
    with pytest.raises(DataError, match="bad-classes"):
        load_data(folder)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"patient_from": "(p"}, "bad-pattern"),
        ({"image_size": 2}, "bad-image-size"),
        ({"channels": 2}, "bad-channels"),
        ({"fit": "squash"}, "bad-fit"),
    ],
)
def test_options_that_cannot_be_meant_are_usage_errors(image_folder, options, code):
    with pytest.raises(ConfigError, match=code) as caught:
        load_data(image_folder(train=2), **options)
    assert caught.value.exit_code == 2


SLOW = "(a+)+$"


def slow_names(folder):
    """Files on whose names the expression would search for ages."""
    for path in sorted(folder.rglob("*.png")):
        path.rename(path.with_name(f"{'a' * 60}{path.stem}!.png"))


def test_an_expression_that_takes_for_ever_is_ended_in_time_also_outside_the_main_thread(
    image_folder, monkeypatch
):
    monkeypatch.setattr(patients, "SECONDS", 1.5)
    folder = image_folder(train=2)
    slow_names(folder)
    with ThreadPoolExecutor(1) as pool:
        began = time.perf_counter()
        error = pool.submit(load_data, folder, patient_from=SLOW).exception()
        assert time.perf_counter() - began < 15
    assert isinstance(error, ConfigError)
    assert error.code == "slow-pattern"
    assert "train/cat/aaa" in error.what  # where it hangs
    assert load_data(folder, patient_from="(a{9,})").patient_names == ("a" * 60,)  # the control


@pytest.mark.parametrize("pattern", ["(p", "a{99999999999}", "(" * 5000, "[", "(?P<patient>"])
def test_what_is_no_expression_is_a_coded_error(image_folder, pattern):
    with pytest.raises(ConfigError, match="bad-pattern"):
        load_data(image_folder(train=1), patient_from=pattern)


def test_the_process_beside_finds_what_the_expression_finds_here():
    texts = ["train/a/P1_2.png", "train/b/IM-7.png", "none", "\udcff/P3_é.png"]
    for pattern in (r"(P\d+)_", r"P(\d)_(.)", r"(?P<patient>IM-\d)|x(y)", r"[A-Z]+", ""):
        found = [matching.marked(re.compile(pattern), text) for text in texts]
        assert patients.find_patients(pattern, texts) == found
    assert patients.find_patients("x", []) == []


def test_a_file_without_a_patient_is_named(image_folder):
    folder = image_folder(train=2)
    shutil.copy(folder / "train" / "cat" / "p0-0.png", folder / "train" / "cat" / "anonymous.png")
    with pytest.raises(DataError, match="missing-patient") as caught:
        load_data(folder, patient_from=r"p\d+-")
    assert "anonymous.png" in caught.value.what


def test_a_name_that_is_nearly_known_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"unknown-data(.|\n)*Did you mean cifar10\?"):
        load_data("cifar-10")
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"data-not-found(.|\n)*sfumato data get cifar10"):
        load_data("cifar10")


def test_tiny_imagenets_own_layout_is_understood(tmp_path):
    classes = ("n02", "n01")
    (tmp_path / "wnids.txt").write_text("\n".join(classes))
    (tmp_path / "val" / "images").mkdir(parents=True)
    for label, name in enumerate(classes):
        folder = tmp_path / "train" / name / "images"
        folder.mkdir(parents=True)
        (folder.parent / f"{name}_boxes.txt").write_text("")
        Image.new("RGB", (64, 64), (label, 0, 0)).save(folder / f"{name}_0.JPEG")
        Image.new("RGB", (64, 64), (label, 9, 0)).save(tmp_path / "val" / "images" / f"val_{label}.JPEG")
    annotations = tmp_path / "val" / "val_annotations.txt"
    annotations.write_text("val_0.JPEG\tn02\t0\t0\t1\t1\nval_1.JPEG\tn01\t0\t0\t1\t1\n")
    data = load_data(tmp_path)
    assert data.train.classes == classes  # in the order of wnids.txt
    assert data.test.labels.tolist() == [0, 1]
    annotations.write_text("val_0.JPEG\tn77\t0\t0\t1\t1\n")
    with pytest.raises(DataError, match=r"label-out-of-range(.|\n)*line 1"):
        load_data(tmp_path)


def test_files_are_counted_while_they_are_listed_for_every_command(image_folder, monkeypatch):
    folder = image_folder(train=4, test=1)
    monkeypatch.setattr(listing, "_TOLD_EVERY", 3)
    for count in (
        lambda **told: load_data(folder, **told),
        lambda **told: count_units(str(folder), **told),
    ):
        found = []
        count(on_listing=found.append)
        assert found == [3, 6, 9]  # over all classes and splits: ten files
