"""One unit moves the sum by at most the stated sensitivity, whatever its rows contain."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from comparison import UNEVEN, Forced, classifier
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from oracles import distance, norm_of, reference
from sfumato.errors import ConfigError
from sfumato.gradients import (
    AutomaticClipping,
    Clipping,
    FlatClipping,
    PerLayerClipping,
    clip_factors,
    clipped_sum,
)
from sfumato.gradients.piece import squared_norms
from sfumato.layers import Scale, WSConv2d

CLIPPINGS: dict[str, Clipping] = {
    "flat": FlatClipping(),
    "automatic": AutomaticClipping(),
    "automatic, stable": AutomaticClipping(stability=1.0),
    "per layer": PerLayerClipping(),
    "per layer, weighted": PerLayerClipping(lambda layer: {"a": 3.0, "b.c": 0.5}.get(layer, 1.0)),
}
NAMES = ("a.weight", "a.bias", "b.c.weight", "bare")
values = st.lists(st.floats(0, 1e12), min_size=len(NAMES), max_size=len(NAMES))


def contribution(clipping: Clipping, norms: list[float], clip_norm: float) -> float:
    """The norm of what one unit adds to the sum, given the norms of its gradient per parameter."""
    squares = {
        name: torch.tensor([value], dtype=torch.float64).square()
        for name, value in zip(NAMES, norms, strict=True)
    }
    factors = clipping.factors(squares, clip_norm, margin=0.0)
    return float(sum(factors[name].square() * squares[name] for name in NAMES).sqrt())


@pytest.mark.parametrize("name", CLIPPINGS)
@settings(max_examples=150, deadline=None)
@given(norms=values, clip_norm=st.floats(1e-3, 1e3))
def test_one_unit_adds_at_most_the_stated_sensitivity(name, norms, clip_norm):
    clipping = CLIPPINGS[name]
    allowed = clipping.sensitivity(clip_norm)
    assert contribution(clipping, norms, clip_norm) <= allowed * (1 + 1e-12)


class Unclipped:
    """A wrong one, as a control: states a sensitivity and does not keep it."""

    def sensitivity(self, clip_norm: float) -> float:
        return clip_norm

    def factors(self, squared_norms, clip_norm, margin):
        return {name: torch.ones_like(value) for name, value in squared_norms.items()}


class EachParameterToTheWholeBound(Unclipped):
    """Another: forgets to divide the bound among the parameters."""

    def factors(self, squared_norms, clip_norm, margin):
        return {name: clip_factors(value.sqrt(), clip_norm) for name, value in squared_norms.items()}


@pytest.mark.parametrize(
    "wrong", [Unclipped(), EachParameterToTheWholeBound()], ids=["unclipped", "undivided"]
)
def test_a_clip_function_that_breaks_its_bound_is_noticed(wrong):
    assert contribution(wrong, [5.0, 5.0, 5.0, 5.0], 1.0) > 1.5


@pytest.mark.parametrize("name", ["flat", "per layer", "automatic"])
def test_the_bound_is_reached(name):
    """A clip that is stricter than it says would waste accuracy."""
    assert contribution(CLIPPINGS[name], [1e6] * len(NAMES), 2.0) > 2.0 * (1 - 1e-6)


def test_flat_clipping_leaves_small_gradients_alone():
    assert contribution(FlatClipping(), [0.1, 0.2, 0.2, 0.0], 1.0) == pytest.approx(0.3)


@settings(max_examples=200, deadline=None)
@given(
    norms=st.lists(st.floats(0) | st.just(float("nan")), min_size=1, max_size=5),
    clip_norm=st.floats(1e-6, 1e6),
)
def test_factors_are_between_zero_and_one_and_zero_for_what_is_not_finite(norms, clip_norm):
    norms = torch.tensor(norms, dtype=torch.float64)
    factors = clip_factors(norms, clip_norm, margin=1e-6)
    assert ((factors >= 0) & (factors <= 1)).all()
    assert (factors[~norms.isfinite()] == 0).all()
    kept = norms.isfinite() & (norms > clip_norm)
    assert (factors[kept] * norms[kept] <= clip_norm).all()


def net(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(7)
    body, shape = {
        "convolution": (nn.Conv2d(8, 8, 3, padding=1), (8, 3, 3)),
        "standardised": (WSConv2d(8, 8, 3), (8, 3, 3)),
        "many channels": (nn.Conv2d(20, 8, 3, padding=1), (20, 3, 3)),
        "many channels, standardised": (WSConv2d(20, 8, 3), (20, 3, 3)),
        "wide linear": (nn.Linear(40, 3000), (40,)),
        "positions": (nn.Linear(16, 16), (4, 16)),
    }[name]
    inputs = torch.randn(6, *shape)
    return classifier(body, nn.Tanh(), inputs=inputs), inputs


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e-3])
@pytest.mark.parametrize("strategy", ["columns", "library", "direct", "gram", "product", "outer"])
@pytest.mark.parametrize(
    "name",
    [
        "convolution",
        "standardised",
        "many channels",
        "many channels, standardised",
        "wide linear",
        "positions",
    ],
)
def test_one_units_contribution_is_within_the_bound_in_float64(name, strategy, scale):
    model, inputs = net(name)
    for row in range(len(inputs)):
        one, target = scale * inputs[row : row + 1], torch.tensor([row % 3])
        clip_norm = float(reference(model, one, target).norms) / 3
        total = clipped_sum(model, one, target, clip_norm=clip_norm, choices=Forced(wanted=strategy))
        assert norm_of(total.gradients) <= clip_norm  # no tolerance: the factor is rounded down
        assert norm_of(total.gradients) > clip_norm * (1 - 1e-5)


class Centred(nn.Module):
    """Takes away what all positions have in common, and with it nearly all of the gradient behind it."""

    def forward(self, x):
        return x - x.mean(dim=1, keepdim=True)


CANCELLING = {
    "positions": ((nn.Linear(16, 16, bias=False), Centred()), (4, 16), ["product", "gram"]),
    "convolution": (
        (nn.Conv2d(16, 16, 3), nn.InstanceNorm2d(16, eps=1.0)),
        (16, 5, 5),
        ["columns", "library", "direct", "gram"],
    ),
    "standardised": (
        (WSConv2d(16, 16, 3, padding=0), nn.InstanceNorm2d(16, eps=1.0)),
        (16, 5, 5),
        ["columns", "library", "direct", "gram"],
    ),
}


@pytest.mark.parametrize("offset", [10.0, 100.0, 1e3, 1e4])
@pytest.mark.parametrize(
    ("name", "strategy"), [(name, way) for name, (_, _, ways) in CANCELLING.items() for way in ways]
)
def test_the_bound_holds_where_large_terms_cancel(name, strategy, offset):
    """Very bright images: the norm is a small difference of large numbers; it may not come out too small."""
    torch.manual_seed(0)
    body, shape, _ = CANCELLING[name]
    inputs = torch.randn(10, *shape) + offset
    model = classifier(*body, nn.Tanh(), inputs=inputs)
    for row in range(len(inputs)):
        one, target = inputs[row : row + 1], torch.tensor([row % 3])
        clip_norm = float(reference(model, one, target).norms) / 3
        total = clipped_sum(model, one, target, clip_norm=clip_norm, choices=Forced(wanted=strategy))
        assert norm_of(total.gradients) <= clip_norm


@pytest.mark.parametrize("step", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("strategy", ["product", "columns", "library", "direct", "gram"])
@pytest.mark.parametrize("layer", ["linear", "1x1", "3x3", "standardised"])
def test_the_bound_holds_for_images_made_to_cancel(layer, strategy, step):
    """Two grey levels over many channels: rounding adds up instead of averaging out."""
    torch.manual_seed(0)
    wide = 512
    body, shape = {
        "linear": ((nn.Linear(wide, 16, bias=False), Centred()), (2, wide)),
        "1x1": ((nn.Conv2d(wide, 16, 1), nn.InstanceNorm2d(16, eps=1.0)), (wide, 1, 2)),
        "3x3": ((nn.Conv2d(wide, 16, 3, padding=1), nn.InstanceNorm2d(16, eps=1.0)), (wide, 2, 2)),
        "standardised": ((WSConv2d(wide, 16, 1), nn.InstanceNorm2d(16, eps=1.0)), (wide, 1, 2)),
    }[layer]
    inputs = torch.full((1, *shape), 0.7)
    if layer == "standardised":  # which takes away what all channels have in common
        inputs = inputs + torch.rand(wide, 1, 1)
    inputs.select(1 if layer == "linear" else -1, 1).mul_(1 + step)
    model = classifier(*body, nn.Tanh(), inputs=inputs)
    model[-1].requires_grad_(False)
    for bright in (1.0, 30.0):
        one, target = bright * inputs, torch.tensor([1])
        clip_norm = float(reference(model.double(), one.double(), target).norms) / 3
        total = clipped_sum(model.float(), one, target, clip_norm=clip_norm, choices=Forced(wanted=strategy))
        assert norm_of(total.gradients) <= clip_norm * (1 + 2e-4)


@pytest.mark.parametrize("strategy", ["product", "outer", "gram"])
def test_the_bound_holds_where_squares_would_vanish_or_overflow(strategy):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3))
    model[2].requires_grad_(False).weight.data.mul_(1e-23)
    model[0].weight.data.zero_()
    inputs = torch.full((1, 8), 1e18)
    total = clipped_sum(model, inputs, torch.tensor([0]), clip_norm=1e-6, choices=Forced(wanted=strategy))
    assert norm_of(total.gradients) <= 1e-6
    assert norm_of(total.gradients) > 0.99e-6  # control: without a clip it would be longer


@pytest.mark.parametrize("body", ["bias", "standardised", "norm", "scale"])
def test_the_bound_holds_under_half_precision(body):
    torch.manual_seed(4)
    layers = {
        "bias": (nn.Conv2d(3, 24, 3),),
        "standardised": (WSConv2d(3, 24, 3),),
        "norm": (nn.Conv2d(3, 24, 3), nn.GroupNorm(4, 24)),
        "scale": (nn.Conv2d(3, 24, 3), Scale()),
    }[body]
    inputs = torch.randn(12, 3, 6, 6)
    model = classifier(*layers, nn.Tanh(), inputs=inputs)
    for name, value in model.named_parameters():
        value.requires_grad_(value.ndim < 2 and not name.startswith("3"))
    for row in range(len(inputs)):
        one, target = inputs[row : row + 1], torch.tensor([row % 3])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            free = clipped_sum(model, one, target, clip_norm=1e9)
            clip_norm = norm_of(free.gradients) / 3
            total = clipped_sum(model, one, target, clip_norm=clip_norm)
        assert 0.99 * clip_norm < norm_of(total.gradients) <= clip_norm


@pytest.mark.parametrize("stability", [0.0, -0.3, float("nan")])
def test_automatic_clipping_needs_a_positive_stability(stability):
    with pytest.raises(ConfigError, match="bad-stability"):
        AutomaticClipping(stability=stability)


@pytest.mark.parametrize("unit_index", [None, UNEVEN], ids=["rows", "uneven units"])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_removing_a_unit_moves_the_sum_by_at_most_the_sensitivity(clipping, unit_index):
    torch.manual_seed(8)
    inputs, targets = 5 * torch.randn(8, 8, 3, 3), torch.arange(8) % 3
    model = classifier(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), inputs=inputs).double()
    inputs = inputs.double()
    unit_index = torch.arange(8) if unit_index is None else unit_index
    settings = {"clip_norm": 0.01, "clipping": CLIPPINGS[clipping]}
    whole = clipped_sum(model, inputs, targets, unit_index=unit_index, **settings)
    last = int(unit_index.max())
    keep = unit_index != last
    rest = clipped_sum(model, inputs[keep], targets[keep], unit_index=unit_index[keep], **settings)
    moved = norm_of({name: value - rest.gradients[name] for name, value in whole.gradients.items()})
    assert 0 < moved <= whole.sensitivity * (1 + 1e-9)


@pytest.mark.parametrize("poison", [float("inf"), float("nan"), 1e38])
@pytest.mark.parametrize("unit_index", [None, UNEVEN], ids=["rows", "uneven units"])
@pytest.mark.parametrize("strategy", ["columns", "library", "direct", "gram", "product", "outer"])
@pytest.mark.parametrize("layer", ["convolution", "standardised", "positions", "torch.func"])
def test_a_unit_whose_gradient_is_not_finite_counts_as_zero(layer, strategy, unit_index, poison):
    torch.manual_seed(9)
    shape = (8, 4, 16) if layer == "positions" else (8, 18, 3, 3)
    inputs, targets = torch.randn(shape), torch.arange(8) % 3
    body = {
        "convolution": nn.Conv2d(18, 8, 3, padding=1),
        "standardised": WSConv2d(18, 8, 3),
        "positions": nn.Linear(16, 16),
        "torch.func": nn.ConvTranspose2d(18, 8, 3),
    }[layer]
    model = classifier(body, nn.Softsign(), inputs=inputs)
    index = torch.arange(8) if unit_index is None else unit_index
    bad = int(index[0])
    clean = clipped_sum(
        model, inputs[index != bad], targets[index != bad], clip_norm=0.1,
        unit_index=torch.unique(index[index != bad], return_inverse=True)[1], choices=Forced(wanted=strategy),
    )  # fmt: skip
    inputs[0].view(-1)[0] = poison  # one pixel of one row: the unit's other rows are good
    total = clipped_sum(
        model, inputs, targets, clip_norm=0.1, unit_index=unit_index, choices=Forced(wanted=strategy)
    )
    assert all(value.isfinite().all() for value in total.gradients.values())
    if poison != 1e38 or not total.norms[bad].isfinite():
        assert distance(total.gradients, clean.gradients) < 1e-6
    else:
        moved = {name: value - clean.gradients[name] for name, value in total.gradients.items()}
        assert norm_of(moved) <= 0.1 * (1 + 1e-5)


def test_squared_norms_are_accumulated_in_float64():
    torch.manual_seed(10)
    gradients = torch.randn(1, 2_700_000) * 1e-3 + 1e-2
    exact = float(gradients.double().square().sum())
    assert float(squared_norms(gradients)) == pytest.approx(exact, rel=1e-7)
    one_accumulator = np.add.accumulate(gradients.square().numpy().ravel())[-1]  # control: float32, in order
    assert float(one_accumulator) != pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, float("nan")])
def test_a_bound_that_bounds_nothing_is_refused(clip_norm):
    model, inputs = nn.Linear(4, 3), torch.randn(2, 4)
    with pytest.raises(ConfigError) as caught:
        clipped_sum(model, inputs, torch.tensor([0, 1]), clip_norm=clip_norm)
    assert caught.value.code == "bad-clip-norm"


def test_sums_of_disjoint_units_add_up():
    torch.manual_seed(11)
    model, inputs, targets = nn.Linear(4, 3).double(), torch.randn(6, 4).double(), torch.arange(6) % 3
    whole = clipped_sum(model, inputs, targets, clip_norm=0.3)
    parts = clipped_sum(model, inputs[:2], targets[:2], clip_norm=0.3) + clipped_sum(
        model, inputs[2:], targets[2:], clip_norm=0.3
    )
    assert distance(parts.gradients, whole.gradients) < 1e-12
    torch.testing.assert_close(parts.norms, whole.norms)
    assert parts.sensitivity == whole.sensitivity == 0.3


def test_an_empty_batch_is_a_sum_of_nothing_with_the_same_sensitivity():
    total = clipped_sum(nn.Linear(4, 3), torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), clip_norm=0.5)
    assert norm_of(total.gradients) == 0
    assert total.sensitivity == 0.5
    assert len(total.norms) == len(total.losses) == 0
