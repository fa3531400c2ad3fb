"""Several findings per image: declared beforehand, as ``a|b`` or as columns of 0 and 1, or refused."""

from __future__ import annotations

import pytest
import torch

from sfumato.data import ImageSet, load_data
from sfumato.doctor import examine_data
from sfumato.errors import SfumatoError
from sfumato.training.inputs import Units

FILES = ("train/cat/p0-0.png", "train/cat/p0-1.png", "train/dog/p0-0.png", "train/dog/p0-1.png")
LABELS = ("nodule|effusion,a", ",a", "effusion,b", "No Finding,c")
LISTED = "\n".join(["path,label,patient", *map(",".join, zip(FILES, LABELS, strict=True))]) + "\n"
COLUMNS = "path,{a},{b},split\n{0},1,1,train\n{1},0,0,train\n{2},1.0,0,train\n{3},0,0.0,test\n"
WANTED = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
NAMES = ("effusion", "nodule")


def columns(a="finding:effusion", b="finding:nodule"):
    return COLUMNS.format(*FILES, a=a, b=b)


@pytest.fixture
def folder(image_folder):
    return image_folder(train=2)


def test_findings_of_an_image_are_listed_in_its_label(folder):
    (folder / "manifest.csv").write_text(LISTED)
    data = load_data(folder, findings=NAMES)
    assert data.train.classes == NAMES
    assert data.train.multi_label
    assert data.train.task == "multi-label"
    assert data.train.labels.dtype == torch.float32
    assert data.train.labels.tolist() == WANTED
    assert data.train.num_units("patient") == 3
    assert data.classes_are_declared
    (folder / "findings.txt").write_text("effusion\nnodule\n")
    assert load_data(folder).train.labels.tolist() == WANTED
    assert load_data(folder).train.select(torch.tensor([2])).labels.tolist() == [[1.0, 0.0]]


def test_findings_may_be_columns_of_0_and_1_marked_or_declared(folder):
    (folder / "manifest.csv").write_text(columns())
    data = load_data(folder)
    assert data.train.classes == NAMES
    assert torch.cat([data.train.labels, data.test.labels]).tolist() == WANTED
    assert not data.classes_are_declared  # whoever made the header may have looked at the rows
    codes = [finding.code for finding in examine_data(data)]
    assert "class-of-one" in codes  # a single image has a nodule
    assert "class-of-one" not in [finding.code for finding in examine_data(load_data(folder, findings=NAMES))]
    some = load_data(folder, findings=["nodule"])  # of many findings, some
    assert some.train.labels.tolist() == [[1.0], [0.0], [0.0]]
    (folder / "manifest.csv").write_text(columns(a="effusion", b="nodule"))
    assert load_data(folder, findings=("nodule", "effusion")).train.labels.tolist() == [
        [1, 1],
        [0, 0],
        [0, 1],
    ]


def test_no_image_decides_that_there_are_several_findings_or_which(folder):
    (folder / "manifest.csv").write_text(LISTED)
    with pytest.raises(SfumatoError, match=r"undeclared-findings(.|\n)*line 2: label 'nodule\|effusion'"):
        load_data(folder)
    nobody = LISTED.replace("nodule|effusion", "effusion")
    (folder / "manifest.csv").write_text(nobody)
    assert load_data(folder, findings=NAMES).train.classes == NAMES  # whether or not somebody has a nodule
    (folder / "manifest.csv").write_text(LISTED.replace("No Finding", "mass"))
    with pytest.raises(SfumatoError, match=r"label-out-of-range(.|\n)*line 5: 'mass'"):
        load_data(folder, findings=NAMES)


def test_a_declared_class_may_have_such_a_name(folder):
    (folder / "manifest.csv").write_text("path,label\n{0},a|b\n{2},c\n".format(*FILES))
    assert load_data(folder, classes=("a|b", "c")).train.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("manifest", "findings", "code"),
    [
        (columns().replace(",1,1,", ",1,-1,"), None, "bad-finding"),  # uncertain
        (columns().replace(",1,1,", ",1,,"), None, "bad-finding"),  # not mentioned
        (columns(a="effusion", b="nodule"), None, "unknown-column"),
        (columns(b="nodule"), None, "unknown-column"),
        (columns(b="noduel"), ("effusion", "nodule"), "bad-findings"),
        (columns(b="finding:effusion"), None, "bad-findings"),
        (columns(b="effusion"), NAMES[:1], "bad-findings"),
        (columns(b="label"), None, "bad-findings"),
        (columns(b="finding:"), None, "bad-findings"),
        (LISTED, (), "bad-findings"),
        (LISTED, ("effusion", "Effusion"), "bad-findings"),
        (LISTED, ("effusion|nodule",), "bad-findings"),
        (LISTED.replace(",effusion,", ",effusion|,"), NAMES, "label-out-of-range"),
        (LISTED.replace("label", "labels"), NAMES, "bad-findings"),
        (LISTED, ("patient", "nodule"), "label-out-of-range"),  # never the column of another meaning
    ],
)
def test_what_is_not_clear_is_refused(folder, manifest, findings, code):
    (folder / "manifest.csv").write_text(manifest)
    with pytest.raises(SfumatoError, match=code):
        load_data(folder, findings=findings)


def test_classes_and_findings_exclude_each_other_and_findings_need_a_manifest(folder):
    with pytest.raises(SfumatoError, match="findings-without-manifest"):
        load_data(folder, findings=NAMES)
    with pytest.raises(SfumatoError, match="findings-without-manifest"):
        load_data("digits", findings=NAMES)
    (folder / "manifest.csv").write_text(LISTED)
    with pytest.raises(SfumatoError, match="classes-and-findings"):
        load_data(folder, findings=NAMES, classes=("cat", "dog"))
    (folder / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(SfumatoError, match="classes-and-findings"):
        load_data(folder, findings=NAMES)
    (folder / "classes.txt").unlink()
    (folder / "findings.txt").write_text("nodule\neffusion\n")
    with pytest.raises(SfumatoError, match="bad-findings"):
        load_data(folder, findings=NAMES)


def image_set(labels):
    return ImageSet(torch.arange(len(labels)).byte().view(-1, 1, 1, 1), labels, NAMES)


def test_a_set_of_findings_is_a_matrix_of_0_and_1():
    good = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert image_set(good).multi_label
    assert not image_set(torch.tensor([0, 1])).multi_label
    for wrong in (good * 0.5, -good, good * float("nan")):
        with pytest.raises(SfumatoError, match="label-out-of-range"):
            image_set(wrong)
    for shape in (good.double(), good[:, :1], good.long()):
        with pytest.raises(SfumatoError, match="bad-array"):
            image_set(shape)


def test_the_checksum_of_units_tells_findings_apart():
    labels = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    checksum = Units.images(image_set(labels)).checksum()
    assert checksum == Units.images(image_set(labels).select(torch.arange(3))).checksum()
    assert checksum != Units.images(image_set(labels.flip(1))).checksum()
