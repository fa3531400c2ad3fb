"""Sums are added up in float64: rounding moves no unit past the bound, in any precision of the weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from comparison import Forced
from torch import nn

from oracles import norm_of
from sfumato.gradients import ClippedSum, clipped_sum
from sfumato.gradients.piece import UNITS_PER_CALL, Materialised, weighted_sum
from sfumato.gradients.segments import segments_of
from sfumato.training.head import SoftmaxRegression

CLIP = 1.0


def moved(first: ClippedSum, second: ClippedSum) -> float:
    return norm_of({name: value - second.gradients[name] for name, value in first.gradients.items()})


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype)


@pytest.mark.parametrize("strategy", ["product", "outer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_one_unit_moves_the_sum_by_at_most_the_bound_in_any_precision(dtype, strategy):
    model = model_of(dtype)
    torch.manual_seed(1)
    inputs, targets = 3 * torch.randn(300, 30).to(dtype), torch.zeros(300, dtype=torch.int64)
    options = {"clip_norm": CLIP, "microbatch_size": 20, "choices": Forced(wanted=strategy)}
    whole = clipped_sum(model, inputs, targets, **options)
    for gone in (0, 150, 299):
        keep = torch.arange(300) != gone
        rest = clipped_sum(model, inputs[keep], targets[keep], **options)
        assert 0 < moved(whole, rest) <= CLIP


def test_a_sum_in_the_weights_own_precision_would_lose_units():
    """Control: a thousand equal gradients in bfloat16 end at 256 of them."""
    model, inputs = model_of(torch.bfloat16), torch.ones(1000, 30, dtype=torch.bfloat16)
    targets = torch.zeros(1000, dtype=torch.int64)
    one = clipped_sum(model, inputs[:1], targets[:1], clip_norm=CLIP).gradients
    rounded = {name: torch.zeros_like(value, dtype=torch.bfloat16) for name, value in one.items()}
    for _ in range(1000):
        rounded = {name: value + one[name].to(torch.bfloat16) for name, value in rounded.items()}
    whole = clipped_sum(model, inputs, targets, clip_norm=CLIP, microbatch_size=10).gradients
    exact = {name: 1000 * value for name, value in one.items()}
    assert norm_of({name: value - exact[name] for name, value in whole.items()}) < 0.01 * CLIP
    assert norm_of({name: value - exact[name] for name, value in rounded.items()}) > 100 * CLIP


def test_a_tiny_factor_keeps_its_digits_in_half_precision():
    """|g| is 1e6 times the bound: in float16 such a factor would be subnormal, 1.6 C."""
    model = nn.Linear(4, 3).to(torch.float16)
    model.weight.data.zero_()
    inputs = torch.full((1, 4), 1000.0, dtype=torch.float16)
    for clip_norm in (1e-3, 3.1e-5, 7.7e-6):
        total = clipped_sum(model, inputs, torch.tensor([0]), clip_norm=clip_norm)
        assert 0.99 * clip_norm < norm_of(total.gradients) <= clip_norm


def test_many_microbatches_do_not_round_those_before_them():
    """Adversarial float32: 2**24 in one coordinate, to which 1 cannot be added any more."""
    big = ClippedSum(
        gradients={"w": torch.tensor([2.0**24], dtype=torch.float64)},
        norms=torch.zeros(0),
        losses=torch.zeros(0),
        sensitivity=1.0,
    )
    model = nn.Linear(1, 2, bias=False)
    model.weight.data.zero_()
    one = clipped_sum(model, torch.ones(1, 1) * 100, torch.tensor([0]), clip_norm=2**0.5)
    assert one.gradients["weight"].dtype == torch.float64
    small = ClippedSum(
        gradients={"w": one.gradients["weight"][1]}, norms=big.norms, losses=big.losses, sensitivity=1.0
    )
    total = big
    for _ in range(8):
        total = total + small
    assert total.gradients["w"].item() - 2.0**24 == pytest.approx(8, rel=1e-4)
    assert (torch.tensor([2.0**24]) + torch.tensor([1.0])).item() == 2.0**24  # control: float32


@pytest.mark.parametrize("units", [9, 64, 500])
def test_the_sum_of_a_piece_is_within_its_margin_whatever_the_order(units):
    """All units push the same way, then one is taken out: the worst that rounding can do stays below C."""
    torch.manual_seed(3)
    values = torch.rand(units, 1000) + 0.5
    values /= values.norm(dim=1, keepdim=True)
    exact = values.double().sum(dim=0)
    found = weighted_sum(values, torch.ones(units, dtype=torch.float64))
    margin = 64 * torch.finfo(torch.float32).eps
    assert (found - exact).norm() < margin / 2 * (units / 8) ** 0.5 + margin / 4
    assert Materialised(values).weighted_sum(torch.ones(units)).dtype == torch.float64


def test_the_closed_form_adds_up_in_float64():
    rows = torch.ones(20_000, 4)
    targets = torch.zeros(20_000, dtype=torch.int64)
    sums = SoftmaxRegression(rows, targets, num_classes=2)
    weight, bias = torch.zeros(2, 4), torch.zeros(2)
    total = sums(weight, bias, clip_norm=0.1)
    assert total.gradients["weight"].dtype == torch.float64
    one = sums(weight, bias, clip_norm=0.1, indices=torch.tensor([0]))
    rest = sums(weight, bias, clip_norm=0.1, indices=torch.arange(1, 20_000))
    assert moved(total, rest) <= 0.1
    exact = {name: 20_000 * value for name, value in one.gradients.items()}
    lost = norm_of({name: value - exact[name] for name, value in total.gradients.items()})
    in_float32 = np.add.accumulate(np.full(20_000, one.gradients["weight"][0, 0].item(), dtype=np.float32))[
        -1
    ]
    assert lost < 0.1 * 0.1
    assert abs(in_float32 - exact["weight"][0, 0].item()) > 3 * lost  # control: one coordinate alone


def largest_rounding(layer: nn.Module, shape: tuple[int, ...], strategy: str, units: int) -> float:
    """How far the sum of equal units, which all round alike, lies from the exact one, in clip norms."""
    model, clip_norm, lost = nn.Sequential(layer, nn.Flatten()), 0.3, 0.0
    layer.weight.data.zero_()
    options = {"clip_norm": clip_norm, "microbatch_size": units, "choices": Forced(wanted=strategy)}
    for value in torch.linspace(0.51, 0.999, 6).tolist():
        rows, targets = torch.full((units, *shape), value), torch.zeros(units, dtype=torch.int64)
        whole = clipped_sum(model, rows, targets, **options).gradients["0.weight"]
        one = clipped_sum(model, rows[:1], targets[:1], **options).gradients["0.weight"]
        lost = max(lost, (whole - units * one).norm().item() / clip_norm)
    return lost


@pytest.mark.parametrize(
    ("layer", "shape", "strategy"),
    [
        (nn.Linear(16, 2, bias=False), (16,), "outer"),
        (nn.Linear(16, 2, bias=False), (2, 16), "gram"),
        (nn.Conv2d(8, 2, 1, bias=False), (8, 1, 1), "gram"),
    ],
    ids=["linear outer", "linear gram", "convolution gram"],
)
def test_a_microbatch_of_thousands_is_added_a_few_at_a_time(layer, shape, strategy, monkeypatch):
    units = 4096
    allowed = units * UNITS_PER_CALL * 2.0**-24 / 2
    assert largest_rounding(layer, shape, strategy, units) < allowed
    monkeypatch.setattr("sfumato.gradients.piece.UNITS_PER_CALL", units)  # control: all of them in one call
    assert largest_rounding(layer, shape, strategy, units) > allowed


def test_parts_are_whole_units_in_their_order():
    segments = segments_of(torch.tensor([1, 1, 2, 3, 3]))
    assert list(segments.parts(2)) == [slice(0, 2), slice(2, 7), slice(7, 10)]
    assert list(segments.parts(5)) == [slice(0, 10)]
    assert list(segments.parts(9)) == [slice(0, 10)]
