"""Manifests, archives, images, binary sets and caches from a stranger: read, or refused with a code."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import tarfile
import zipfile
from typing import ClassVar

import numpy as np
import pytest
import torch
from hostile import damaged, examples, only_coded_errors
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from sfumato.data import cache
from sfumato.data.acquisition.archives import unpack
from sfumato.data.loading import load_data
from sfumato.data.readers.binary import read_idx
from sfumato.data.readers.decode import decode_image
from sfumato.features.cache import features_of

MANIFEST = "path,label,patient,split\n" + "".join(
    f"{number}.png,{number % 2},p{number // 2},{'test' if number > 5 else 'train'}\n" for number in range(8)
)
CELLS = (
    "",
    "²",
    "-",
    "9" * 5000,
    "../1.png",
    "/etc/passwd",
    "x" * 300,
    "a/" * 3000,
    "\0",
    '"',
    "\x1b[2J",
    "1.0",
)
CELLS += ("C:\\x", ".", "..", "train", "\u202e", "x" * 200_000, "0.png\n0.png,1,p,train")


@st.composite
def manifests(draw) -> bytes:
    """A manifest with a cell, a line or bytes changed."""
    if draw(st.booleans()):
        return draw(damaged(MANIFEST.encode()))
    rows = [line.split(",") for line in MANIFEST.splitlines()]
    row, column = draw(st.integers(0, len(rows) - 1)), draw(st.integers(0, 3))
    rows[row][column] = draw(st.sampled_from(CELLS))
    return "\n".join(map(",".join, rows)).encode(errors="surrogatepass")


def test_manifest(tmp_path):
    for number in range(8):
        Image.fromarray(np.full((6, 6), 30 * number, np.uint8)).save(tmp_path / f"{number}.png")

    @examples(150)
    @given(manifests(), st.sampled_from((None, b"0\n1\n", b"\xff", b"1\n1\n", "²\n1\n".encode(), b"\0\n1")))
    def check(changed, classes):
        (tmp_path / "manifest.csv").write_bytes(changed)
        (tmp_path / "classes.txt").unlink(missing_ok=True)
        if classes is not None:
            (tmp_path / "classes.txt").write_bytes(classes)
        with only_coded_errors():
            load_data(tmp_path, image_size=6, channels=1)

    check()


@pytest.mark.parametrize("name", ["²", "٣", "9" * 200, "\x1b[2J", "\u202e", "a\nb", "\udcff", "-1"])
def test_a_class_folder_of_any_name(tmp_path, name):
    for folder in (tmp_path / "train" / name, tmp_path / "train" / "1"):
        folder.mkdir(parents=True)
        Image.fromarray(np.zeros((6, 6), np.uint8)).save(folder / "a.png")
    with only_coded_errors():
        load_data(tmp_path, image_size=6, channels=1)


def tar_archive(kind: str) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{kind}") as tar:
        for name in ("a.txt", "folder/b.txt", "long" * 40 + ".txt"):
            member = tarfile.TarInfo(name)
            member.size = 300
            member.pax_headers = {"comment": "é"}
            tar.addfile(member, io.BytesIO(b"x" * 300))
    return data.getvalue()


def zip_archive(method: int) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as bundle:
        for name in ("a.txt", "folder/b.txt"):
            bundle.writestr(name, b"x" * 300)
    return data.getvalue()


ARCHIVES = {
    **{f"tar {kind}": tar_archive(kind) for kind in ("", "gz", "bz2", "xz")},
    "stored": zip_archive(zipfile.ZIP_STORED),
    "deflated": zip_archive(zipfile.ZIP_DEFLATED),
    "zip lzma": zip_archive(zipfile.ZIP_LZMA),
    "zip bzip2": zip_archive(zipfile.ZIP_BZIP2),
}
# A packed archive is spoilt inside its packing too, where no checksum of the packing guards it.
PACKINGS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("name", list(ARCHIVES))
def test_archives(tmp_path, name):
    file, target = tmp_path / "archive", tmp_path / "target"

    @examples(60)
    @given(damaged(ARCHIVES[name]))
    def check(changed):
        file.write_bytes(changed)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        with only_coded_errors():
            unpack(file, target)

    check()


@pytest.mark.parametrize("name", list(PACKINGS))
def test_what_archives_pack(tmp_path, name):
    file, target = tmp_path / "archive", tmp_path / "target"

    @examples(40)
    @given(damaged(ARCHIVES["tar "][:4096]))
    def check(changed):
        file.write_bytes(PACKINGS[name](changed))
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        with only_coded_errors():
            unpack(file, target)

    check()


def image_bytes(kind: str) -> bytes:
    pixels = np.random.default_rng(1).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, kind)
    return data.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM"])
def test_images(tmp_path, kind):
    file = tmp_path / "image.png"

    @examples(120)
    @given(damaged(image_bytes(kind)))
    def check(changed):
        file.write_bytes(changed)
        with only_coded_errors():
            decode_image(file, image_size=8, channels=3)

    check()


def test_idx_files(tmp_path):
    file = tmp_path / "images"
    whole = b"\0\0\x08\x03" + b"".join(size.to_bytes(4, "big") for size in (5, 4, 3)) + bytes(60)

    @examples(100)
    @given(damaged(whole), st.booleans())
    def check(changed, packed):
        file.write_bytes(gzip.compress(changed) if packed else changed)
        with only_coded_errors():
            read_idx(file)

    check()


@pytest.mark.parametrize("name", ["ids.npy", "images.u8"])
def test_decoded_images(tmp_path, name):
    shape = (6, 1, 4, 4)
    images, ids = np.arange(96, dtype=np.uint8).reshape(shape), np.arange(6, dtype=np.int64)
    entry = tmp_path / "entry"
    cache.write_entry(entry, iter([(images, ids)]))
    file = entry / name

    @examples(60)
    @given(damaged(file.read_bytes()))
    def check(changed):
        file.write_bytes(changed)
        with only_coded_errors():
            found, found_ids = cache.kept_images(entry, shape, lambda: iter([(images, ids)]))
            assert (found.shape, found_ids.shape) == (shape, (6,))

    check()


class Flat(nn.Module):
    """The pixels themselves."""

    described: ClassVar[dict[str, object]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)


def test_kept_features(tmp_path):
    images = torch.arange(96, dtype=torch.uint8).view(6, 1, 4, 4)
    features_of(Flat(), images, folder=tmp_path)
    file = next(tmp_path.glob("*.npy"))

    @examples(60)
    @given(damaged(file.read_bytes()))
    def check(changed):
        file.write_bytes(changed)
        with only_coded_errors():
            assert features_of(Flat(), images, folder=tmp_path).shape == (6, 16)

    check()
