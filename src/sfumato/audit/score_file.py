"""Scores of an audit on disk: whole batches of repetitions, appended, so that an audit can go on later."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sfumato.errors import RunError
from sfumato.files import write_text


class Batch(msgspec.Struct, kw_only=True):
    """Some trainings of one kind, in the order in which they were made."""

    probe: bool  # one canary and few steps, for the scale and the others
    present: list[list[bool]]  # which canaries of each training were there
    likelihood: list[list[float]]  # of each canary of each training
    scale: list[float]
    others: list[float]  # of probes with full batches
    fingerprints: list[int]  # of the first step's noise, one for each training
    repeated: int  # steps with noise that another step of the same training had

    @property
    def size(self) -> int:
        return len(self.present)


@dataclass
class ScoreFile:
    """JSON lines: first what is audited, then one line for each batch."""

    path: Path | None  # None: kept in memory only

    def open(self, identity: Mapping[str, object]) -> list[Batch]:
        """The batches of the same audit that are there already; refuses those of another."""
        if self.path is None:
            return []
        first = json.dumps(identity, sort_keys=True, allow_nan=False)
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, first + "\n")
            return []
        kept, *lines = self.path.read_text(encoding="utf-8").split("\n")
        if kept != first:
            raise RunError(
                "changed-audit",
                f"{self.path} holds the scores of another audit.",
                why="Scores of different settings cannot be put together.",
                fix="Repeat the settings of its first line, or choose another --out.",
            )
        # what an interruption cut off has no end of line
        return [_parsed(line, self.path) for line in lines[:-1]]

    def append(self, batch: Batch) -> None:
        """Durably, before the next one begins."""
        if self.path is None:
            return
        line = msgspec.json.encode(batch) + b"\n"
        with open(self.path, "r+b") as file:
            whole = file.read().rfind(b"\n") + 1
            file.seek(whole)
            file.write(line)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())


def _parsed(line: str, path: Path) -> Batch:
    try:
        return msgspec.json.decode(line, type=Batch)
    except msgspec.DecodeError as error:
        raise RunError(
            "damaged-log", f"{path} has a line that cannot be read: {error}", fix="Choose another --out."
        ) from error
