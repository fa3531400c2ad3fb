"""Scores of an audit on disk: one line for each stack of models, never rewritten."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypedDict

import numpy as np

from sfumato.errors import RunError
from sfumato.files import parse_json, read_json, write_json


class Line(TypedDict):
    """The losses of models that were trained together."""

    group: str
    first: int  # the number of the first of them in its group
    losses: list[list[float]]  # (models, canaries)


class Header(TypedDict):
    """What must not change between two parts of one audit."""

    num_examples: int
    views: int
    seed: int | None
    init_seed: int


@dataclass(frozen=True)
class Store:
    """The folder of an audit. A line that a kill cut off is left out, and its models are trained again."""

    folder: Path
    groups: dict[str, dict[int, list[list[float]]]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, header: Header) -> Store:
        """The folder for this audit, new or continued; an audit of other settings is refused."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "audit.json"
        if not file.exists():
            write_json(file, header)
        elif (found := dict(read_json(file, Header))) != dict(header):
            changed = ", ".join(key for key, value in header.items() if found[key] != value)
            raise RunError(
                "other-audit",
                f"{folder} holds an audit with another {changed}.",
                why="Scores of different trainings cannot be put together.",
                fix="Give the same settings, or another --out.",
            )
        store = cls(folder)
        for line in store._lines():
            store.groups.setdefault(line["group"], {})[line["first"]] = line["losses"]
        return store

    def add(self, group: str, first: int, losses: np.ndarray) -> None:
        """Append the losses of (models, canaries), durably."""
        line = Line(group=group, first=first, losses=losses.tolist())
        with open(self._file, "ab+") as file:
            if file.seek(0, os.SEEK_END) and _last_byte(file) != b"\n":
                file.write(b"\n")  # after a line that was cut off
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.groups.setdefault(group, {})[first] = line["losses"]

    def losses(self, group: str) -> np.ndarray:
        """(models, canaries) of a group, by their numbers; what follows a gap is not counted yet."""
        rows: list[list[float]] = []
        for first, losses in sorted(self.groups.get(group, {}).items()):
            if first == len(rows):
                rows += losses
        return np.array(rows, dtype=np.float64)

    @property
    def _file(self) -> Path:
        return self.folder / "scores.jsonl"

    def _lines(self) -> Iterator[Line]:
        for text in self._file.read_bytes().splitlines() if self._file.exists() else ():
            with suppress(ValueError):  # cut off
                yield parse_json(text, Line)


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)
