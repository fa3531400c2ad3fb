"""Sets that are too large to copy: chosen rows are read when they are asked for, a part at a time."""

from __future__ import annotations

import pytest
import torch

from sfumato.data import carve_validation, load_data, pixels
from sfumato.data.fingerprint import image_ids
from sfumato.data.images import DataSplits
from sfumato.data.pixels import ChosenRows, choose_rows, in_parts, map_bytes
from sfumato.doctor.data_checks import _statistics
from small_runs import small_set


@pytest.fixture
def all_large(monkeypatch):
    monkeypatch.setattr(pixels, "MEMORY_LIMIT_BYTES", 0)


def test_chosen_rows_are_those_of_the_tensor_however_they_are_asked_for(all_large):
    images = small_set(30, seed=0).images
    rows = torch.tensor([4, 29, 7, 7, 0])
    chosen = choose_rows(images, rows)
    assert isinstance(chosen, ChosenRows)
    assert chosen.shape == images[rows].shape
    assert chosen.dtype == torch.uint8
    for asked in (
        slice(None),
        slice(1, 4),
        torch.tensor([3, 0]),
        2,
        torch.tensor([True, False] * 2 + [True]),
    ):
        assert torch.equal(chosen[asked], images[rows][asked])
    again = choose_rows(chosen, torch.tensor([True, False, True, True, False]))
    assert isinstance(again, ChosenRows)
    assert torch.equal(again[:], images[[4, 7, 7]])


def test_few_rows_are_a_copy_and_neighbours_a_view():
    images = small_set(30, seed=0).images
    few = choose_rows(images, torch.tensor([3, 1]))
    assert isinstance(few, torch.Tensor)
    neighbours = choose_rows(images, torch.arange(5, 9))
    assert neighbours.data_ptr() == images[5:].data_ptr()


def test_a_holdout_of_a_large_set_copies_nothing_and_holds_the_same_images(monkeypatch):
    splits = DataSplits(train=small_set(60, seed=0))
    copied = carve_validation(splits, fraction=0.3)
    monkeypatch.setattr(pixels, "MEMORY_LIMIT_BYTES", 0)
    lazy = carve_validation(splits, fraction=0.3)
    for one, other in ((copied.train, lazy.train), (copied.val, lazy.val)):
        assert isinstance(other.images, ChosenRows)
        assert other.images.images is splits.train.images
        assert torch.equal(one.images[:], other.images[:])
        assert one.fingerprint == other.fingerprint


def test_a_manifest_that_mixes_its_splits_copies_nothing(image_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    folder = image_folder(train=6)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))
    rows = [
        f"{name},{name.split('/')[1]},{'test' if k % 3 == 2 else 'train'}" for k, name in enumerate(files)
    ]
    (folder / "manifest.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
    small = load_data(folder)
    monkeypatch.setattr(pixels, "MEMORY_LIMIT_BYTES", 0)
    large = load_data(folder)
    assert isinstance(large.train.images, ChosenRows)
    assert torch.equal(large.train.images[:], small.train.images[:])
    assert torch.equal(large.test.images[:], small.test.images[:])


def test_what_goes_over_all_images_holds_a_part_of_them_at_a_time(monkeypatch, all_large):
    images = small_set(50, seed=0).images
    chosen = choose_rows(images, torch.arange(49, -1, -1))
    monkeypatch.setattr(pixels, "_PART_BYTES", 7 * images[0].numel())
    parts = list(in_parts(chosen))
    assert max(map(len, parts)) == 7
    assert torch.equal(torch.cat(parts), images.flip(0))
    assert torch.equal(image_ids(chosen), image_ids(images).flip(0))
    mean, deviation = _statistics(chosen)
    values = images.double() / 255
    assert torch.allclose(mean.double(), values.mean(dim=(0, 2, 3)), atol=1e-6)
    assert torch.allclose(deviation.double(), values.std(dim=(0, 2, 3)), atol=1e-3)
    assert not torch.allclose(deviation.double(), 1.1 * values.std(dim=(0, 2, 3)), atol=1e-3)


def test_a_file_larger_than_memory_can_be_mapped_and_not_be_changed_through_it(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(b"begin")
        file.truncate(1 << 42)  # four tebibytes, all but a page of it holes
    mapped = map_bytes(path)
    assert len(mapped) == 1 << 42
    assert bytes(mapped[:5]) == b"begin"
    mapped[0] = 0
    with path.open("rb") as file:
        assert file.read(5) == b"begin"
