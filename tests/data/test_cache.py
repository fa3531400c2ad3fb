import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from sfumato.data import decoding, load_data, pixels
from sfumato.data.readers import decode
from sfumato.errors import DataError
from sfumato.files import hold


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def all_large(monkeypatch):
    monkeypatch.setattr(pixels, "MEMORY_LIMIT_BYTES", 0)


def test_a_memory_mapped_set_equals_the_one_in_memory(image_folder, home, monkeypatch):
    folder = image_folder(train=5, test=3)
    small = load_data(folder)
    assert not home.exists()  # small sets leave no copy behind
    monkeypatch.setattr(pixels, "MEMORY_LIMIT_BYTES", 0)
    for _ in range(2):
        large = load_data(folder)
        assert torch.equal(small.train.images, large.train.images)
        assert torch.equal(small.test.images, large.test.images)
        assert small.train.fingerprint == large.train.fingerprint
    assert len(list(home.iterdir())) == 1


def test_only_the_owner_can_read_the_copies(image_folder, home, all_large):
    load_data(image_folder(train=2))
    for folder in (home, next(home.iterdir())):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_writing_into_the_tensor_does_not_reach_the_cache(image_folder, home, all_large):
    folder = image_folder(train=2)
    first = load_data(folder).train
    original = first.images.clone()
    first.images.zero_()
    assert torch.equal(load_data(folder).train.images, original)


def test_any_change_of_content_or_of_decoding_is_a_new_entry(image_folder, home, all_large):
    folder = image_folder(train=2)
    load_data(folder)
    load_data(folder, image_size=16)
    load_data(folder, channels=1)
    load_data(folder, fit="pad")
    assert len(list(home.iterdir())) == 4
    before = load_data(folder).train
    one, other = folder / "train/cat/p0-0.png", folder / "train/cat/p0-1.png"
    times = os.stat(one)
    one.write_bytes(other.read_bytes())
    os.utime(one, ns=(times.st_atime_ns, times.st_mtime_ns))  # same name, same time: a clock would not notice
    assert load_data(folder).train.fingerprint != before.fingerprint
    assert len(list(home.iterdir())) == 5


SLOW_WRITER = """
import sys, time
from pathlib import Path
from sfumato.data import cache, decoding, pixels
from sfumato.data.readers import decode
decode._CHUNK_BYTES = decoding._SYNC_BYTES = pixels.MEMORY_LIMIT_BYTES = 0  # one file, one sync
slow_after = int(sys.argv[2])
def slow(*arguments, **options):
    for number, chunk in enumerate(decode.decode_files(*arguments, **options)):
        if number == slow_after:
            print("writing", flush=True)
            time.sleep(60)
        yield chunk
cache.decode_files = slow
paths = sorted(Path(sys.argv[1]).rglob("*.png"))
cache.decode_all(paths, image_size=12, channels=3, fit="crop")
"""


@pytest.fixture
def killed_after(home):
    """Decodes a folder's files and is killed, without warning, when so many of them are written."""

    def kill(folder, count):
        command = [sys.executable, "-c", SLOW_WRITER, str(folder), str(count)]
        writer = subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, text=True)
        assert writer.stdout.readline() == "writing\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()

    return kill


@pytest.fixture
def decoded(monkeypatch):
    """The files that were decoded since."""
    paths, decode_one = [], decode._decode
    monkeypatch.setattr(
        decode, "_decode", lambda path, *given: (paths.append(path), decode_one(path, *given))[1]
    )
    return paths


def load_12(folder):
    return load_data(folder, image_size=12).train


def test_what_a_killed_decoder_has_written_is_not_decoded_again(
    image_folder, killed_after, decoded, home, all_large, monkeypatch
):
    folder = image_folder(train=6)
    files = sorted(folder.rglob("*.png"))
    killed_after(folder, 4)
    assert not [entry for entry in home.iterdir() if entry.name[0] != "."]  # nothing that looks whole
    resumed = load_12(folder)
    assert sorted(decoded) == files[4:]
    assert [entry.name[0] for entry in home.iterdir()] != ["."]  # one entry, and nothing left beside it
    monkeypatch.setenv("SFUMATO_CACHE", str(home) + "-2")
    whole = load_12(folder)
    assert torch.equal(resumed.images, whole.images)
    assert torch.equal(resumed.content_ids, whole.content_ids)


def test_of_changed_files_only_what_lies_before_the_change_is_kept(
    image_folder, killed_after, decoded, home, all_large
):
    folder = image_folder(train=6)
    files = sorted(folder.rglob("*.png"))
    killed_after(folder, 4)
    files[2].unlink()  # as a broken image is
    resumed = load_12(folder)
    assert sorted(decoded) == files[3:]
    expected = [decode.decode_image(path, image_size=12, channels=3) for path in files[:2] + files[3:]]
    assert torch.equal(resumed.images, torch.from_numpy(np.stack(expected)))
    assert len(list(home.iterdir())) == 1


def test_rows_without_their_images_are_not_believed(image_folder, killed_after, decoded, home, all_large):
    folder = image_folder(train=6)
    killed_after(folder, 4)
    (images,) = home.glob(".*/entry/images.u8")
    os.truncate(images, 2 * 3 * 12 * 12 + 7)  # two images and a piece of the third
    load_12(folder)
    assert len(decoded) == len(list(folder.rglob("*.png"))) - 2


def test_decoders_of_the_same_files_wait_for_each_other(image_folder, home, all_large):
    folder = image_folder(train=6)
    with ThreadPoolExecutor(3) as pool:
        sets = list(pool.map(load_12, [folder] * 3))
    assert all(torch.equal(sets[0].images, other.images) for other in sets)
    assert len(list(home.iterdir())) == 1


def test_a_decoder_that_lives_is_left_alone_and_an_abandoned_one_is_removed(
    image_folder, killed_after, home, all_large
):
    folder = image_folder(train=3)
    killed_after(folder, 2)
    (unfinished,) = home.iterdir()
    long_ago = time.time() - 90 * 24 * 3600
    os.utime(unfinished / "rows", (long_ago, long_ago))
    with hold(unfinished / "lock"):
        load_data(folder, image_size=16)
        assert unfinished.exists()
    load_data(folder, image_size=20)
    assert not unfinished.exists()


def test_a_disk_without_room_is_told_before_anything_is_decoded(
    image_folder, home, all_large, decoded, monkeypatch
):
    folder = image_folder(train=3)
    usage = shutil.disk_usage(home.parent)._replace(free=64 * 2**20 + 100)
    monkeypatch.setattr(decoding.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DataError) as caught:
        load_data(folder)
    assert caught.value.code == "no-room-for-images"
    assert decoded == []
    assert list(home.iterdir()) == []
    monkeypatch.setattr(decoding.shutil, "disk_usage", lambda _: usage._replace(free=2**40))
    load_data(folder)


def test_memory_for_decoding_does_not_grow_with_the_number_of_files(tmp_path, home, all_large, monkeypatch):
    """Tasks that are decoded but not yet written are few, however fast the decoding is."""
    ahead, most = 0, 0
    handed_out = ThreadPoolExecutor.submit

    def submit(pool, work, *given):
        nonlocal ahead, most
        ahead += 1
        most = max(most, ahead)
        return handed_out(pool, work, *given)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    with ThreadPoolExecutor(2) as pool:
        for part in decode.in_order(pool, str, list(range(500)), at_once=1):
            assert len(part) == 1
            ahead -= 1
    assert most <= 3 * decode.num_threads() + 1


FULL_DISK = """
import resource, sys
from sfumato.data import load_data, pixels
from sfumato.errors import DataError
pixels.MEMORY_LIMIT_BYTES = 0
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    load_data(sys.argv[1], image_size=256)
except DataError as error:
    print(error.code)
"""


def test_a_disk_that_takes_no_more_is_a_coded_error_and_leaves_nothing(image_folder, home):
    folder = image_folder(train=3)
    command = [sys.executable, "-c", FULL_DISK, str(folder)]
    result = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
    assert result.stdout == "cache-not-writable\n"
    assert list(home.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_coded_error(image_folder, tmp_path, monkeypatch, all_large):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="cache-not-writable"):
        load_data(image_folder(train=2))


def test_a_corrupt_image_leaves_no_entry(image_folder, home, all_large):
    folder = image_folder(train=3)
    path = folder / "train" / "cat" / "p0-0.png"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match="corrupt-image"):
        load_data(folder)
    assert list(home.iterdir()) == []
