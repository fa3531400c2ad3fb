"""Several findings per image: which there are, and which of them a row of manifest.csv has.

Findings are declared in ``data.findings`` or ``findings.txt``, or named by columns ``finding:NAME`` of the
manifest, which are taken to be public as class names are. No row adds to them, and no row decides that an
image can have several: one image could otherwise change the released model by being there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sfumato.data.readers.listing import read_names
from sfumato.errors import ConfigError, DataError, did_you_mean

PREFIX = "finding:"  # of a column of 0 and 1
SEPARATOR = "|"  # between findings in the column ``label``
NOTHING = "no finding"  # what NIH's chest X-rays have as the label of an image without any
_CELLS = {"0": False, "0.0": False, "1": True, "1.0": True}


@dataclass(frozen=True)
class Findings:
    """The declared findings in order, and their columns of 0 and 1; no columns: ``label`` lists them."""

    names: tuple[str, ...]
    columns: tuple[str, ...] = ()
    declared: bool = True  # listed beforehand, not only in the header of the manifest

    def of_row(self, row: Mapping[str, str], where: str) -> tuple[int, ...]:
        """The numbers of the findings that the image of this row has."""
        if self.columns:
            cells = [(column, row[column]) for column in self.columns]
            wrong = next(((column, cell) for column, cell in cells if cell not in _CELLS), None)
            if wrong is not None:
                raise DataError(
                    "bad-finding",
                    f"{where}: {wrong[0]} is {wrong[1]!r}.",
                    why="A finding is there, 1, or it is not, 0; what is unknown or uncertain cannot be "
                    "guessed.",
                    fix="Decide for all images what such a value means, and write 0 or 1.",
                )
            return tuple(number for number, (_, cell) in enumerate(cells) if _CELLS[cell])
        label = row["label"]
        if not label or (label.lower() == NOTHING and label not in self.names):
            return ()
        named = [name.strip() for name in label.split(SEPARATOR)]
        for name in named:
            if name not in self.names:
                raise DataError(
                    "label-out-of-range",
                    f"{where}: {name!r} in label {label!r} is not one of the {len(self.names)} declared "
                    f"findings. {did_you_mean(name, self.names)}".rstrip(),
                    why="The list was declared beforehand; images cannot add to it.",
                    fix="Correct the label, or declare the finding in data.findings or findings.txt.",
                )
        return tuple(number for number, name in enumerate(self.names) if name in named)


def find_findings(
    folder: Path, header: Sequence[str], given: Sequence[str] | None, *, reserved: Sequence[str]
) -> Findings | None:
    """What is declared for the manifest with this header; None: each image has one class.

    ``reserved`` are the columns that mean something else.
    """
    declared = _declared(folder, given)
    prefixed = [column for column in header if column.lower().startswith(PREFIX)]
    if declared is None and not prefixed:
        return None
    names = declared or _checked([column[len(PREFIX) :].strip() for column in prefixed], "manifest.csv")
    columns = [_column(name, [column for column in header if column not in reserved]) for name in names]
    found = [column for column in columns if column is not None]
    if (folder / "classes.txt").is_file():
        raise classes_and_findings(f"{folder} has a classes.txt, and findings {', '.join(names)}")
    if found and "label" in header:
        raise bad_findings(
            "manifest.csv", f"both the column label and the column {found[0]!r} tell an image's findings"
        )
    if found and None in columns:
        missing = names[columns.index(None)]
        hint = did_you_mean(missing, [*header, *(column[len(PREFIX) :] for column in prefixed)])
        raise bad_findings("manifest.csv", f"there is no column for the finding {missing!r}. {hint}".rstrip())
    if not found and "label" not in header:
        raise bad_findings("manifest.csv", "there is neither a column label nor one for each finding")
    return Findings(names, tuple(found), declared=declared is not None)


def refuse_findings(what: object, given: Sequence[str] | None) -> None:
    """Refuse ``data.findings`` for data that have no manifest: their images have one class each."""
    if given is not None:
        raise ConfigError(
            "findings-without-manifest",
            f"data.findings are given, but {what} has no manifest.csv.",
            why="A folder or a known set says one class of each image.",
            fix="Write a manifest.csv with the findings of each image, or leave data.findings out.",
        )


def refuse_several(labels: Sequence[tuple[str, str]]) -> None:
    """Refuse labels such as ``a|b`` where nothing is declared: each would be a class of its own."""
    for where, label in labels:
        if SEPARATOR in label:
            raise DataError(
                "undeclared-findings",
                f"{where}: label {label!r} looks like several findings of one image.",
                why="As a class it would be one beside its parts; and that an image can have several must "
                "not be learnt from the images.",
                fix="Declare them: --findings a,b (data.findings) or a findings.txt, one name a line. If it "
                "is one class, declare the classes (data.classes, classes.txt).",
            )


def classes_and_findings(what: str) -> ConfigError:
    """The error for data that are declared to have one class per image, and several findings too."""
    return ConfigError(
        "classes-and-findings",
        f"{what}.",
        why="An image has one of several classes, or any number of findings, not both.",
        fix="Keep data.classes (classes.txt) or data.findings (findings.txt, columns finding:NAME).",
    )


def bad_findings(where: object, what: str) -> DataError:
    return DataError(
        "bad-findings",
        f"{where}: {what}.",
        fix="Name each finding once, without '|'. The manifest has either the column label, such as a|b, or "
        "a column of 0 and 1 for each finding, called by its name or finding:NAME.",
    )


def _declared(folder: Path, given: Sequence[str] | None) -> tuple[str, ...] | None:
    file = folder / "findings.txt"
    written = _checked(read_names(file), file) if file.is_file() else None
    named = None if given is None else _checked(given, "data.findings")
    if named is not None and written is not None and named != written:
        raise bad_findings(file, "it lists other findings than data.findings, or in another order")
    return named or written


def _checked(names: Sequence[str], where: object) -> tuple[str, ...]:
    bad = [name for name in names if not name or name != name.strip() or SEPARATOR in name]
    if not names or bad or len({name.lower() for name in names}) < len(names):
        raise bad_findings(where, "it names no finding, one twice, or one with '|' or blanks around it")
    return tuple(names)


def _column(name: str, header: Sequence[str]) -> str | None:
    """The column of this finding: called as it, or ``finding:`` and its name."""
    found = [
        column
        for column in header
        if column == name or (column.lower().startswith(PREFIX) and column[len(PREFIX) :].strip() == name)
    ]
    if len(found) > 1:
        raise bad_findings("manifest.csv", f"{found[0]!r} and {found[1]!r} are the same finding")
    return found[0] if found else None
