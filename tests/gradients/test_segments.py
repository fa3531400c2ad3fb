"""Rows find their units, and no unit is ever split between passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sfumato.errors import ConfigError
from sfumato.gradients.segments import check_unit_index, microbatches, segments_of, singletons


@st.composite
def unit_indices(draw: st.DrawFn) -> torch.Tensor:
    """Units of 1 to 5 rows in any order."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    rows = [unit for unit, size in enumerate(sizes) for _ in range(size)]
    return torch.tensor(draw(st.permutations(rows)))


@settings(max_examples=40, deadline=None)
@given(index=unit_indices(), max_rows=st.integers(1, 12))
def test_passes_hold_every_row_once_and_every_unit_whole(index, max_rows):
    every_row, every_unit = torch.arange(len(index)), torch.arange(int(index.max()) + 1)
    passes = [(every_row[r], every_unit[u], segments) for r, u, segments in microbatches(index, max_rows)]
    assert sorted(torch.cat([rows for rows, _, _ in passes]).tolist()) == every_row.tolist()
    assert sorted(torch.cat([units for _, units, _ in passes]).tolist()) == every_unit.tolist()
    for rows, units, segments in passes:
        owner = segments.per_row(units)
        assert torch.equal(index[rows], owner)
        assert torch.equal(torch.bincount(index)[units], segments.sizes)
        assert len(rows) <= max_rows or len(units) == 1


@settings(max_examples=40, deadline=None)
@given(index=unit_indices())
def test_sums_over_segments_equal_sums_by_index(index):
    values = torch.randn(len(index), 3, dtype=torch.float64)
    expected = torch.zeros(int(index.max()) + 1, 3, dtype=torch.float64).index_add(0, index, values)
    found = torch.zeros_like(expected)
    for rows, units, segments in microbatches(index, 6):
        found[units] = segments.sum(values[rows])
    torch.testing.assert_close(found, expected)


def test_units_of_one_row_are_passed_through_without_a_copy():
    segments, rows = singletons(4, torch.device("cpu")), torch.randn(4, 2)
    assert segments.sum(rows) is rows
    assert segments.per_row(rows) is rows
    assert singletons(0, torch.device("cpu")).num_units == 0


def test_groups_gather_units_of_equal_size():
    segments = segments_of(torch.tensor([1, 1, 3, 3, 4]))
    assert [(group.size, group.units.stop - group.units.start) for group in segments.groups] == [
        (1, 2),
        (3, 2),
        (4, 1),
    ]
    assert segments.groups[1].split(torch.arange(12)).tolist() == [[2, 3, 4], [5, 6, 7]]


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([0, 1]),
        torch.tensor([0.0, 1.0, 2.0]),
        torch.tensor([[0], [1], [2]]),
        torch.tensor([0, 2, 2]),
        torch.tensor([-1, 0, 1]),
        torch.tensor([0, 1, 2], dtype=torch.int32),
    ],
    ids=["short", "float", "column", "skips a unit", "negative", "int32"],
)
def test_an_index_that_leaves_rows_or_units_out_is_refused(index):
    with pytest.raises(ConfigError) as caught:
        check_unit_index(index, 3)
    assert caught.value.code == "bad-unit-index"
    check_unit_index(torch.tensor([1, 0, 1]), 3)  # control
