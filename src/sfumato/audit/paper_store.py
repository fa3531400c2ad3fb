"""The folder of the paper's audit: the losses of every stack of models that was trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import msgspec
import numpy as np

from sfumato.audit.score_file import ScoreFile

SCORING = 1  # one more whenever models of the same settings would be trained or scored in another way


class Line(msgspec.Struct, kw_only=True):
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
    """All scores of an audit, by groups of models of one distribution."""

    file: ScoreFile[Line]
    groups: dict[str, dict[int, list[list[float]]]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, header: Header) -> Store:
        """The folder for this audit, new or continued; an audit of other settings is refused."""
        store = cls(ScoreFile(folder / "scores.jsonl", Line))
        for line in store.file.open({**header, "scoring": SCORING}):
            store._keep(line)
        return store

    def add(self, group: str, first: int, losses: np.ndarray) -> None:
        """Append the losses of (models, canaries), durably."""
        line = Line(group=group, first=first, losses=losses.tolist())
        self.file.append(line)
        self._keep(line)

    def losses(self, group: str) -> np.ndarray:
        """(models, canaries) of a group, by their numbers; what follows a gap is not counted yet."""
        rows: list[list[float]] = []
        for first, losses in sorted(self.groups.get(group, {}).items()):
            if first == len(rows):
                rows += losses
        return np.array(rows, dtype=np.float64)

    def _keep(self, line: Line) -> None:
        self.groups.setdefault(line.group, {})[line.first] = line.losses
