"""Charts of an audit, as inline SVG: scores of canaries, the ROC curve on logarithmic axes, and the bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from sfumato.privacy.statement import round_down, round_up
from sfumato.release.documents import AuditDocument, AuditHistogram
from sfumato.reporting.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    axes,
    legend,
    svg,
    tag,
    ticks,
)

_FLOOR, _FAR = HEIGHT - BOTTOM, WIDTH - RIGHT


def histogram_chart(bins: AuditHistogram) -> Markup:
    """How the scores of both sides lie, in the same bins."""
    edges, most = bins["edges"], max(1, *bins["num_in"], *bins["num_out"])
    across = Scale(edges[0], edges[-1], LEFT, _FAR)
    y_ticks = ticks(0.0, float(most))
    up = Scale(0.0, y_ticks[-1], _FLOOR, TOP)
    x_ticks = [edges[0] + (edges[-1] - edges[0]) * part / 4 for part in range(5)]
    shown = [(f"{value:.3g}", across(value)) for value in x_ticks]
    parts = axes(
        shown, [(f"{value:,g}", up(value)) for value in y_ticks], x_label="score", y_label="canaries"
    )
    for number, counts in enumerate((bins["num_out"], bins["num_in"])):
        points = [(edges[0], 0.0)]
        for place, count in enumerate(counts):
            points += [(edges[place], float(count)), (edges[place + 1], float(count))]
        points.append((edges[-1], 0.0))
        parts.append(_line(points, across, up, number))
    return svg(WIDTH, HEIGHT, "scores of canaries", parts, css="lines") + legend(["out", "in"])


def roc_chart(points: Sequence[tuple[float, float]]) -> Markup:
    """True positives against false ones, both logarithmic, beside guessing."""
    kept = [(x, y) for x, y in points if x > 0 and y > 0]
    if not kept:
        return tag("p", "Nothing to draw.", class_="empty")
    lowest = min(min(point) for point in kept)
    decades = range(math.floor(math.log10(lowest) + 1e-9), 1)
    across = Scale(decades[0], 0.0, LEFT, _FAR)
    up = Scale(decades[0], 0.0, _FLOOR, TOP)
    labels = [f"{10.0**power:g}" for power in decades]
    parts = axes(
        list(zip(labels, map(across, decades), strict=True)),
        list(zip(labels, map(up, decades), strict=True)),
        x_label="false positive rate",
        y_label="true positive rate",
    )
    found = [(math.log10(x), math.log10(y)) for x, y in kept]
    for number, line in enumerate((found, [(decades[0], decades[0]), (0.0, 0.0)])):
        parts.append(_line(line, across, up, number))
    label = "ROC curve on logarithmic axes"
    return svg(WIDTH, HEIGHT, label, parts, css="lines") + legend(["the audit", "guessing"])


def bound_chart(audit: AuditDocument) -> Markup:
    """What was found, beside what is promised and what so many canaries could have shown."""
    rows = [
        ("found: at least", audit["epsilon"], round_down(audit["epsilon"], 3)),
        ("nothing assumed", audit["plain_epsilon"], round_down(audit["plain_epsilon"], 3)),
        ("promised: at most", audit["nominal_epsilon"], round_up(audit["nominal_epsilon"], 3)),
        ("ceiling of this audit", audit["ceiling"], round_down(audit["ceiling"], 3)),
    ]
    most = max(1e-9, *(value for _, value, _ in rows))
    name_width, row = 170, 38
    full = WIDTH - name_width - 80
    parts = []
    for number, (name, value, figure) in enumerate(rows):
        y = number * row + 6
        place = {"x": name_width, "y": y + 5, "height": 18, "rx": 3}
        parts += [
            tag("text", name, class_="name", x=name_width - 10, y=y + 19, text_anchor="end"),
            tag("rect", class_="track", width=full, **place),
            tag("rect", class_="bar", width=f"{full * value / most:.1f}", **place),
            tag("text", f"ε = {figure}", class_="figure", x=name_width + full + 8, y=y + 19),
        ]
    return svg(WIDTH, row * len(rows) + 6, "lower bound of ε beside what is promised", parts)


def _line(points: Sequence[tuple[float, float]], across: Scale, up: Scale, number: int) -> Markup:
    path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
    return tag("polyline", class_=f"line s{number}", points=path)
