"""Under bfloat16 autocast no unit moves the sum past the bound, whatever its rows contain."""

from __future__ import annotations

import pytest
import torch
from comparison import Forced, strategies_offered
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy

from oracles import distance, norm_of, reference
from sfumato.gradients import Choices, clipped_sum
from sfumato.gradients.kernels import offers_low_filters
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


def broad_net() -> nn.Module:
    """Layers whose filters are larger than their images, so that forming them twice pays."""
    torch.manual_seed(0)
    return nn.Sequential(
        WSConv2d(2, 64, 3, stride=2),
        nn.GroupNorm(4, 64),
        WSConv2d(64, 64, 3, stride=2),
        nn.GroupNorm(4, 64),
        nn.Conv2d(64, 48, 3, padding=1),
        nn.Flatten(),
        nn.Linear(192, 3),
    ).to(memory_format=torch.channels_last)


pairs_only = pytest.mark.skipif(
    not offers_low_filters(*[torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)] * 2),
    reason="no compiled products of pairs of bfloat16 here",
)


@pairs_only
@pytest.mark.parametrize("name", ["direct", "twice"])
def test_units_of_several_rows_move_the_sum_of_broad_layers_by_at_most_the_bound(name):
    model, rows, targets = broad_net(), odd_rows(12), torch.arange(12) % 3
    units = torch.tensor([0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 7, 7])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert name in strategies_offered(model, rows, targets, unit_index=units)
        for unit in range(8):
            mine = units == unit
            one = clipped_sum(
                model, rows[mine], targets[mine], clip_norm=CLIP, choices=Forced(wanted=name),
                unit_index=torch.zeros(int(mine.sum()), dtype=torch.int64),
            )  # fmt: skip
            assert norm_of(one.gradients) <= CLIP
            if float(one.norms) > 1.01 * CLIP:  # the bound is used, too
                assert norm_of(one.gradients) > 0.999 * CLIP


def rounded_oracle(layer: nn.Module, rows: torch.Tensor, targets: torch.Tensor) -> list[dict]:
    """Each row's gradients by autograd in float64, of operands that were rounded as the pass rounds them."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(rows)
        g = torch.autograd.grad(cross_entropy(out.flatten(1), targets, reduction="sum"), out)[0]
    exact = WSConv2d(64, 48, 3, stride=2).double()
    exact.load_state_dict(layer.state_dict())
    found = []
    for row, gradient in zip(rows.bfloat16().double().split(1), g.bfloat16().double().split(1), strict=True):
        values = torch.autograd.grad(exact(row), list(exact.parameters()), gradient)
        found.append(dict(zip(dict(exact.named_parameters()), values, strict=True)))
    return found


@pairs_only
@pytest.mark.parametrize("name", ["direct", "twice"])
def test_a_broad_layer_equals_autograd_of_the_rounded_operands(name):
    """But for the rounding of each unit's gradient."""
    tolerance = 4e-3
    torch.manual_seed(3)
    layer = WSConv2d(64, 48, 3, stride=2).to(memory_format=torch.channels_last)
    rows, targets = torch.randn(9, 64, 4, 4).to(memory_format=torch.channels_last), torch.arange(9)
    each = rounded_oracle(layer, rows, targets)
    norms = torch.tensor([norm_of(one) for one in each], dtype=torch.float64)
    clip = float(norms.median())
    factors = (clip / norms).clamp(max=1)
    expected = {
        f"0.{key}": sum(f * one[key] for f, one in zip(factors, each, strict=True)) for key in each[0]
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = clipped_sum(
            nn.Sequential(layer, nn.Flatten()), rows, targets, clip_norm=clip, choices=Forced(wanted=name)
        )
    torch.testing.assert_close(total.norms, norms, rtol=tolerance, atol=0)
    found = distance(total.gradients, expected)
    assert found < tolerance
    assert found > 3e-5  # control: the comparison sees a rounding of bfloat16


def unrounded_sum(inputs, gradients, factors, geometry, total) -> None:
    """What ``low_filter_sum`` would add if it did not round each unit's gradient: 3 x 3, one pixel around."""
    scaled = gradients.double() * factors.double()[:, None, None, None]
    shape = (total.shape[0], total.shape[3], 3, 3)
    total += torch.nn.grad.conv2d_weight(inputs.double(), shape, scaled, padding=1).movedim(1, -1)


@pairs_only
def test_a_unit_of_many_rows_changes_nothing_in_how_the_others_are_rounded(monkeypatch):
    """Such a unit rules ``twice`` out. Were the others then rounded otherwise, they would move with it."""
    torch.manual_seed(0)
    layer = nn.Conv2d(32, 64, 3, padding=1)
    model = nn.Sequential(layer, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4))
    model = model.to(memory_format=torch.channels_last)
    others = 10 * torch.randn(1, 32, 4, 4).expand(96, -1, -1, -1)

    def summed(num_rows: int, *, by_twice: bool) -> tuple[dict, torch.Tensor]:
        rows = torch.cat([others, torch.zeros(num_rows, 32, 4, 4)]).to(memory_format=torch.channels_last)
        targets = torch.zeros(len(rows), dtype=torch.int64)
        units, choices = torch.arange(96 + num_rows).clamp(max=96), Forced(wanted="twice")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            offered = strategies_offered(layer_alone, rows, targets, unit_index=units)
            total = clipped_sum(model, rows, targets, clip_norm=CLIP, choices=choices, unit_index=units)
        assert offered == (["", "direct", "twice"] if by_twice else [""])  # no way that rounds otherwise
        return total.gradients, total.norms

    layer_alone = nn.Sequential(layer, nn.Flatten())

    def moved() -> float:
        (without, _), (found, norms) = summed(0, by_twice=True), summed(70, by_twice=False)
        difference = {name: found[name] - without[name] for name in found}
        return norm_of(difference) / min(CLIP, float(norms[-1]))

    assert moved() < 1 + 1e-5
    monkeypatch.setattr("sfumato.gradients.twice.low_filter_sum", unrounded_sum)
    assert moved() > 1 + 1e-5  # control: the others would move


def test_a_norm_lets_go_of_its_input_when_the_backward_pass_has_passed_it(monkeypatch):
    """Held until the graph goes, the inputs of all norms would be half of the activations."""
    seen: list[StorageWeakRef] = []
    alive: list[int] = []

    class Watching(nn.ReLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            seen.append(StorageWeakRef(out.untyped_storage()))
            return out

    blocks = [
        nn.Sequential(nn.Conv2d(16, 16, 1), Watching(), nn.GroupNorm(2, 16)).to(
            memory_format=torch.channels_last
        )
        for _ in range(4)
    ]
    model = nn.Sequential(nn.Conv2d(2, 16, 1), *blocks, nn.Flatten(), nn.Linear(1024, 3))
    model = model.to(memory_format=torch.channels_last)
    rows, targets = odd_rows(4), torch.arange(4) % 3
    choices = Choices(deterministic=True)
    clipped_sum(model, rows, targets, clip_norm=CLIP, choices=choices)
    from sfumato.gradients import passes

    plain = passes.Tape.backward

    def counting(tape, total):
        alive.append(sum(not reference.expired() for reference in seen))
        plain(tape, total)
        alive.append(sum(not reference.expired() for reference in seen))

    monkeypatch.setattr(passes.Tape, "backward", counting)
    seen.clear()
    clipped_sum(model, rows, targets, clip_norm=CLIP, choices=choices)
    assert alive == [4, 0]
