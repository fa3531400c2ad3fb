"""A reproduction for people: the paper's table with ours beside it, and differences with their intervals."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

_SCORES = {
    "accuracy": "accuracy",
    "top5_accuracy": "top-5 accuracy",
    "training_accuracy": "training accuracy",
}
_NOTHING = "·"


def table_text(document: dict[str, Any], *, width: int = 100) -> str:
    """The whole document as text within ``width`` columns."""
    paper = document["paper"].partition(", ")[0]
    scale = "" if document["note"] is None else f"Small scale: {document['note']}"
    settings = ", ".join(f"{path} = {value}" for path, value in document["changed"].items())
    changed = f"Changed by --set: {settings}" if settings else ""
    parts = [
        "\n".join(
            textwrap.fill(line, width)
            for line in (
                f"{paper}: {document['title']}",
                f"They conclude: {document['claim']}",
                scale,
                changed,
            )
            if line
        )
    ]
    scores = dict.fromkeys(cell["score"] for cell in document["cells"])
    for score in scores:
        cells = [cell for cell in document["cells"] if cell["score"] == score]
        heading = (
            f"{_SCORES.get(score, score)} in %: theirs / ours ({document['statistic']}, lowest to highest, n)"
        )
        parts.append(f"{textwrap.fill(heading, width)}\n{_pivot(cells, width)}")
    compared = [row for row in document["differences"] if row["n"]]
    if compared:
        parts.append(_differences(compared, width))
    return "\n\n".join(parts)


def _pivot(cells: Sequence[dict[str, Any]], width: int) -> str:
    """Rows and columns as in the paper, exchanged where that fits the width better."""
    rows = list(dict.fromkeys(cell["row"] for cell in cells))
    columns = list(dict.fromkeys(cell["column"] for cell in cells))
    texts = {(cell["row"], cell["column"]): _cell(cell) for cell in cells}
    upright = [["", *columns], *([row, *(texts.get((row, c), "") for c in columns)] for row in rows)]
    lying = [["", *rows], *([column, *(texts.get((r, column), "") for r in rows)] for column in columns)]
    return _aligned(upright if _width(upright) <= max(width, _width(lying)) else lying)


def _cell(cell: dict[str, Any]) -> str:
    theirs = _NOTHING if cell["published"] is None else _printed(cell["published"])
    if cell["ours"] is None:
        return f"{theirs} / {_NOTHING}"
    spread = f", {cell['lowest']:.1f} to {cell['highest']:.1f}" if cell["n"] > 1 else ""
    return f"{theirs} / {cell['ours']:.1f} ({spread.removeprefix(', ')}{', ' if spread else ''}{cell['n']})"


def _printed(value: float) -> str:
    """As papers print it: one digit behind the point, or the two that there are."""
    return f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def _differences(rows: Sequence[dict[str, Any]], width: int) -> str:
    """Each comparison on a line: theirs, ours with its interval; below, what paired runs share."""
    several = len({row["column"] for row in rows}) > 1
    more = len({row["score"] for row in rows}) > 1
    lines = [["difference in points, by seed", "theirs", "ours", "95 % interval", "n", ""]]
    for row in rows:
        name = f"{row['row']} − {row['minus']}"
        name += f" [{row['column']}]" if several else ""
        name += f" ({_SCORES.get(row['score'], row['score'])})" if more and row["score"] != "accuracy" else ""
        theirs = _NOTHING if row["published"] is None else f"{row['published']:+.1f}"
        interval, clear = _NOTHING, ""
        if row["lower"] is not None:
            interval = f"{row['lower']:+.1f} to {row['upper']:+.1f}"
            clear = "" if row["lower"] <= 0 <= row["upper"] else "clear"
        lines.append([name, theirs, f"{row['mean']:+.1f}", interval, str(row["n"]), clear])
    longest = max(24, width - sum(max(len(line[i]) for line in lines) + 2 for i in range(1, 6)))
    for line in lines:
        line[0] = textwrap.shorten(line[0], longest, placeholder="…")
    shared = {" and ".join(row["shared"]) or "nothing but the seed" for row in rows}
    note = f"Paired runs share: {'; or '.join(sorted(shared))}. Student's interval over the pairs."
    return f"{_aligned(lines)}\n{textwrap.fill(note, width)}"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns side by side: the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(size) if i == 0 else text.rjust(size)
            for i, (text, size) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _width(lines: Sequence[Sequence[str]]) -> int:
    return sum(max(len(line[i]) for line in lines) + 2 for i in range(len(lines[0])))
