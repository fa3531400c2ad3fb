"""Scores of an audit on disk: one line for each stack of models, never rewritten."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
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

    @classmethod
    def open(cls, folder: Path, header: Header) -> Store:
        """The folder for this audit, new or continued; an audit of other settings is refused."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "audit.json"
        if not file.exists():
            write_json(file, header)
        elif (found := dict(read_json(file, Header))) != dict(header):
            changed = ", ".join(key for key in header if found.get(key) != header[key])
            raise RunError(
                "other-audit",
                f"{folder} holds an audit with another {changed}.",
                why="Scores of different trainings cannot be put together.",
                fix="Give the same settings, or another --out.",
            )
        return cls(folder)

    def add(self, group: str, first: int, losses: np.ndarray) -> None:
        """Append the losses of (models, canaries), durably."""
        line = json.dumps({"group": group, "first": first, "losses": losses.tolist()}, allow_nan=False)
        with open(self._file, "ab+") as file:
            if file.tell() and _last_byte(file) != b"\n":
                file.write(b"\n")  # after a line that was cut off
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def losses(self, group: str) -> np.ndarray:
        """(models, canaries) of a group, by their numbers; what follows a gap is not counted yet."""
        lines = sorted((line for line in self._lines() if line["group"] == group), key=lambda each: each["first"])
        rows: list[list[float]] = []
        for line in lines:
            if line["first"] == len(rows):
                rows += line["losses"]
        return np.array(rows, dtype=np.float64)

    @property
    def _file(self) -> Path:
        return self.folder / "scores.jsonl"

    def _lines(self) -> list[Line]:
        if not self._file.exists():
            return []
        found = []
        for text in self._file.read_bytes().splitlines():
            try:
                found.append(parse_json(text, Line))
            except ValueError:  # cut off
                continue
        return found


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)
