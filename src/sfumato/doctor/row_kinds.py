"""Rows of many kinds, since a model may mix rows for some values only: ``if (x < 0).any()``.

Each kind is met in a batch of its own, in one with a single row of another kind, alone among plain rows, and
among rows of other kinds: a condition on ``any`` or ``all`` rows of such a kind changes between two of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Kind = Callable[[Tensor], Tensor]  # rows of noise around zero, (rows, ...) -> rows of the kind


def _constant(value: float) -> Kind:
    return lambda noise: torch.full_like(noise, value)


def _levels(noise: Tensor) -> Tensor:
    return (noise.abs() * 80).clamp(max=255).round()


def _one_hot(noise: Tensor) -> Tensor:
    flat = torch.zeros_like(noise).flatten(1)
    return flat.scatter(1, noise.flatten(1).argmax(1, keepdim=True), 1.0).view_as(noise)


def _zero_tail(noise: Tensor) -> Tensor:
    """Filled to another length in each row."""
    rows = noise.flatten(1).clone()
    for place, row in enumerate(rows):
        row[len(row) * (place % 5 + 1) // 7 :] = 0
    return rows.view_as(noise)


FLOATING: dict[str, Kind] = {
    "zero": _constant(0.0),
    "one": _constant(1.0),
    "constant": _constant(0.5),
    "constant and negative": _constant(-1.0),
    "positive": lambda noise: noise.abs() + 0.01,
    "negative": lambda noise: -noise.abs() - 0.01,
    "between 0 and 1": lambda noise: noise.sigmoid(),
    "between -1 and 1": lambda noise: noise.tanh(),
    "whole levels": _levels,
    "whole levels over 255": lambda noise: _levels(noise) / 255,
    "zero but for a single one": _one_hot,
    "tiny": lambda noise: 1e-3 * noise,
    "huge": lambda noise: 1e6 * noise,
    "equal": lambda noise: noise[:1].expand_as(noise).clone(),
    "filled to different lengths": _zero_tail,
    "infinite": _constant(math.inf),
    "not a number": _constant(math.nan),
}


def rows_of_kinds(pool: Tensor) -> dict[str, Tensor]:
    """Rows of each kind, as many as in ``pool`` and laid out alike; whole numbers stay within its range."""
    if pool.is_floating_point():
        noise = torch.randn(pool.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        kinds = {name: kind(noise) for name, kind in FLOATING.items()}
    else:
        least, most = int(pool.min()), int(pool.max())
        tails = _zero_tail(pool.double().cpu() - least) + least
        kinds = {name: torch.full(pool.shape, v) for name, v in (("least", least), ("most", most))}
        kinds |= {"equal": pool[:1].expand_as(pool).cpu(), "filled to different lengths": tails}
    return {name: torch.empty_like(pool).copy_(rows) for name, rows in kinds.items()}


def batches(pool: Tensor) -> list[tuple[str, Tensor, Tensor, list[int], list[int]]]:
    """Pairs of batches that have rows in common: (what, first, second, places in the first, in the second).

    The rows at these places are the same, and only what stands beside them differs.
    """
    kinds = rows_of_kinds(pool)
    names, plain, pairs = list(kinds), pool[:3], []
    for number, (name, rows) in enumerate(kinds.items()):
        of_kind = rows[:3]
        others = [kinds[names[(number + step) % len(names)]][step : step + 1] for step in (1, 2, 3)]
        exception = torch.cat([of_kind[:2], pool[3:4]])
        what = f"all rows are {name}, or one is not"
        pairs.append((what, of_kind, exception, [0, 1], [0, 1]))
        pairs.append((what, of_kind, torch.cat([*others, of_kind[2:]]), [2], [3]))
        another = torch.cat([plain[:2], rows[3:4]])
        pairs.append((f"another row is {name}", plain, another, [0, 1], [0, 1]))
    # with whole levels beside them, which are positive and above 1
    for name in ("between 0 and 1", "positive", "tiny", "constant"):
        if name in kinds:
            exception = torch.cat([kinds[name][:2], kinds["whole levels"][3:4]])
            what = f"all rows are {name}, or one is not"
            pairs.append((what, kinds[name][:3], exception, [0, 1], [0, 1]))
    return pairs
