"""Under bfloat16 autocast no unit moves the sum past the bound, whatever its rows contain."""

from __future__ import annotations

import torch
from comparison import Forced, strategies_offered
from torch import nn
from torch.nn.functional import cross_entropy

from oracles import distance, norm_of, reference
from sfumato.gradients import Choices, clipped_sum
from sfumato.layers import WSConv2d

CLIP = 0.3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        WSConv2d(2, 16, 3),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.GroupNorm(1, 16),
        nn.Flatten(),
        nn.Linear(256, 3),
    ).to(memory_format=torch.channels_last)


def odd_rows(count: int) -> torch.Tensor:
    """Rows of sizes from tiny to huge, flat ones and single points."""
    torch.manual_seed(1)
    rows = torch.randn(count, 2, 8, 8) * torch.logspace(-4, 4, count)[:, None, None, None]
    rows[1] = 1.0
    rows[2], rows[2, 0, 3, 3] = 0.0, 1e4
    return rows.to(memory_format=torch.channels_last)


def test_one_unit_moves_the_sum_by_at_most_the_bound_by_every_strategy():
    model, rows, targets = net(), odd_rows(12), torch.arange(12) % 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name in strategies_offered(model, rows, targets):
            options = {"clip_norm": CLIP, "choices": Forced(wanted=name)}
            whole = clipped_sum(model, rows, targets, **options).gradients
            for gone in (2, 11):
                keep = torch.arange(12) != gone
                one = clipped_sum(model, rows[~keep], targets[~keep], **options).gradients
                assert norm_of(one) <= CLIP
                rest = clipped_sum(model, rows[keep], targets[keep], **options).gradients
                moved = norm_of({key: value - rest[key] for key, value in whole.items()})
                assert moved <= CLIP * (1 + 12 * 12 * 2.0**-24), (name, gone)


def test_a_sum_of_rounded_gradients_scaled_in_bfloat16_would_exceed_the_bound():
    """Control: what the factors would do in the operands' own precision."""
    torch.manual_seed(0)
    gradient = torch.randn(4096).bfloat16()
    gradient = gradient[gradient.abs() > 0.5]
    lengths = torch.linspace(0.5, 3.0, 200, dtype=torch.float64)
    factors = lengths / gradient.double().norm()
    exact = max((gradient.float() * f).norm().item() / c for f, c in zip(factors, lengths, strict=True))
    rounded = max(
        (gradient * f.bfloat16()).double().norm().item() / c for f, c in zip(factors, lengths, strict=True)
    )
    assert exact < 1 + 1e-6
    assert rounded > 1 + 1e-3


def test_a_gradient_along_its_filter_is_not_lost_to_a_rounded_output():
    """Weight standardisation takes <G, u> off; read from a rounded output it would take off too much."""
    for seed in range(4):
        torch.manual_seed(seed)
        layer = WSConv2d(64, 3, 1)
        layer.weight.data = layer.weight.data[:1].repeat(3, 1, 1, 1) * 3e-2  # which all filters lie along
        layer.gain.requires_grad_(False)
        model = nn.Sequential(layer, nn.Flatten())
        direction = layer.standardised_weight().detach()[0, :, 0, 0]
        rows = (30 + seed) * (direction + 0.002 * torch.randn(64))[None, :, None, None]
        targets = torch.tensor([0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for name in strategies_offered(model, rows, targets):
                total = clipped_sum(model, rows, targets, clip_norm=1e-3, choices=Forced(wanted=name))
                assert norm_of(total.gradients) <= 1e-3, name


def test_the_sum_in_bfloat16_is_near_the_one_in_float32():
    model = net()
    torch.manual_seed(2)
    rows, targets = torch.randn(8, 2, 8, 8).to(memory_format=torch.channels_last), torch.arange(8) % 3
    expected = reference(model, rows.contiguous(), targets, loss=cross_entropy).clipped_sum(CLIP)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = clipped_sum(model, rows, targets, clip_norm=CLIP, choices=Choices())
    assert 1e-5 < distance(total.gradients, expected) < 0.05
