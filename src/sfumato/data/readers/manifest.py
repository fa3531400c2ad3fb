"""manifest.csv: ``path,label[,patient][,split]``, one row per image; see ``findings`` for several labels."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from sfumato.data.readers.findings import (
    PREFIX,
    Findings,
    classes_and_findings,
    find_findings,
    refuse_several,
)
from sfumato.data.readers.listing import (
    Entry,
    Listing,
    declared_classes,
    sorted_classes,
    whole_number,
)
from sfumato.data.readers.splits import SPLIT_NAMES, SPLITS
from sfumato.errors import DataError, did_you_mean

COLUMNS = ("path", "label", "patient", "split")
GROUP = "group_"  # begins the name of a column for ``evaluate --by``; training does not read it


def read_manifest(
    folder: Path, classes: Sequence[str] | None = None, findings: Sequence[str] | None = None
) -> Listing:
    """The images that ``folder/manifest.csv`` lists. Every complaint names the file and line."""
    file = folder / "manifest.csv"
    found, rows = _read_rows(file, findings)
    if found is not None:
        if classes is not None:
            raise classes_and_findings(f"data.classes and the findings {', '.join(found.names)} are given")
        return Listing(_entries(file, rows, {}, found), found.names, found.declared, multi_label=True)
    declared = declared_classes(folder, classes)
    if declared is None:
        refuse_several([(f"{file}, line {line}", row["label"]) for line, row in rows])
    classes = declared or sorted_classes(row["label"] for _, row in rows)
    numbers = {name: number for number, name in enumerate(classes)}
    return Listing(
        _entries(file, rows, numbers, None, declared=declared is not None), classes, declared is not None
    )


def _entries(
    file: Path,
    rows: list[tuple[int, dict[str, str]]],
    numbers: dict[str, int],
    findings: Findings | None,
    *,
    declared: bool = True,
) -> tuple[Entry, ...]:
    """The rows, checked; ``numbers`` are those of the classes."""
    folder = file.parent
    by_line = (folder / "classes.txt").is_file()  # only there does a number mean a line
    entries: list[Entry] = []
    seen: dict[str, int] = {}  # path -> line
    for line, row in rows:
        where = f"{file}, line {line}"
        path = _inside(row["path"], where)
        if path in seen:
            raise DataError(
                "duplicate-row",
                f"{where}: {path} is already listed in line {seen[path]}.",
                why="An image that counts twice is protected half as well as stated.",
                fix="Keep one of the two rows.",
            )
        seen[path] = line
        label, several = -1, () if findings is None else findings.of_row(row, where)
        if findings is None:
            label = _label(row["label"], numbers, where, declared=declared, by_line=by_line)
        split = SPLIT_NAMES.get(row.get("split", "train").lower())
        if split is None:
            raise DataError(
                "unknown-split",
                f"{where}: split is {row['split']!r}. {did_you_mean(row['split'], SPLITS)}".rstrip(),
                fix="Use train, val or test.",
            )
        if not row.get("patient", "-"):
            raise DataError(
                "missing-patient",
                f"{where}: the patient is empty.",
                why="A patient-level guarantee needs every image's patient.",
                fix="Fill it in, or leave the whole column out.",
            )
        entries.append(Entry(folder / path, path, split, label, row.get("patient"), where, several))
    return tuple(entries)


def _read_rows(
    file: Path, declared: Sequence[str] | None
) -> tuple[Findings | None, list[tuple[int, dict[str, str]]]]:
    """The findings, if images have several, and (line number, row) of every row, with only known columns."""
    text = _read_text(file)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text), strict=True)
    rows = []
    try:
        header = [_spelling(column.strip()) for column in next(reader, [])]
        findings = find_findings(file.parent, header, declared, reserved=COLUMNS)
        _check_header(header, file, () if findings is None else findings.columns)
        for values in reader:
            line = reader.line_num
            if values and len(values) != len(header):
                raise _unreadable(file, line, f"{len(values)} values for {len(header)} columns")
            if any("\0" in value for value in values):
                raise _unreadable(file, line, "there is a null byte")
            if values:
                rows.append((line, dict(zip(header, (value.strip() for value in values), strict=True))))
    except csv.Error as error:
        raise _unreadable(file, reader.line_num, str(error)) from error
    if not rows:
        raise _unreadable(file, 1, "there are no rows")
    return findings, rows


def _spelling(column: str) -> str:
    return column.lower() if column.lower() in COLUMNS else column


def _delimiter(text: str) -> str:
    """What separates the columns of the first line: a comma; a semicolon or tab where there is no comma."""
    first = text.partition("\n")[0]
    return next((mark for mark in (",", ";", "\t") if mark in first), ",")


def _read_text(file: Path) -> str:
    try:
        data = file.read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(file, data[: error.start].count(b"\n") + 1, "it is not UTF-8") from error
    except OSError as error:
        raise _unreadable(file, 1, str(error.strerror)) from error


def _check_header(header: list[str], file: Path, findings: Sequence[str]) -> None:
    for column in header:
        # a run may declare some of many findings; those that it leaves out are marked as findings too
        if (
            column not in COLUMNS
            and column not in findings
            and not column.lower().startswith((PREFIX, GROUP))
        ):
            raise DataError(
                "unknown-column",
                f"{file}, line 1: column {column!r}. {did_you_mean(column, COLUMNS)}".rstrip(),
                why="A misspelt patient column would silently change what is protected.",
                fix=f"Use only the columns {', '.join(COLUMNS)}; a finding's column of 0 and 1 is called "
                f"{PREFIX}{column}, or declared in data.findings.",
            )
    for column in ("path",) if findings else ("path", "label"):
        if column not in header:
            raise _unreadable(file, 1, f"there is no column {column!r}")
    if len(set(header)) != len(header):
        raise _unreadable(file, 1, "a column occurs twice")


def _inside(path: str, where: str) -> str:
    """The path in its plain form; it must stay inside the folder."""
    plain = PurePosixPath(path.replace("\\", "/"))
    if not plain.parts:
        raise DataError(
            "missing-image",
            f"{where}: path {path!r} names no file.",
            fix="Give the image's path, relative to the folder of the manifest.",
        )
    if plain.is_absolute() or ".." in plain.parts or ":" in plain.parts[0]:
        raise DataError(
            "path-outside",
            f"{where}: path {path!r} leaves the folder.",
            why="A manifest may only name files below its own folder.",
            fix="Use paths relative to the folder, without '..'.",
        )
    return str(plain)


def _label(label: str, numbers: dict[str, int], where: str, *, declared: bool, by_line: bool) -> int:
    if label in numbers and label:
        return numbers[label]
    number = whole_number(label)
    if by_line and number is not None and number < len(numbers):
        return number
    raise DataError(
        "label-out-of-range",
        f"{where}: label {label!r} is not one of the {len(numbers)} declared classes."
        if declared
        else f"{where}: the label is empty.",
        why="Each image needs exactly one known class.",
        fix="Correct the label, or add the class to data.classes or classes.txt.",
    )


def _unreadable(file: Path, line: int, reason: str) -> DataError:
    return DataError(
        "unreadable-manifest",
        f"{file}, line {line}: {reason}.",
        why="A manifest is a UTF-8 CSV file with the header path,label[,patient][,split].",
        fix="Correct the line; quote values that contain commas.",
    )
