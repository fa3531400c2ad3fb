"""Which rows of a batch belong to which unit: the views of an image, the images of a patient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sfumato.errors import ConfigError
from sfumato.gradients.shapes import Int64, Shaped


@dataclass(frozen=True)
class Group:
    """Neighbouring units that have the same number of rows, so that they can be one array."""

    rows: slice
    units: slice
    size: int  # rows of each unit

    def split(self, rows: Shaped[Tensor, "rows *rest"]) -> Shaped[Tensor, "group size *rest"]:
        """(all rows, ...) -> (units of this group, rows of each, ...), without a copy."""
        return rows[self.rows].unflatten(0, (-1, self.size))


@dataclass(frozen=True)
class Segments:
    """Rows in an order in which a unit's rows are neighbours, and so are units of equal size."""

    sizes: Int64[Tensor, "units"]  # rows of each unit, ascending
    groups: tuple[Group, ...]

    @property
    def num_units(self) -> int:
        return len(self.sizes)

    def per_row(self, per_unit: Shaped[Tensor, "units *rest"]) -> Shaped[Tensor, "rows *rest"]:
        """One value per unit, repeated for each of its rows."""
        if len(self.groups) == 1 and self.groups[0].size == 1:
            return per_unit
        return per_unit.repeat_interleave(self.sizes, dim=0)

    def sum(self, rows: Shaped[Tensor, "rows *rest"]) -> Shaped[Tensor, "units *rest"]:
        """(rows, ...) -> (units, ...): the sum over each unit's rows."""
        if len(self.groups) == 1 and self.groups[0].size == 1:
            return rows
        return torch.cat([group.split(rows).sum(dim=1) for group in self.groups])

    def repeated(self, times: int) -> Segments:
        """The same units where each row has so many neighbouring entries, such as windows of an image."""
        if times == 1:
            return self
        groups = tuple(
            Group(slice(g.rows.start * times, g.rows.stop * times), g.units, g.size * times)
            for g in self.groups
        )
        return Segments(self.sizes * times, groups)

    def each(self) -> Iterator[slice]:
        """The rows of each unit, in order."""
        return (
            slice(start, start + group.size)
            for group in self.groups
            for start in range(group.rows.start, group.rows.stop, group.size)
        )

    def parts(self, most_units: int) -> Iterator[slice]:
        """The rows of neighbouring units, at most so many units in each part."""
        ends = self.sizes.cumsum(0)[most_units - 1 :: most_units].tolist()
        rows = int(self.sizes.sum())
        cuts = [0, *ends] if ends and ends[-1] == rows else [0, *ends, rows]
        return (slice(*bounds) for bounds in pairwise(cuts))


def singletons(num_rows: int, device: torch.device) -> Segments:
    """Every row a unit of its own."""
    sizes = torch.ones(num_rows, dtype=torch.int64, device=device)
    return Segments(sizes, (Group(slice(0, num_rows), slice(0, num_rows), 1),) if num_rows else ())


def segments_of(sizes: Int64[Tensor, "units"]) -> Segments:
    """Segments for units of these sizes, which must be ascending and positive."""
    groups, row, unit = [], 0, 0
    values, counts = torch.unique_consecutive(sizes, return_counts=True)
    for size, count in zip(values.tolist(), counts.tolist(), strict=True):
        groups.append(Group(slice(row, row + size * count), slice(unit, unit + count), size))
        row, unit = row + size * count, unit + count
    return Segments(sizes, tuple(groups))


def check_unit_index(unit_index: object, num_rows: int) -> None:
    """Refuse an index that does not give each row a unit, or a unit without rows."""
    if (
        not isinstance(unit_index, Tensor)
        or unit_index.shape != (num_rows,)
        or unit_index.dtype != torch.int64
    ):
        given = (
            f"has shape {tuple(unit_index.shape)} and dtype {unit_index.dtype}"
            if isinstance(unit_index, Tensor)
            else "is no tensor"
        )
        raise ConfigError(
            "bad-unit-index",
            f"unit_index {given}.",
            why=f"It must name the unit of each of the {num_rows} rows.",
            fix=f"Pass an int64 tensor of shape ({num_rows},) with values 0, 1, 2, …",
        )
    if num_rows and (unit_index.min() < 0 or (torch.bincount(unit_index) == 0).any()):
        raise ConfigError(
            "bad-unit-index",
            "unit_index has negative values or skips a unit.",
            why="A unit without rows has no gradient.",
            fix="Number the units of this call 0, 1, 2, … without gaps.",
        )


def microbatches(
    unit_index: Int64[Tensor, "rows"], max_rows: int
) -> list[tuple[Int64[Tensor, "some"] | slice, Int64[Tensor, "chosen"], Segments]]:
    """Rows in passes of at most ``max_rows``, as (rows, units, segments); no unit is ever split.

    A unit larger than ``max_rows`` has a pass to itself.
    """
    sizes = torch.bincount(unit_index)
    unit_order = torch.argsort(sizes, stable=True)
    rank = torch.empty_like(unit_order)
    rank[unit_order] = torch.arange(len(unit_order), device=unit_order.device)
    row_order = torch.argsort(rank[unit_index], stable=True)
    passes, first_unit, first_row, rows = [], 0, 0, 0
    ordered = sizes[unit_order].tolist()
    for unit, size in enumerate([*ordered, None]):
        if size is None or (rows and rows + size > max_rows):
            units = unit_order[first_unit:unit]
            chosen = row_order[first_row : first_row + rows]
            passes.append((_as_slice(chosen), units, segments_of(sizes[units])))
            first_unit, first_row, rows = unit, first_row + rows, 0
        rows += size or 0
    return passes


def _as_slice(rows: Tensor) -> Tensor | slice:
    """Neighbouring rows as a slice, which copies nothing and keeps the memory format."""
    first = int(rows[0])
    neighbours = torch.equal(rows, torch.arange(first, first + len(rows), device=rows.device))
    return slice(first, first + len(rows)) if neighbours else rows
