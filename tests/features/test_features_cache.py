"""The features' cache: right, private, whole or absent, and never taken for another's."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import nn

from sfumato.errors import DataError
from sfumato.features import cache
from sfumato.features.cache import checksum, compute_features, features_of


class Counting(nn.Module):
    """Mean pixel times a weight, and how often it was asked."""

    def __init__(self, weight: float = 2.0, size: int = 32) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor(weight))
        self.described = {"size": size}
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        return images.mean((2, 3)) * self.weight


@pytest.fixture
def images():
    return torch.randint(256, (600, 3, 5, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_features_come_in_the_order_of_the_images_with_progress(images, tmp_path):
    seen = []
    rows = features_of(
        Counting(), images, folder=tmp_path, on_progress=lambda done, total: seen.append((done, total))
    ).numpy()
    assert np.array_equal(rows, compute_features(Counting(), images))
    assert np.allclose(rows, images.float().mean((2, 3)).numpy() / 255 * 2, atol=1e-5)
    assert not np.allclose(rows, rows[::-1])
    assert seen[-1] == (600, 600)
    assert torch.get_num_threads() >= 1


def test_the_second_time_nothing_is_computed(images, tmp_path):
    module = Counting()
    first = features_of(module, images, folder=tmp_path)
    calls = module.calls
    second = features_of(module, images, folder=tmp_path)
    assert torch.equal(first, second)
    assert module.calls == calls > 0
    features_of(Counting(3.0), images, folder=tmp_path)
    assert len(list(tmp_path.glob("*.npy"))) == 2


def test_any_change_of_weights_images_order_or_preprocessing_is_another_entry(images):
    key = checksum(Counting(), images)
    assert key == checksum(Counting(), images.clone())
    changed = images.clone()
    changed[5, 1, 2, 3] += 1
    others = [
        checksum(Counting(2.0000002), images),
        checksum(Counting(), changed),
        checksum(Counting(), images.flip(0)),
        checksum(Counting(size=33), images),
    ]
    assert len({key, *others}) == 5


def test_a_failure_in_the_middle_leaves_no_entry(images, tmp_path):
    class Failing(Counting):
        def forward(self, rows):
            if self.calls == 1:
                raise MemoryError
            return super().forward(rows)

    with pytest.raises(MemoryError):
        features_of(Failing(), images, folder=tmp_path)
    assert list(tmp_path.glob("*.npy")) == []
    features_of(Counting(), images, folder=tmp_path)
    assert len(list(tmp_path.glob("*.npy"))) == 1


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(cache, "_ROWS_AT_ONCE", 30)
    monkeypatch.setattr(cache, "_ROWS_PER_PART", 60)


def _interrupt_at(limit):
    def interrupt(done, total):
        if done > limit:
            raise KeyboardInterrupt

    return interrupt


@pytest.mark.usefixtures("small_parts")
def test_after_an_interruption_only_missing_parts_are_computed(images, tmp_path):
    images = images[:570]  # the last part is half as long as the others
    whole = compute_features(Counting(), images)

    with pytest.raises(KeyboardInterrupt):
        features_of(Counting(), images, folder=tmp_path, on_progress=_interrupt_at(400))
    parts = sorted(tmp_path.glob("*.part"))
    assert len(parts) == 6
    assert all(part.stat().st_mode & 0o077 == 0 for part in parts)
    parts[2].write_bytes(parts[2].read_bytes()[:-4])

    module, seen = Counting(), []
    rows = features_of(module, images, folder=tmp_path, on_progress=lambda done, total: seen.append(done))
    assert np.array_equal(rows.numpy(), whole)
    assert module.calls == 9  # 270 of 570 rows, 30 at once
    assert seen[0] == 330
    assert seen[-1] == 570
    assert [file.suffix for file in tmp_path.iterdir()] == [".npy"]


@pytest.mark.usefixtures("small_parts")
def test_parts_that_an_interruption_left_beside_a_whole_entry_are_removed(images, tmp_path):
    features_of(Counting(), images, folder=tmp_path)
    (entry,) = tmp_path.iterdir()
    (tmp_path / f"{entry.stem}-60.part").write_bytes(b"left over")
    (tmp_path / "another-60.part").write_bytes(b"of another entry")
    features_of(Counting(), images, folder=tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([entry.name, "another-60.part"])


@pytest.mark.usefixtures("small_parts")
def test_a_part_that_is_not_ours_is_refused_and_not_found_again(images, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        features_of(Counting(), images, folder=tmp_path, on_progress=_interrupt_at(100))
    (part,) = tmp_path.glob("*.part")
    with part.open("wb") as file:
        np.save(file, np.zeros((60, 7), dtype=np.float32))
    with pytest.raises(DataError, match="cache-not-writable"):
        features_of(Counting(), images, folder=tmp_path)
    rows = features_of(Counting(), images, folder=tmp_path)
    assert np.array_equal(rows.numpy(), compute_features(Counting(), images))


@pytest.mark.usefixtures("small_parts")
def test_workers_stop_when_a_part_cannot_be_kept(images, tmp_path, monkeypatch):
    class Slow(Counting):
        def forward(self, rows):
            time.sleep(0.02)
            return super().forward(rows)

    def full(*_):
        raise DataError("cache-not-writable", "the disk is full.")

    monkeypatch.setattr(cache, "_write", full)
    module = Slow()
    with pytest.raises(DataError):
        features_of(module, images, folder=tmp_path)
    calls = module.calls
    time.sleep(0.1)
    assert module.calls == calls < 20


@pytest.mark.usefixtures("small_parts")
def test_two_processes_that_compute_the_same_do_not_disturb_each_other(images, tmp_path):
    def meanwhile(done, total):
        if done == 300:
            features_of(Counting(), images, folder=tmp_path)

    rows = features_of(Counting(), images, folder=tmp_path, on_progress=meanwhile)
    assert np.array_equal(rows.numpy(), compute_features(Counting(), images))
    assert [file.suffix for file in tmp_path.iterdir()] == [".npy"]


def test_entries_are_readable_by_their_owner_only_and_cannot_be_changed_through_the_tensor(images, tmp_path):
    rows = features_of(Counting(), images, folder=tmp_path)
    entry = next(tmp_path.glob("*.npy"))
    assert entry.stat().st_mode & 0o077 == 0
    before = entry.read_bytes()
    rows += 1
    assert entry.read_bytes() == before


def test_a_place_that_cannot_be_written_is_named(images, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(DataError, match="cache-not-writable"):
        features_of(Counting(), images, folder=blocked)


@pytest.mark.parametrize(
    "damage", ["cut off", "emptied", "other rows", "not an array", "several arrays", "header"]
)
def test_a_damaged_entry_is_computed_again(images, tmp_path, damage):
    module = Counting()
    first = features_of(module, images, folder=tmp_path).clone()
    (entry,) = tmp_path.glob("*.npy")
    content = entry.read_bytes()
    if damage == "other rows":
        np.save(entry, np.zeros((5, 3), dtype=np.float32), allow_pickle=False)
    elif damage == "several arrays":
        with entry.open("wb") as file:
            np.savez(file, content=np.zeros(3))
    else:
        changed = {"cut off": content[:-100], "emptied": b"", "not an array": b"hello"}
        entry.write_bytes((changed | {"header": content.replace(b")", b" ", 1)})[damage])
    calls = module.calls
    assert torch.equal(features_of(module, images, folder=tmp_path), first)
    assert module.calls > calls
    assert entry.read_bytes() == content
