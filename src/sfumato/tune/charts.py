"""Pictures of a search: scores against settings and trials, importance, best values by batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from sfumato.reporting.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    Series,
    axes,
    bar_chart,
    line_chart,
    svg,
    tag,
    ticks,
)
from sfumato.tune.ranges import Value
from sfumato.tune.records import TrialRecord, best_so_far

_BATCH = "training.batch_size"


def progress_chart(records: Sequence[TrialRecord]) -> Markup:
    """Each trial's score and the best so far."""
    scores = [(float(record.number + 1), max(0.0, record.score)) for record in records]
    best = [(place, value) for (place, _), value in zip(scores, best_so_far(records), strict=True)]
    shown = [Series("best so far", best), Series("trial", scores)]
    return line_chart(shown, x_label="trial", y_label="score", percent=True, markers=True)


def importance_chart(shares: Mapping[str, float]) -> Markup | None:
    """How much of the scores each setting explains; None if there were too few trials."""
    return (
        bar_chart(list(shares.items()), label="share of the scores that a setting explains")
        if shares
        else None
    )


def setting_chart(records: Sequence[TrialRecord], key: str, best: Mapping[str, Value]) -> Markup:
    """Scores against one setting: numbers on a line or on a logarithmic one, words side by side."""
    whole = [record for record in records if record.is_whole and key in record.settings]
    values = [record.settings[key] for record in whole]
    place, marks = _places(values)
    points = [(place(value), record.score) for value, record in zip(values, whole, strict=True)]
    low, high = min(y for _, y in points), max(y for _, y in points)
    y_ticks = ticks(max(0.0, math.floor(20 * low) / 20), max(high, low + 0.01))
    up = Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = axes(marks, [(f"{100 * tick:.3g} %", up(tick)) for tick in y_ticks], x_label=key, y_label="score")
    for (x, y), value in zip(points, values, strict=True):
        css = "dot marked" if value == best.get(key) else "dot s0"
        text = f"{_short(value)}: {100 * y:.2f} %"
        circle = tag("circle", tag("title", text), class_=css, cx=f"{x:.1f}", cy=f"{up(y):.1f}", r=4.5)
        parts.append(circle)
    return svg(WIDTH, HEIGHT, f"score against {key}", parts, css="lines")


def by_batch_size(records: Sequence[TrialRecord], noise: Mapping[int, float]) -> list[tuple[str, Markup]]:
    """Noise, steps and rate of the best trial at each batch size; empty if that was not searched over."""
    best: dict[float, TrialRecord] = {}
    for record in records:
        size = record.settings.get(_BATCH)
        if record.is_whole and isinstance(size, int | float):
            known = best.get(float(size))
            best[float(size)] = record if known is None or record.score > known.score else known
    if len(best) < 2:
        return []
    drawn = []
    for title, of in (
        ("noise multiplier", lambda record: noise.get(record.number)),
        ("steps", lambda record: record.settings.get("training.num_steps")),
        ("learning rate", lambda record: record.settings.get("training.learning_rate")),
    ):
        points = [(size, of(best[size])) for size in sorted(best)]
        numbers = [(size, float(value)) for size, value in points if isinstance(value, int | float)]
        if numbers:
            line = [Series(title, numbers)]
            drawn.append(
                (
                    f"Best {title} at each batch size",
                    line_chart(line, x_label="batch size", y_label=title, markers=True),
                )
            )
    return drawn


def _places(values: Sequence[Value]) -> tuple[Callable[[Any], float], list[tuple[str, float]]]:
    """Where each value lies across the picture, and the texts below."""
    numbers = [
        float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    start, end = LEFT + 12, WIDTH - RIGHT - 12
    if len(numbers) < len(values) or len(set(numbers)) < 2:
        words = sorted(set(values), key=str)
        among = Scale(0, max(1, len(words) - 1), start + 20, end - 20)
        marks = [(_short(word)[:14], among(index)) for index, word in enumerate(words)]
        return (lambda value: among(words.index(value))), marks
    low, high = min(numbers), max(numbers)
    if low > 0 and high / low > 8:
        across = Scale(math.log(low), math.log(high), start, end)
        rounded = [float(f"{low * (high / low) ** (index / 4):.2g}") for index in range(5)]
        return (lambda value: across(math.log(value))), [(f"{n:g}", across(math.log(n))) for n in rounded]
    across = Scale(low, high, start, end)
    rounded = [float(f"{low + (high - low) * index / 4:.3g}") for index in range(5)]
    return (lambda value: across(float(value))), [(f"{n:g}", across(n)) for n in rounded]


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
