"""Columns of a manifest that tell people apart for an evaluation: sex, age band, scanner.

Their names begin with ``group_``, so that a misspelt column of another kind is still noticed. Training does
not read them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from sfumato.data.readers.folder import list_images
from sfumato.data.readers.manifest import GROUP
from sfumato.errors import DataError, did_you_mean


def subgroup_column(
    folder: Path, column: str, *, split: str, num_images: int, classes: Sequence[str] | None = None
) -> list[str]:
    """The value of ``group_<column>`` for each image of a split, in the order in which it is loaded."""
    file = folder / "manifest.csv"
    rows = _rows(file) if file.is_file() else []
    known = [name.removeprefix(GROUP) for name in (rows[0] if rows else {}) if name.startswith(GROUP)]
    column = column.strip().lower().removeprefix(GROUP)
    if column not in known:
        raise DataError(
            "no-subgroup-column",
            f"{file} has no column {GROUP}{column}. {did_you_mean(column, known)}".rstrip(),
            why="Subgroups come from manifest.csv, from columns whose names begin with group_.",
            fix=f"Add the column {GROUP}{column}, or name one of: {', '.join(known) or 'none there'}.",
        )
    values = {_plain(row["path"]): row[f"{GROUP}{column}"] or "-" for row in rows}
    entries = [entry for entry in list_images(folder, classes).entries if entry.split == split]
    if len(entries) != num_images:
        raise DataError(
            "no-subgroup-column",
            f"{file} lists {len(entries)} {split} images, but {num_images} are evaluated.",
            fix="Evaluate a split of the manifest's own folder.",
        )
    return [values[entry.relative] for entry in entries]


def _rows(file: Path) -> list[dict[str, str]]:
    """The manifest as text; whatever is wrong with it, loading its images has complained of before."""
    text = file.read_text(encoding="utf-8-sig")
    first = text.partition("\n")[0]
    mark = next((mark for mark in (",", ";", "\t") if mark in first), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark)
    header = [name.strip().lower() for name in next(reader, [])]
    return [dict(zip(header, (value.strip() for value in row), strict=True)) for row in reader if row]


def _plain(path: str) -> str:
    return str(PurePosixPath(path.replace("\\", "/")))
