import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from sfumato.cli import cli
from sfumato.data import KNOWN_SETS, duplicate_images, load_data, shared_images, shared_patients
from sfumato.data.acquisition.sources import SOURCES
from sfumato.data.readers.binary import read_idx
from sfumato.errors import ConfigError, DataError

CHEST_PATIENT = r"(person\d+_(?:bacteria|virus)|(?:NORMAL2-)?IM-\d+)"


def test_the_embedded_digits_are_the_whole_uci_set():
    data = load_data("digits")
    assert data.train.images.shape == (3823, 1, 8, 8)
    assert data.test.images.shape == (1797, 1, 8, 8)
    # class counts as the data set's own documentation states them
    assert torch.bincount(data.train.labels).tolist() == [376, 389, 380, 389, 387, 376, 377, 387, 380, 382]
    assert torch.bincount(data.test.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (int(data.train.images.min()), int(data.train.images.max())) == (0, 255)
    assert len(data.train.images.unique()) == 17
    assert len(duplicate_images(data.train)) == 0
    assert len(shared_images(data.train, data.test)) == 0


def test_the_nearest_neighbour_reads_the_digits_which_shuffled_labels_do_not_allow():
    data = load_data("digits")
    train, test = data.train.images.flatten(1).float(), data.test.images.flatten(1).float()
    nearest = torch.cdist(test, train).argmin(1)
    assert (data.train.labels[nearest] == data.test.labels).float().mean() > 0.97
    shuffled = data.train.labels[torch.randperm(3823, generator=torch.Generator().manual_seed(0))]
    assert (shuffled[nearest] == data.test.labels).float().mean() < 0.15


def test_known_sets_can_be_resized_and_recoloured_without_changing_their_identity():
    original = load_data("digits")
    data = load_data("digits", image_size=16, channels=3)
    assert data.train.images.shape == (3823, 3, 16, 16)
    assert data.train.fingerprint == original.train.fingerprint
    assert torch.equal(data.train.images[:, 0], data.train.images[:, 2])
    with pytest.raises(ConfigError, match="no-file-names"):
        load_data("digits", patient_from="x")


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
def test_official_files_load_and_check(real_data, name):
    known, data = KNOWN_SETS[name], load_data(name)
    assert (len(data.train), len(data.test)) == (known.num_train, known.num_test)
    assert data.train.images.shape[1:] == (known.channels, known.image_size, known.image_size)
    assert len(data.train.classes) == known.num_classes
    if name != "mnist":
        assert torch.bincount(data.train.labels).unique().tolist() == [known.num_train // known.num_classes]
    SOURCES[name].verify(known.require())


def test_grey_is_the_grey_that_pillow_makes(tmp_path):
    random = np.random.default_rng(3)
    for name in SOURCES["cifar10"].checksums:
        (tmp_path / name).write_bytes(b"".join(bytes([7]) + random.bytes(3072) for _ in range(10)))
    colour, grey = load_data(tmp_path).test.images, load_data(tmp_path, channels=1).test.images
    for image, expected in zip(colour, grey, strict=True):
        picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).convert("L")
        assert np.array_equal(np.asarray(picture), expected[0].numpy())


def test_chest_x_rays_have_patients_who_keep_to_one_split(real_data):
    if not (real_data / "chest-xray").is_dir():
        pytest.skip("no chest X-rays here")
    data = load_data(real_data / "chest-xray", patient_from=CHEST_PATIENT)
    assert [len(part) for part in (data.train, data.val, data.test)] == [5216, 16, 624]
    assert data.train.classes == ("NORMAL", "PNEUMONIA")
    assert data.train.num_units("patient") == 3654
    assert shared_patients(data) == []
    assert len(duplicate_images(data.train)) == 26
    # bacteria and virus count their persons separately; taken for one numbering, "person1" is in both splits
    careless = load_data(real_data / "chest-xray", patient_from=r"person\d+|IM-\d+")
    assert len(shared_patients(careless)) > 100


def test_tiny_imagenets_sample_loads(real_data):
    if not (real_data / "tiny-imagenet-sample").is_dir():
        pytest.skip("no Tiny ImageNet here")
    data = load_data(real_data / "tiny-imagenet-sample")
    assert (len(data.train), len(data.test)) == (1000, 200)
    assert data.train.images.shape[1:] == (3, 64, 64)


def cifar_record(label):
    return bytes([label]) + bytes(3072)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (cifar_record(10), "label-out-of-range"),
        (cifar_record(3)[:-1], "damaged-file"),
        (b"", "damaged-file"),
    ],
)
def test_a_damaged_batch_is_named(tmp_path, content, code):
    for name in SOURCES["cifar10"].checksums:
        (tmp_path / name).write_bytes(cifar_record(9))
    assert len(load_data(tmp_path).train) == 5
    (tmp_path / "data_batch_4.bin").write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_data(tmp_path)
    assert caught.value.code == code
    assert "data_batch_4.bin" in caught.value.what


@pytest.mark.parametrize(
    "data", [b"", b"\0\0\x08\x03", b"\0\0\x08\x01\0\0\0\x05abcd", b"\0\0\x0d\x01\0\0\0\0"]
)
def test_a_damaged_idx_file_is_refused(tmp_path, data):
    path = tmp_path / "labels"
    path.write_bytes(b"\0\0\x08\x01\0\0\0\x04abcd")
    assert read_idx(path).tolist() == [97, 98, 99, 100]
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged-file"):
        read_idx(path)


def run(*arguments):
    result = CliRunner().invoke(cli, ["data", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_command_lists_sets_and_says_how_to_get_those_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))
    assert "sfumato data get cifar10" in run("list")
    rows = {row["name"]: row for row in json.loads(run("list", "--json"))["data_sets"]}
    assert set(rows) == {"digits", "generated", "mnist", "cifar10", "cifar100", "imagenette", "tiny-imagenet"}
    assert rows["digits"]["available"]
    assert not rows["cifar10"]["available"]
    (tmp_path / "cifar-10-batches-bin").mkdir()
    assert str(tmp_path / "cifar-10-batches-bin") in run("list")


def test_the_command_imports_an_archive(image_folder, tmp_path):
    from test_archives import files_in, tar_of

    archive = tar_of(tmp_path / "scans.tgz", list(files_in(image_folder(train=2)).items()))
    printed = json.loads(run("import", str(archive), "--to", str(tmp_path / "scans"), "--json"))
    assert printed["num_images"] == 4
    assert printed["known_name"] is None
    assert "sfumato train" in run("import", str(archive), "--to", str(tmp_path / "again"))


def test_the_command_generates_images_that_repeat_with_the_seed(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run("generate", str(tmp_path / name), "--num-images", "3", "--image-size", "16", "--seed", str(seed))
    first, again, other = ([p.read_bytes() for p in sorted((tmp_path / n).iterdir())] for n in "abc")
    assert len(first) == 3
    assert first == again
    assert first != other
    with pytest.raises(DataError, match="folder-exists"):
        run("generate", str(tmp_path / "a"))


def test_listing_the_sets_does_not_wait_for_torch():
    code = (
        "import sys; from sfumato.cli import cli; cli(['data', 'list'], standalone_mode=False); "
        "print([name for name in ('torch', 'numpy', 'PIL') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
