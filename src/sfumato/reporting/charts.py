"""Charts as inline SVG that follow the page's colours, in light, dark and print.

All markup is written by ``tag``, which escapes every text and attribute: names may come from a stranger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

MOST_CLASSES = 200  # a confusion matrix has a rectangle for each pair
WIDTH, HEIGHT = 520, 290  # about the size on the page, so that letters keep theirs
LEFT, RIGHT, TOP, BOTTOM = 68, 14, 14, 46
_LETTER = 7.2  # mean width of a letter of a name
_LONGEST = 26  # letters of a name that are shown; all of them are in its tooltip
_BESIDE, _ABOVE = 20, 64  # letters that fit beside a bar, and above one
_LONGEST_OF_CONFUSION = 12


@dataclass(frozen=True)
class Series:
    """A named line: points (x, y), left to right."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    percent: bool = False,
    markers: bool = False,
    marked: Sequence[tuple[str, float, float]] = (),
    diagonal: bool = False,
) -> Markup:
    """Lines over a common grid that starts at zero; ``marked`` are single points (text, x, y) of note."""
    points = [point for line in series for point in line.points]
    if not points:
        return tag("p", "Nothing to draw yet.", class_="empty")
    x_ticks = ticks(0.0, max(x for x, _ in points))
    y_ticks = ticks(0.0, 1.0 if percent else max(y for _, y in points))
    across = Scale(0.0, max(x_ticks[-1], max(x for x, _ in points)), LEFT, WIDTH - RIGHT)
    up = Scale(0.0, y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = axes(
        [(f"{tick:,g}", across(tick)) for tick in x_ticks],
        [(_number(tick, percent), up(tick)) for tick in y_ticks],
        x_label=x_label,
        y_label=y_label,
    )
    for number, line in enumerate(series):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.points)
        parts.append(tag("polyline", class_=f"line {_series(number)}", points=path))
        if markers:
            parts += [
                tag(
                    "circle",
                    tag("title", f"{line.name}: {_number(y, percent)} at {x:g}"),
                    class_=f"dot {_series(number)}",
                    cx=f"{across(x):.1f}",
                    cy=f"{up(y):.1f}",
                    r=3.5,
                )
                for x, y in line.points
            ]
    if diagonal:  # what chance, or perfect calibration, would give
        ends = f"{across(0):.1f},{up(0):.1f} {across(1):.1f},{up(1):.1f}"
        parts.append(tag("polyline", class_="line dashed", points=ends))
    parts += [
        tag("circle", tag("title", text), class_="dot marked", cx=f"{across(x):.1f}", cy=f"{up(y):.1f}", r=5)
        for text, x, y in marked
    ]
    label = f"{y_label} against {x_label}"
    return svg(WIDTH, HEIGHT, label, parts, css="lines") + legend([line.name for line in series])


def bar_chart(values: Sequence[tuple[str, float | None]], *, label: str) -> Markup:
    """Horizontal bars of shares between 0 and 1, each with its figure; long names stand above their bars."""
    if any(len(name) > _BESIDE for name, _ in values):
        return _bars_under_names(values, label=label)
    row = 34 if len(values) <= 12 else 24
    name_width = _label_width([name for name, _ in values])
    full = WIDTH - name_width - 66
    parts = []
    for number, (name, share) in enumerate(values):
        y = number * row + (row - 26) / 2
        figure = "no images" if share is None else f"{100 * share:.1f} %"
        title = tag("title", f"{name}: {figure}")
        place = {"x": name_width, "y": y + 5, "height": 16, "rx": 3}
        parts += [
            tag("text", _short(name), title, class_="name", x=name_width - 10, y=y + 17, text_anchor="end"),
            tag("rect", class_="track", width=full, **place),
            tag("rect", title, class_="bar", width=f"{full * (share or 0.0):.1f}", **place),
            tag("text", figure, class_="figure", x=name_width + full + 8, y=y + 17),
        ]
    return svg(WIDTH, row * len(values) + 4, label, parts)


def _bars_under_names(values: Sequence[tuple[str, float | None]], *, label: str) -> Markup:
    row, full = 46, WIDTH - 66
    parts = []
    for number, (name, share) in enumerate(values):
        y = number * row
        figure = "no images" if share is None else f"{100 * share:.1f} %"
        title = tag("title", f"{name}: {figure}")
        place = {"x": 0, "y": y + 22, "height": 14, "rx": 3}
        parts += [
            tag("text", _short(name, _ABOVE), title, class_="name", x=0, y=y + 15, text_anchor="start"),
            tag("rect", class_="track", width=full, **place),
            tag("rect", title, class_="bar", width=f"{full * (share or 0.0):.1f}", **place),
            tag("text", figure, class_="figure", x=full + 8, y=y + 34),
        ]
    return svg(WIDTH, row * len(values) + 4, label, parts)


def confusion_chart(matrix: Sequence[Sequence[int]], classes: Sequence[str]) -> Markup:
    """True classes down, predicted ones across; each row's shades are shares of that true class.

    Long names would leave the matrix no room: it has their numbers instead, and a list below tells which.
    """
    named = len(classes) <= 30
    if named and any(len(name) > _LONGEST_OF_CONFUSION for name in classes):
        numbers = [str(number + 1) for number in range(len(classes))]
        names = [tag("li", f"{number} {name}") for number, name in zip(numbers, classes, strict=True)]
        return confusion_chart(matrix, numbers) + tag("ul", *names, class_="legend")
    margin = _label_width(classes) if named else 12
    top = 12 + 0.77 * margin if named else 12  # names across are slanted by 50 degrees
    slant = margin * 0.42 if named else 12  # the last slanted name needs room on its right
    cell = max(3.0, min(90.0 if len(classes) <= 4 else 44.0, (WIDTH - margin - slant) / len(classes)))
    parts = []
    for row, counts in enumerate(matrix):
        total = sum(counts)
        for column, number in enumerate(counts):
            share = number / total if total else 0.0
            x, y = margin + column * cell, top + row * cell
            title = f"{classes[row]} taken for {classes[column]}: {number} of {total}"
            parts.append(
                tag(
                    "rect",
                    tag("title", title),
                    class_="hit" if row == column else "miss",
                    x=f"{x:.1f}",
                    y=f"{y:.1f}",
                    width=f"{cell - 1:.1f}",
                    height=f"{cell - 1:.1f}",
                    fill_opacity=f"{_shade(share):.3f}",
                )
            )
            if number:
                parts += _figure_in_cell(number, x + cell / 2, y + cell / 2 + 4, cell, _shade(share))
    for index, name in enumerate(classes if named else ()):
        middle = index * cell + cell / 2
        title, place = tag("title", name), {"x": margin - 6, "y": f"{top + middle + 4:.1f}"}
        slanted = f"translate({margin + middle + 4:.1f},{top - 6:.1f}) rotate(-50)"
        parts += [
            tag("text", _short(name), title, class_="name", text_anchor="end", **place),
            tag("text", _short(name), title, class_="name", transform=slanted),
        ]
    side = cell * len(classes)
    label = "confusion matrix: true classes down, predicted across"
    width = margin + side + slant
    # as wide as it is, and no wider: stretched to the page, two classes would have letters of a headline
    css = "confusion small" if width <= 0.7 * WIDTH else "confusion"
    return svg(width, top + side + 4, label, parts, css=css)


def _figure_in_cell(number: int, x: float, y: float, cell: float, shade: float) -> list[Markup]:
    """A count in its cell: in small letters if it needs them, not at all if they do not help."""
    digits = len(str(number))
    if cell < 22 or 6 * digits > cell:
        return []
    css = f"count {'light' if shade > 0.55 else 'dark'}{' small' if 8 * digits > cell else ''}"
    return [tag("text", number, class_=css, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor="middle")]


@dataclass(frozen=True)
class Scale:
    """From values to places in the picture."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)


def axes(
    x_ticks: Sequence[tuple[str, float]], y_ticks: Sequence[tuple[str, float]], *, x_label: str, y_label: str
) -> list[Markup]:
    """Grid, axis and their texts; each tick is a text and its place in the picture."""
    floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for text, y in y_ticks:
        parts.append(tag("line", class_="grid", x1=LEFT, x2=right, y1=f"{y:.1f}", y2=f"{y:.1f}"))
        parts.append(tag("text", text, class_="tick", x=LEFT - 8, y=f"{y + 4:.1f}", text_anchor="end"))
    for text, x in x_ticks:
        parts.append(tag("text", text, class_="tick", x=f"{x:.1f}", y=floor + 18, text_anchor="middle"))
    parts.append(tag("line", class_="axis", x1=LEFT, x2=right, y1=floor, y2=floor))
    middle, half = (LEFT + right) / 2, (TOP + floor) / 2
    upright = f"translate(13,{half})" + (" rotate(-90)" if len(y_label) > 1 else "")
    parts.append(tag("text", x_label, class_="label", x=middle, y=HEIGHT - 6, text_anchor="middle"))
    parts.append(tag("text", y_label, class_="label", transform=upright, text_anchor="middle"))
    return parts


def svg(width: float, height: float, label: str, parts: Sequence[Markup], *, css: str = "figures") -> Markup:
    """A whole picture; ``label`` is for those who cannot see it."""
    box = f"0 0 {width:.0f} {height:.0f}"
    return tag("svg", *parts, class_=f"chart {css}", viewBox=box, role="img", aria_label=label)


def legend(names: Sequence[str]) -> Markup:
    """Which line is which, if there are several."""
    if len(names) < 2:
        return Markup("")
    items = [
        tag("li", tag("span", class_=f"key {_series(number)}"), name) for number, name in enumerate(names)
    ]
    return tag("ul", *items, class_="legend")


def tag(name: str, *content: object, **attributes: object) -> Markup:
    """One element. ``class_`` is class, ``text_anchor`` text-anchor; only what ``tag`` made is no text."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items()
    )
    return Markup(f"<{name}{written}>{''.join(map(escape, content))}</{name}>")


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers from ``low`` to at least ``high``."""
    raw = (high - low) / 5
    if not 1e-300 < raw < 1e300:
        return [low, max(high, low + 1.0)]
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10, 20) if factor * magnitude >= raw)
    count = math.ceil((high - low) / step - 1e-9)
    return [low + index * step for index in range(count + 1)]


def _number(value: float, percent: bool) -> str:
    return f"{100 * value:.3g} %" if percent else f"{value:,.3g}"


def _shade(share: float) -> float:
    """Opacity for a share: small confusions stay visible."""
    return 0.04 + 0.96 * share**0.6


def _label_width(names: Sequence[str]) -> float:
    """Room for the longest name as it is shown."""
    return 22 + _LETTER * min(_LONGEST, max((len(name) for name in names), default=0))


def _short(name: str, longest: int = _LONGEST) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"


def _series(number: int) -> str:
    """The classes of a series: six colours, then the same ones dotted, so that twelve can be told apart."""
    return f"s{number % 6}" + (" again" if number % 12 >= 6 else "")
