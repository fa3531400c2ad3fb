"""Which data sets went into a run's weights without a guarantee, by content: in ``state/``, never released.

A release names these data sets only. Folders can be renamed, and a fingerprint in a release would let anybody
who has the images confirm it; so the fingerprints stay with the run's other secrets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from sfumato.data import KNOWN_SETS
from sfumato.errors import RunError
from sfumato.files import read_json, replacing

ANCESTRY_FILE = "ancestry.json"
UNNAMED = "images that nobody named"  # behind a bare file of weights
FROM_IMAGENET = ("imagenette", "tiny-imagenet")
WELL_KNOWN = frozenset(("ImageNet", "generated", *FROM_IMAGENET, *KNOWN_SETS))


@dataclass(frozen=True, kw_only=True)
class Ancestor:
    """A data set that went into weights without a guarantee; ``fingerprint`` None: known by name only."""

    data: str
    fingerprint: str | None = None

    @property
    def is_well_known(self) -> bool:
        """Whether the name alone says which images these are: sets that everybody can get."""
        return self.data in WELL_KNOWN


class _Entry(TypedDict):
    data: str
    fingerprint: str | None


class _Ancestry(TypedDict):
    unprotected: list[_Entry]


def write_ancestry(folder: Path, ancestors: tuple[Ancestor, ...]) -> None:
    """Write them into a run's state folder, readable by its owner only."""
    entries = [{"data": entry.data, "fingerprint": entry.fingerprint} for entry in ancestors]
    with replacing(folder / ANCESTRY_FILE, mode=0o600) as temporary:
        temporary.write_text(json.dumps({"unprotected": entries}), encoding="utf-8")


def read_ancestry(folder: Path, names: tuple[str, ...]) -> tuple[Ancestor, ...]:
    """What ``write_ancestry`` wrote, and those of the release's ``names`` that it lacks, by name alone."""
    recorded: tuple[Ancestor, ...] = ()
    try:
        entries = read_json(folder / ANCESTRY_FILE, _Ancestry)["unprotected"]
        recorded = tuple(Ancestor(data=entry["data"], fingerprint=entry["fingerprint"]) for entry in entries)
    except FileNotFoundError:
        pass  # a release alone, or a run of an earlier version
    except (OSError, ValueError) as error:
        raise RunError(
            "damaged-run",
            f"{folder / ANCESTRY_FILE} cannot be read: {error}",
            why="It says which images stand unprotected behind the weights.",
            fix="Restore the file; or remove it, and they are known by name only.",
        ) from error
    recorded_names = {entry.data for entry in recorded}
    return (*recorded, *(Ancestor(data=name) for name in names if name not in recorded_names))
