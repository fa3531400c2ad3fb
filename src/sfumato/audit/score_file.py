"""Scores of an audit on disk: JSON lines, appended durably, so that an audit can go on later."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from sfumato.errors import RunError
from sfumato.files import write_text

Line = TypeVar("Line", bound=msgspec.Struct)


@dataclass
class ScoreFile(Generic[Line]):
    """First what is audited and by which code, then one line for what was trained together."""

    path: Path | None  # None: kept in memory only
    line: type[Line]

    def open(self, identity: Mapping[str, object]) -> list[Line]:
        """The lines of the same audit that are there already; refuses those of another.

        ``identity`` is what scores must have in common, ``scoring`` among it: the number of the way in which
        they are computed. Another version of the package is another implementation, and another audit.
        """
        if self.path is None:
            return []
        wanted = {**identity, "sfumato": version("sfumato")}
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(wanted, sort_keys=True, allow_nan=False) + "\n")
            return []
        first, *lines = self.path.read_bytes().split(b"\n")
        self._check(first, wanted)
        # what an interruption cut off has no end of line; the next line must not be joined to it
        os.truncate(self.path, self.path.stat().st_size - len(lines[-1]) if lines else 0)
        return [self._parsed(line) for line in lines[:-1]]

    def append(self, line: Line) -> None:
        """Durably, before the next one begins."""
        if self.path is None:
            return
        with open(self.path, "ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _check(self, first: bytes, wanted: Mapping[str, object]) -> None:
        try:
            found = msgspec.json.decode(first, type=dict[str, object])
        except msgspec.DecodeError:
            found = {}
        # as JSON has it: a list and a tuple are the same there
        written = json.loads(json.dumps(wanted, allow_nan=False))
        keys = found.keys() | written.keys()
        changed = sorted(key for key in keys if found.get(key, ...) != written.get(key, ...))
        if changed:
            raise RunError(
                "changed-audit",
                f"{self.path} holds the scores of another audit, with another {', '.join(changed)}.",
                why="Scores of different settings, or of different code, cannot be put together.",
                fix="Repeat the settings of its first line, or choose another --out.",
            )

    def _parsed(self, line: bytes) -> Line:
        try:
            return msgspec.json.decode(line, type=self.line)
        except msgspec.DecodeError as error:
            raise RunError(
                "damaged-log",
                f"{self.path} has a line that cannot be read: {error}",
                fix="Choose another --out.",
            ) from error
