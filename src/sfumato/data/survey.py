"""What the files of a folder are like, for those who may see them: sensitive, shown and never stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sfumato.data.readers.header import Header
from sfumato.data.readers.listing import Entry

_EXAMPLES = 10


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Sizes and depths with their numbers of files, and some files with their patients.

    A patient is shown as the part of the file's name that marks them; one that a manifest or a DICOM header
    names is shown as a number, so that the name is not written anywhere.
    """

    sizes: tuple[tuple[tuple[int, int], int], ...]  # ((width, height), files), the most frequent first
    bits: tuple[tuple[int, int], ...]  # (bits of a stored value, files), likewise
    examples: tuple[tuple[str, str | None], ...]  # (file, patient)


def survey(
    entries: Sequence[Entry],
    headers: Sequence[Header],
    numbers: Sequence[int] | None,
    *,
    in_file_names: bool,
) -> Survey:
    """Of all files; ``numbers`` are their patients, and ``in_file_names`` says that file names mark them."""
    shown = min(_EXAMPLES, len(entries))
    examples = []
    for row in (place * len(entries) // shown for place in range(shown)):  # evenly over the folder
        entry = entries[row]
        number = None if numbers is None else f"patient {int(numbers[row]) + 1}"
        examples.append((entry.relative, entry.patient if in_file_names else number))
    return Survey(
        sizes=tuple(Counter((header.width, header.height) for header in headers).most_common()),
        bits=tuple(Counter(header.bits for header in headers).most_common()),
        examples=tuple(examples),
    )
