"""Readers for the official binary files of MNIST, CIFAR-10 and CIFAR-100, and the embedded digits."""

from __future__ import annotations

import gzip
import struct
import zlib
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfumato.data.images import DataSplits, ImageSet
from sfumato.data.known import CIFAR10_CLASSES, CIFAR100_CLASSES
from sfumato.errors import DataError
from sfumato.files import check_plain

DIGIT_CLASSES = tuple("0123456789")


def load_digits() -> DataSplits:
    """The UCI handwritten digits that ship inside the package, 0..16 stretched to 0..255."""
    with (files("sfumato.data") / "embedded" / "digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        parts = {key: arrays[key] for key in arrays.files}

    def part(split: str) -> ImageSet:
        grey = np.rint(parts[f"{split}_images"].astype(np.float64) * (255 / 16)).astype(np.uint8)
        return _image_set(grey[:, None], parts[f"{split}_labels"], DIGIT_CLASSES, "digits")

    return DataSplits(train=part("train"), test=part("test"))


def load_mnist(folder: Path) -> DataSplits:
    """The four idx files of MNIST, gzipped or not."""

    def part(prefix: str) -> ImageSet:
        images = read_idx(_one_of(folder, f"{prefix}-images-idx3-ubyte"))
        labels = read_idx(_one_of(folder, f"{prefix}-labels-idx1-ubyte"))
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise _damaged(folder, f"{prefix}: {images.shape} images, {labels.shape} labels")
        return _image_set(images[:, None], labels, DIGIT_CLASSES, "mnist")

    return DataSplits(train=part("train"), test=part("t10k"))


def load_cifar10(folder: Path) -> DataSplits:
    """The binary release of CIFAR-10: one label byte, then 3 x 32 x 32 pixels."""
    batches = [folder / f"data_batch_{number}.bin" for number in range(1, 6)]
    return DataSplits(
        train=_read_cifar(batches, 1, CIFAR10_CLASSES, "cifar10"),
        test=_read_cifar([folder / "test_batch.bin"], 1, CIFAR10_CLASSES, "cifar10"),
    )


def load_cifar100(folder: Path) -> DataSplits:
    """The binary release of CIFAR-100: coarse and fine label byte, then the pixels. Fine labels are used."""
    return DataSplits(
        train=_read_cifar([folder / "train.bin"], 2, CIFAR100_CLASSES, "cifar100"),
        test=_read_cifar([folder / "test.bin"], 2, CIFAR100_CLASSES, "cifar100"),
    )


def read_idx(path: Path) -> np.ndarray:
    """A uint8 array out of an idx file."""
    try:
        check_plain(path)
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise _damaged(path, str(error)) from error
    if len(data) < 4 or data[:3] != b"\x00\x00\x08" or len(data) < 4 + 4 * data[3]:
        raise _damaged(path, "it is not an idx file of bytes")
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    body = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * data[3])
    if body.size != int(np.prod(shape, dtype=np.int64)):
        raise _damaged(path, f"it should hold {shape} bytes and holds {body.size}")
    return body.reshape(shape)


def _read_cifar(paths: list[Path], label_bytes: int, classes: tuple[str, ...], name: str) -> ImageSet:
    parts = [_read_records(path, label_bytes, len(classes), name) for path in paths]
    labels = np.concatenate([part[:, label_bytes - 1] for part in parts])
    images = np.empty((len(labels), 3072), dtype=np.uint8)
    np.concatenate([part[:, label_bytes:] for part in parts], out=images)  # one copy, into its place
    return _image_set(images.reshape(-1, 3, 32, 32), labels, classes, name)


def _read_records(path: Path, label_bytes: int, num_classes: int, name: str) -> np.ndarray:
    """The file's records as rows; the last of the label bytes is the one that is used."""
    record = label_bytes + 3072
    try:
        check_plain(path)
        data = np.fromfile(path, dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if data.size == 0 or data.size % record:
        raise _damaged(path, f"{data.size} bytes are not whole records of {record}")
    rows = data.reshape(-1, record)
    wrong = np.flatnonzero(rows[:, label_bytes - 1] >= num_classes)
    if len(wrong):
        raise DataError(
            "label-out-of-range",
            f"{path}: record {wrong[0]} has a label above {num_classes - 1}.",
            why="The file is damaged or not what its name says.",
            fix=f"Remove it and run: sfumato data get {name}",
        )
    return rows


def _image_set(images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], name: str) -> ImageSet:
    writable = images if images.flags.writeable else images.copy()  # a tensor cannot be read-only
    return ImageSet(torch.from_numpy(writable), _int64(labels), classes, name=name)


def _int64(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))


def _one_of(folder: Path, stem: str) -> Path:
    for path in (folder / f"{stem}.gz", folder / stem):
        if path.is_file():
            return path
    raise _damaged(folder, f"{stem}.gz is missing")


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(
        "damaged-file",
        f"{path}: {reason}.",
        why="The file is missing, cut short, or not what its name says.",
        fix="Remove the folder and get the data again: sfumato data get NAME",
    )
