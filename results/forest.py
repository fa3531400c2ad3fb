"""Differences with their intervals as inline SVG: theirs a diamond, ours a dot on its interval."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from sfumato.reporting.charts import Scale, tag, ticks

WIDTH, LEFT, RIGHT, LINE = 760, 330, 20, 34
LONGEST = 46  # letters of a name on a line; there are two


def forest(rows: Sequence[dict[str, Any]], *, several: bool) -> Markup:
    """The chart, or nothing if there is no interval to draw; ``several``: name each difference's column."""
    if not rows:
        return Markup("")
    values = [value for row in rows for value in (row["lower"], row["upper"], row["published"], 0.0)]
    low, high = (edge(value for value in values if value is not None) for edge in (min, max))
    room = 0.05 * (high - low)
    across = Scale(low - room, high + room, LEFT, WIDTH - RIGHT)
    height = LINE * len(rows) + 40
    zero = across(0.0)
    parts = [tag("line", class_="zero", x1=f"{zero:.1f}", x2=f"{zero:.1f}", y1=4, y2=height - 34)]
    for number, row in enumerate(rows):
        parts += _line(row, 4 + LINE * (number + 0.5), across, several=several)
    step = ticks(0.0, high - low)[1]
    marks = [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    parts += [
        tag(
            "text",
            f"{mark:+g}" if mark else "0",
            class_="tick",
            x=f"{across(mark):.1f}",
            y=height - 18,
            text_anchor="middle",
        )
        for mark in marks
    ]
    parts.append(
        tag(
            "text",
            "points: ours (dot, 95 % interval), theirs (diamond)",
            class_="tick",
            x=WIDTH - RIGHT,
            y=height - 2,
            text_anchor="end",
        )
    )
    return tag(
        "svg",
        *parts,
        class_="forest",
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        aria_label="The differences above with their intervals",
    )


def _line(row: dict[str, Any], y: float, across: Scale, *, several: bool) -> list[Markup]:
    name = f"{row['row']} − {row['minus']}" + (f" [{row['column']}]" if several else "")
    lines = textwrap.wrap(name, LONGEST)[:2]
    first = y + 4 - 7.5 * (len(lines) - 1)
    parts = [tag("text", text, x=0, y=f"{first + 15 * i:.1f}") for i, text in enumerate(lines)]
    lower, upper, mean = (f"{across(row[key]):.1f}" for key in ("lower", "upper", "mean"))
    parts.append(tag("line", class_="bar", x1=lower, x2=upper, y1=f"{y:.1f}", y2=f"{y:.1f}"))
    parts.append(tag("circle", class_="mean", cx=mean, cy=f"{y:.1f}", r=5))
    if row["published"] is not None:
        x = across(row["published"])
        parts.append(tag("path", class_="theirs", d=f"M{x:.1f} {y - 7:.1f}l6 7l-6 7l-6 -7z"))
    return parts
