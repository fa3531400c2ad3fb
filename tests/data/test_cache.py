import os
import signal
import stat
import subprocess
import sys
import time

import pytest
import torch

from sfumato.data import cache, load_data
from sfumato.errors import DataError


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def all_large(monkeypatch):
    monkeypatch.setattr(cache, "MEMORY_LIMIT_BYTES", 0)


def test_a_memory_mapped_set_equals_the_one_in_memory(image_folder, home, monkeypatch):
    folder = image_folder(train=5, test=3)
    small = load_data(folder)
    assert not home.exists()  # small sets leave no copy behind
    monkeypatch.setattr(cache, "MEMORY_LIMIT_BYTES", 0)
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
from sfumato.data import cache
from sfumato.data.readers.decode import decode_files
def slow(*arguments, **options):
    for chunk in decode_files(*arguments, **options):
        yield chunk
        print("writing", flush=True)
        time.sleep(60)
cache.decode_files = slow
paths = sorted(Path(sys.argv[1]).rglob("*.png"))
cache.decode_all(paths, image_size=12, channels=3, fit="crop", memory_limit_bytes=0)
"""


def test_a_killed_writer_leaves_no_entry_and_the_next_one_cleans_up(image_folder, home, all_large):
    folder = image_folder(train=3)
    command = [sys.executable, "-c", SLOW_WRITER, str(folder)]
    writer = subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "writing\n"
    (unfinished,) = home.iterdir()
    old = time.time() - 3600
    os.utime(unfinished, (old, old))
    load_data(folder)
    assert unfinished.exists()  # its writer lives: it is locked and left alone
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    os.utime(unfinished, (old, old))
    load_data(folder, image_size=16)
    assert not unfinished.exists()
    assert len(list(home.iterdir())) == 2


FULL_DISK = """
import resource, sys
from sfumato.data import cache, load_data
from sfumato.errors import DataError
cache.MEMORY_LIMIT_BYTES = 0
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
