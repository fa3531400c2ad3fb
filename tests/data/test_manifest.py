import pytest

from sfumato.data import DataSplits, load_data
from sfumato.errors import ConfigError, DataError
from sfumato.ledger.links import links_of, one_spelling

GOOD = """path,label,patient,split
train/cat/p0-0.png,tabby,anna,train
train/cat/p0-1.png,tabby,anna,train
train/dog/p0-0.png,collie,ben,train
train/dog/p0-1.png,collie,carl,test
"""


@pytest.fixture
def folder(image_folder):
    folder = image_folder(train=2)
    (folder / "manifest.csv").write_text(GOOD)
    return folder


def test_a_manifest_gives_labels_patients_and_splits(folder):
    data = load_data(folder)
    assert data.train.classes == ("collie", "tabby")
    assert data.train.labels.tolist() == [1, 1, 0]
    assert data.patient_names == ("anna", "ben", "carl")
    assert data.train.patients.tolist() == [0, 0, 1]
    assert data.test.patients.tolist() == [2]
    assert data.val is None


def test_columns_may_come_in_any_order_with_a_byte_order_mark_and_windows_lines(folder):
    text = "label,path\r\n10,train/cat/p0-0.png\r\n9,train\\dog\\p0-0.png\r\n\r\n"
    (folder / "manifest.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    data = load_data(folder)
    assert data.train.classes == ("9", "10")  # by number, not by letters
    assert data.train.labels.tolist() == [1, 0]
    assert data.train.patients is None


def test_patients_may_come_from_the_column_or_the_file_name_but_not_both(folder):
    with pytest.raises(ConfigError, match="patients-twice"):
        load_data(folder, patient_from="p0")
    (folder / "manifest.csv").write_text("path,label\ntrain/cat/p0-0.png,a\ntrain/dog/p0-0.png,b\n")
    assert load_data(folder, patient_from="cat|dog").patient_names == ("cat", "dog")


@pytest.mark.parametrize("label", ["²", "--1", "-0", "9" * 5000, "٣"])
def test_a_label_that_only_looks_like_a_number_is_text(folder, label):
    rows = f"path,label\ntrain/cat/p0-0.png,{label}\ntrain/dog/p0-0.png,1\n"
    (folder / "manifest.csv").write_text(rows)
    assert set(load_data(folder).train.classes) == {label, "1"}
    (folder / "classes.txt").write_text("collie\ntabby\n")
    with pytest.raises(DataError, match="label-out-of-range"):
        load_data(folder)


def test_declared_classes_may_be_given_by_number(folder):
    (folder / "classes.txt").write_text("collie\ntabby\n")
    (folder / "manifest.csv").write_text("path,label\ntrain/cat/p0-0.png,1\ntrain/dog/p0-0.png,collie\n")
    assert load_data(folder).train.labels.tolist() == [1, 0]
    (folder / "manifest.csv").write_text("path,label\ntrain/cat/p0-0.png,2\ntrain/dog/p0-0.png,collie\n")
    with pytest.raises(DataError, match=r"label-out-of-range(.|\n)*line 2"):
        load_data(folder)


@pytest.mark.parametrize(
    ("old", "new", "code", "line"),
    [
        ("p0-1.png,collie,carl", "p0-0.png,collie,carl", "duplicate-row", 5),
        ("p0-1.png,collie,carl", "./p0-0.png,collie,carl", "duplicate-row", 5),
        ("train/cat/p0-1.png", "../../etc/passwd", "path-outside", 3),
        ("train/cat/p0-1.png", "/etc/passwd", "path-outside", 3),
        ("train/cat/p0-1.png", "..\\secret.png", "path-outside", 3),
        ("train/cat/p0-1.png", "C:/secret.png", "path-outside", 3),
        ("train/cat/p0-1.png,", ",", "missing-image", 3),
        ("train/cat/p0-1.png", ".", "missing-image", 3),
        ("train/cat/p0-1.png", "./.", "missing-image", 3),
        ("p0-1.png,tabby", "p0-1.png,", "label-out-of-range", 3),
        ("anna,train\ntrain/dog", ",train\ntrain/dog", "missing-patient", 3),
        ("carl,test", "carl,tset", "unknown-split", 5),
        ("collie,carl", "poodle,carl", "class-not-in-train", 5),
        ("patient,split", "patinet,split", "unknown-column", 1),
        ("path,label", "path,path", "unreadable-manifest", 1),
        ("ben,train", "ben", "unreadable-manifest", 4),
        ("ben,train", '"ben,train', "unreadable-manifest", 5),
        ("tabby,anna,train\ntrain/dog", "tabby\0,anna,train\ntrain/dog", "unreadable-manifest", 3),
    ],
)
def test_a_bad_line_is_named(folder, old, new, code, line):
    load_data(folder)  # the control
    assert old in GOOD
    (folder / "manifest.csv").write_text(GOOD.replace(old, new, 1))
    with pytest.raises(DataError) as caught:
        load_data(folder)
    assert caught.value.code == code, caught.value
    assert f"line {line}" in caught.value.what


def test_a_file_that_is_not_utf8_empty_or_lists_a_missing_image_is_refused(folder):
    for content, code in (
        (GOOD.encode().replace(b"anna", b"\xff\xfe"), "unreadable-manifest"),
        (b"", "unreadable-manifest"),
        (b"path,label\n", "unreadable-manifest"),
        (GOOD.encode().replace(b"p0-1", b"p0-7", 1), "missing-image"),
    ):
        (folder / "manifest.csv").write_bytes(content)
        with pytest.raises(DataError) as caught:
            load_data(folder)
        assert caught.value.code == code


def test_one_person_in_several_spellings_is_one_unit_in_training_and_in_the_ledger(folder):
    accents = ("Jos\u00e9", "jose\u0301", " JOS\u00c9 ", "Jose")  # the last is somebody else
    paths = ("train/cat/p0-0.png", "train/cat/p0-1.png", "train/dog/p0-0.png", "train/dog/p0-1.png")
    for names, people in ((accents, 2), (("P01", "p01", "P02", "p03"), 3), (("a", "b", "c", "d"), 4)):
        rows = [f"{path},{path[6:9]},{name}" for path, name in zip(paths, names, strict=True)]
        (folder / "manifest.csv").write_text("\n".join(["path,label,patient", *rows]))
        data = load_data(folder)
        assert data.train.num_units("patient") == people
        assert len(links_of(None, names, key=b"k" * 32).patient_tags) == people
        assert len(links_of(None, data.names_of(data.train), key=b"k" * 32).patient_tags) == people


def test_the_spelling_of_a_spelling_is_itself():
    for code in range(0x110000):
        once = one_spelling(f"a{chr(code)}b")
        assert one_spelling(once) == once


def test_numbers_of_ones_own_may_not_split_a_person(folder):
    train = load_data(folder).train
    DataSplits(train, patient_names=("anna", "ben", "carl"))  # the control
    for names in (("anna", "Anna", "carl"), ("anna", "anna", "carl")):
        with pytest.raises(DataError, match="patient-named-twice"):
            DataSplits(train, patient_names=names)


def test_a_manifest_given_as_the_data_is_told_to_give_its_folder(tmp_path):
    (tmp_path / "labels.csv").write_text("path,label\n")
    with pytest.raises(DataError, match="the folder that it is in"):
        load_data(tmp_path / "labels.csv")
