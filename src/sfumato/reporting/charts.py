"""Charts as inline SVG that follow the page's colours, in light, dark and print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 520, 290  # about the size on the page, so that letters keep theirs
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 14, 14, 46


@dataclass(frozen=True)
class Series:
    """A named line: points (x, y), left to right."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(
    series: Sequence[Series], *, x_label: str, y_label: str, percent: bool = False, markers: bool = False
) -> str:
    """Lines over a common grid that starts at zero."""
    points = [point for line in series for point in line.points]
    if not points:
        return '<p class="empty">Nothing to draw yet.</p>'
    x_ticks = _ticks(0.0, max(x for x, _ in points))
    y_ticks = _ticks(0.0, 1.0 if percent else max(y for _, y in points))
    across = _Scale(0.0, max(x_ticks[-1], max(x for x, _ in points)), _LEFT, _WIDTH - _RIGHT)
    up = _Scale(0.0, y_ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    parts = [_axes(x_ticks, y_ticks, across, up, x_label=x_label, y_label=y_label, percent=percent)]
    for number, line in enumerate(series):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="line s{number % 6}" points="{path}"/>')
        if markers:
            parts += [
                f'<circle class="dot s{number % 6}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5">'
                f"<title>{escape(line.name)}: {_number(y, percent)} at {x:g}</title></circle>"
                for x, y in line.points
            ]
    label = f"{y_label} against {x_label}"
    return _svg(_WIDTH, _HEIGHT, label, "".join(parts)) + _legend([line.name for line in series])


def bar_chart(values: Sequence[tuple[str, float | None]], *, label: str) -> str:
    """Horizontal bars of shares between 0 and 1, each with its figure."""
    row = 34 if len(values) <= 12 else 24
    name_width = _label_width([name for name, _ in values])
    full = _WIDTH - name_width - 66
    parts = []
    for number, (name, share) in enumerate(values):
        y = number * row + (row - 26) / 2
        width = full * (share or 0.0)
        figure = "no images" if share is None else f"{100 * share:.1f} %"
        parts.append(
            f'<text class="name" x="{name_width - 10}" y="{y + 17}" text-anchor="end">{_short(name)}</text>'
            f'<rect class="track" x="{name_width}" y="{y + 5}" width="{full}" height="16" rx="3"/>'
            f'<rect class="bar" x="{name_width}" y="{y + 5}" width="{width:.1f}" height="16" rx="3">'
            f"<title>{escape(name)}: {figure}</title></rect>"
            f'<text class="figure" x="{name_width + full + 8}" y="{y + 17}">{figure}</text>'
        )
    return _svg(_WIDTH, row * len(values) + 4, label, "".join(parts))


def confusion_chart(matrix: Sequence[Sequence[int]], classes: Sequence[str]) -> str:
    """True classes down, predicted ones across; each row's shades are shares of that true class."""
    count = len(classes)
    margin = _label_width(classes) if count <= 30 else 12
    slant = margin * 0.35 if count <= 30 else 12  # the last slanted name needs room on its right
    cell = max(3.0, min(44.0, (_WIDTH - margin - slant) / count))
    side = cell * count
    parts = []
    for row, counts in enumerate(matrix):
        total = sum(counts)
        for column, number in enumerate(counts):
            share = number / total if total else 0.0
            x, y = margin + column * cell, margin + row * cell
            kind = "hit" if row == column else "miss"
            title = f"{classes[row]} taken for {classes[column]}: {number} of {total}"
            parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{cell - 1:.1f}" '
                f'height="{cell - 1:.1f}" fill-opacity="{_shade(share):.3f}">'
                f"<title>{escape(title)}</title></rect>"
            )
            if cell >= 22 and number:
                tone = "light" if _shade(share) > 0.55 else "dark"
                parts.append(
                    f'<text class="count {tone}" x="{x + cell / 2:.1f}" y="{y + cell / 2 + 4:.1f}" '
                    f'text-anchor="middle">{number}</text>'
                )
    if cell >= 12:
        for index, name in enumerate(classes):
            middle = margin + index * cell + cell / 2
            parts.append(
                f'<text class="name" x="{margin - 6}" y="{middle + 4:.1f}" text-anchor="end">'
                f"{_short(name)}</text>"
                f'<text class="name" transform="translate({middle + 4:.1f},{margin - 6}) rotate(-50)">'
                f"{_short(name)}</text>"
            )
    label = "confusion matrix: true classes down, predicted across"
    return _svg(margin + side + slant, margin + side + 4, label, "".join(parts), css="confusion")


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)


def _axes(
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    across: _Scale,
    up: _Scale,
    *,
    x_label: str,
    y_label: str,
    percent: bool,
) -> str:
    floor = _HEIGHT - _BOTTOM
    parts = []
    for tick in y_ticks:
        y = up(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = _number(tick, percent)
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in x_ticks:
        x = across(tick)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{floor + 18}" text-anchor="middle">{tick:,g}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{x_label}</text>')
    half = (_TOP + floor) / 2
    parts.append(
        f'<text class="label" transform="translate(13,{half}) rotate(-90)" text-anchor="middle">'
        f"{y_label}</text>"
    )
    return "".join(parts)


def _svg(width: float, height: float, label: str, body: str, *, css: str = "") -> str:
    return (
        f'<svg class="chart {css}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}">{body}</svg>'
    )


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    items = "".join(
        f'<li><span class="key s{number % 6}"></span>{escape(name)}</li>' for number, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from ``low`` to at least ``high``."""
    if high <= low:
        return [low, low + 1.0]
    raw = (high - low) / 5
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw)
    count = math.ceil((high - low) / step - 1e-9)
    return [low + index * step for index in range(count + 1)]


def _number(value: float, percent: bool) -> str:
    return f"{100 * value:.3g} %" if percent else f"{value:,.3g}"


def _shade(share: float) -> float:
    """Opacity for a share: small confusions stay visible."""
    return 0.04 + 0.96 * share**0.6


def _label_width(names: Sequence[str]) -> float:
    """Room for the longest name as it is shown."""
    return 22 + 7.2 * min(18, max((len(name) for name in names), default=0))


def _short(name: str) -> str:
    return escape(name if len(name) <= 18 else name[:17] + "…")
