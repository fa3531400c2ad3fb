"""Invariant 1: one unit moves the sum by at most C, over random models, batches and neighbours.

Each planted fault is a sum that looks right on ordinary batches; the same property catches every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.gradients import clipped_sum
from sfumato.layers import WSConv2d

Sum = Callable[..., dict[str, Tensor]]
EXTREMES = (0.0, 1.0, -3.0, 1e4, 1e12, 1e30, math.inf, -math.inf, math.nan)


@dataclass(frozen=True)
class Case:
    """A model and a batch; the neighbour lacks the last unit, or has other rows for it."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    unit_index: Tensor
    clip_norm: float
    replacement: Tensor  # other inputs for the last unit's rows

    def neighbours(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        keep = self.unit_index < self.unit_index.max()
        return (
            (self.inputs, self.targets, self.unit_index),
            (self.inputs[keep], self.targets[keep], self.unit_index[keep]),
        )

    def replaced(self) -> tuple[Tensor, ...]:
        inputs = self.inputs.clone()
        inputs[self.unit_index == self.unit_index.max()] = self.replacement
        return inputs, self.targets, self.unit_index


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small nets gain nothing from a second thread, and wait for it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(kind: str, dtype: torch.dtype) -> nn.Module:
    parts: dict[str, list[nn.Module]] = {
        "linear": [nn.Flatten(), nn.Linear(2 * 36, 5), nn.Tanh(), nn.Linear(5, 3)],
        "convolution": [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)],
        "strided": [
            nn.Conv2d(2, 6, 3, stride=2, groups=2, bias=False),
            nn.SELU(),
            nn.Flatten(),
            nn.Linear(24, 3),
        ],
        "group norm": [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Mish(), nn.Flatten(), nn.Linear(64, 3)],
        "standardised": [
            WSConv2d(2, 4, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 3),
        ],
        "layer norm": [nn.Flatten(), nn.LayerNorm(72), nn.Linear(72, 3)],
    }
    return nn.Sequential(*parts[kind]).to(dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    kind = draw(
        st.sampled_from(["linear", "convolution", "strided", "group norm", "standardised", "layer norm"])
    )
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    rows = sum(sizes)
    scale = draw(st.sampled_from([0.1, 1.0, 30.0]))
    inputs = scale * torch.randn(rows, 2, 6, 6, dtype=dtype)
    replacement = scale * torch.randn(sizes[-1], 2, 6, 6, dtype=dtype)
    extreme = draw(st.sampled_from(EXTREMES))
    if draw(st.booleans()):  # one pixel, or the whole last unit, is extreme
        inputs[-1, 0, 0, 0] = extreme
    elif draw(st.booleans()):
        inputs[rows - sizes[-1] :] = extreme
    return Case(
        model=network(kind, dtype),
        inputs=inputs,
        targets=torch.randint(0, 3, (rows,)),
        unit_index=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        clip_norm=draw(st.sampled_from([1e-3, 0.1, 1.0, 50.0])),
        replacement=replacement,
    )


def ours(case: Case, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    inputs, targets, unit_index = batch
    return clipped_sum(
        case.model, inputs, targets, clip_norm=case.clip_norm, unit_index=unit_index, microbatch_size=6
    ).gradients


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    squares = [(first[name].double() - second[name].double()).square().sum().item() for name in first]
    return math.sqrt(sum(squares))


def bounded(case: Case, sum_of: Sum) -> bool:
    """Whether removing the last unit moves the sum by at most C, and replacing it by at most 2 C."""
    whole, without = case.neighbours()
    # both sums are rounded to the model's precision, which can add a little to their distance
    size = max(case.clip_norm, len(case.inputs) * case.clip_norm)
    rounding = 4 * torch.finfo(case.inputs.dtype).eps * size
    removed = distance(sum_of(case, whole), sum_of(case, without))
    replaced = distance(sum_of(case, whole), sum_of(case, case.replaced()))
    return removed <= case.clip_norm + rounding and replaced <= 2 * case.clip_norm + 2 * rounding


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_one_unit_moves_the_sum_by_at_most_the_clip_norm(case):
    assert bounded(case, ours)


@settings(max_examples=30, deadline=None)
@given(case=cases(), microbatch_size=st.integers(1, 9))
def test_the_bound_does_not_depend_on_how_the_batch_is_cut(case, microbatch_size):
    def cut(case: Case, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        inputs, targets, units = batch
        return clipped_sum(
            case.model,
            inputs,
            targets,
            clip_norm=case.clip_norm,
            unit_index=units,
            microbatch_size=microbatch_size,
        ).gradients

    assert bounded(case, cut)


def rowwise(case: Case, batch: tuple[Tensor, ...]) -> list[tuple[int, dict[str, Tensor]]]:
    """(unit, gradient) of every row by plain autograd."""
    inputs, targets, units = batch
    names = dict(case.model.named_parameters())
    found = []
    for row in range(len(inputs)):
        loss = cross_entropy(case.model(inputs[row : row + 1]), targets[row : row + 1])
        gradient = torch.autograd.grad(loss, list(names.values()), allow_unused=True)
        filled = [
            torch.zeros_like(names[name]) if g is None else g for name, g in zip(names, gradient, strict=True)
        ]
        found.append((int(units[row]), dict(zip(names, filled, strict=True))))
    return found


def unit_means(case: Case, batch: tuple[Tensor, ...]) -> list[dict[str, Tensor]]:
    rows = rowwise(case, batch)
    units = sorted({unit for unit, _ in rows})
    mine = {unit: [gradient for owner, gradient in rows if owner == unit] for unit in units}
    return [{name: torch.stack([g[name] for g in mine[u]]).mean(0) for name in mine[u][0]} for u in units]


def norm_of(gradient: dict[str, Tensor], *, leave_out: str | None = None) -> float:
    return math.sqrt(
        sum(value.double().square().sum().item() for name, value in gradient.items() if name != leave_out)
    )


def scaled_sum(case: Case, parts: list[dict[str, Tensor]], factors: list[float]) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(value) for name, value in case.model.named_parameters()}
    for part, factor in zip(parts, factors, strict=True):
        for name in total:
            total[name] = total[name] + factor * part[name]
    return total


def factor(norm: float, clip_norm: float) -> float:
    return min(1.0, clip_norm / norm) if math.isfinite(norm) and norm > 0 else 0.0


def by_hand(case: Case, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The sum as it should be, one row at a time."""
    parts = unit_means(case, batch)
    factors = [factor(norm_of(part), case.clip_norm) for part in parts]
    finite = [part for part, value in zip(parts, factors, strict=True) if value > 0]
    return scaled_sum(case, finite, [value for value in factors if value > 0])


def not_clipped(case: Case, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    parts = unit_means(case, batch)
    return scaled_sum(case, parts, [1.0] * len(parts))


def clipped_after_averaging(case: Case, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The mean over all units is clipped, then scaled up: nothing bounds a single unit."""
    parts = unit_means(case, batch)
    whole = scaled_sum(case, parts, [1.0 / max(1, len(parts))] * len(parts))
    return {
        name: len(parts) * factor(norm_of(whole), case.clip_norm) * value for name, value in whole.items()
    }


def view_wise(case: Case, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Every row is clipped on its own and added: a unit with many rows moves the sum many times as far."""
    parts = [gradient for _, gradient in rowwise(case, batch)]
    parts = [part for part in parts if math.isfinite(norm_of(part))]
    return scaled_sum(case, parts, [factor(norm_of(part), case.clip_norm) for part in parts])


def parameter_missing(case: Case, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The norm forgets the last layer's weights, the sum does not."""
    last = [name for name, _ in case.model.named_parameters()][-2]
    parts = [part for part in unit_means(case, batch) if math.isfinite(norm_of(part))]
    return scaled_sum(case, parts, [factor(norm_of(part, leave_out=last), case.clip_norm) for part in parts])


def nan_passes(case: Case, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    parts = unit_means(case, batch)
    return scaled_sum(case, parts, [min(1.0, case.clip_norm / max(norm_of(part), 1e-30)) for part in parts])


def per_layer(case: Case, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Each parameter is clipped to the whole C."""
    total = {name: torch.zeros_like(value) for name, value in case.model.named_parameters()}
    for part in unit_means(case, batch):
        if math.isfinite(norm_of(part)):
            for name, value in part.items():
                total[name] = total[name] + factor(norm_of({name: value}), case.clip_norm) * value
    return total


def telling_cases() -> list[Case]:
    """Cases on which the faults show: many views, several layers, an image of nothing but infinities."""
    found = []
    for seed, kind in enumerate(["linear", "convolution", "group norm"]):
        torch.manual_seed(seed)
        inputs = torch.randn(7, 2, 6, 6, dtype=torch.float64) * 5
        spoilt = inputs.clone()
        spoilt[-1, 0, 0, 0] = math.nan
        for batch in (inputs, spoilt):
            for clip_norm in (1e-3, 0.1):
                found.append(
                    Case(
                        model=network(kind, torch.float64),
                        inputs=batch,
                        targets=torch.randint(0, 3, (7,)),
                        unit_index=torch.tensor([0, 1, 2, 3, 3, 3, 3]),
                        clip_norm=clip_norm,
                        replacement=torch.randn(4, 2, 6, 6, dtype=torch.float64) * 5,
                    )
                )
    return found


def test_the_sum_by_hand_and_ours_are_equal_and_both_bounded():
    for case in telling_cases():
        assert bounded(case, ours)
        assert bounded(case, by_hand)
        for batch in case.neighbours():
            assert distance(ours(case, batch), by_hand(case, batch)) <= 1e-6 * case.clip_norm * len(
                case.inputs
            )


@pytest.mark.parametrize(
    "fault", [not_clipped, clipped_after_averaging, view_wise, parameter_missing, nan_passes, per_layer]
)
def test_the_property_catches_a_planted_fault(fault):
    assert not all(bounded(case, fault) for case in telling_cases())
