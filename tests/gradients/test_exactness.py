"""Every rule, by every strategy, equals autograd one example at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from comparison import UNEVEN, Forced, assert_exact, classifier
from torch import nn

from oracles import distance, norm_of, reference
from sfumato.gradients import clipped_sum, kernels
from sfumato.layers import FrozenBatchNorm, Scale, WSConv2d

# Two notes of torch's on its own speed; everything else stays an error.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]
DTYPES = [torch.float32, torch.float64]
UNITS = {"rows": None, "uneven units": UNEVEN}

CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1x1": (lambda: nn.Conv2d(4, 6, 1), (4, 3, 3)),
    "3x3 without bias": (lambda: nn.Conv2d(8, 8, 3, padding=1, bias=False), (8, 3, 3)),
    "padding of one side": (lambda: nn.Conv2d(4, 5, (3, 2), padding=(2, 0)), (4, 5, 4)),
    "valid": (lambda: nn.Conv2d(6, 8, 3, padding="valid"), (6, 4, 5)),
    "same, even kernel": (lambda: nn.Conv2d(8, 9, (2, 4), padding="same"), (8, 3, 4)),
    "same, dilated": (lambda: nn.Conv2d(8, 8, 3, padding="same", dilation=2), (8, 4, 3)),
    "stride 2": (lambda: nn.Conv2d(6, 8, 3, stride=2, padding=1), (6, 6, 5)),
    "stride 3, dilation 2": (
        lambda: nn.Conv2d(3, 8, 3, stride=(3, 2), dilation=(2, 1), padding=2),
        (3, 8, 7),
    ),
    "stride beyond the kernel": (lambda: nn.Conv2d(8, 8, 2, stride=3), (8, 8, 7)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 4)),
    "depthwise, stride 2": (lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=4), (4, 6, 5)),
    "reflected border": (lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="reflect"), (6, 4, 3)),
    "circular border, even kernel": (
        lambda: nn.Conv2d(6, 8, 2, padding="same", padding_mode="circular"),
        (6, 4, 3),
    ),
    "replicated border": (lambda: nn.Conv2d(6, 8, 3, padding=(1, 2), padding_mode="replicate"), (6, 4, 3)),
    "patches": (lambda: nn.Conv2d(3, 8, 4, stride=4), (3, 8, 8)),
    "many channels": (lambda: nn.Conv2d(19, 7, 3, padding=1), (19, 5, 4)),
    "many channels, strided": (lambda: nn.Conv2d(16, 6, (2, 3), stride=(2, 1), padding=(0, 2)), (16, 5, 5)),
    "1d": (lambda: nn.Conv1d(6, 8, 3, padding=1, stride=2), (6, 7)),
    "1d, groups, dilated": (lambda: nn.Conv1d(4, 8, 3, padding="same", dilation=3, groups=2), (4, 7)),
    "3d": (lambda: nn.Conv3d(4, 6, (2, 3, 2), padding=(1, 1, 0)), (4, 2, 3, 3)),
    "3d, stride 2": (lambda: nn.Conv3d(3, 5, 3, stride=(2, 1, 2), padding=1), (3, 4, 3, 4)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_equal_autograd_by_every_strategy(name, units, dtype):
    torch.manual_seed(1)
    make, shape = CONVOLUTIONS[name]
    inputs = torch.randn(8, *shape, dtype=dtype)
    model = classifier(make(), nn.Tanh(), inputs=inputs)
    found = assert_exact(model, inputs, unit_index=UNITS[units])
    assert len(found) > 2  # control: there was more than one way to compare


def test_every_strategy_of_convolutions_is_met():
    met = set()
    for make, shape in CONVOLUTIONS.values():
        inputs = torch.randn(3, *shape)
        met |= assert_exact(classifier(make(), nn.Tanh(), inputs=inputs), inputs)
    offered = kernels.offers_unit_filters(torch.zeros(1, 16, 2, 2), torch.zeros(1, 1, 2, 2))
    compiled = {"direct"} if offered else set()
    assert {"columns", "library", "gram"} | compiled <= met


def ws_conv(*args: int, gain: float = 1.0, bias: float = 0.0, held: bool = False, **options: int) -> WSConv2d:
    layer = WSConv2d(*args, **options)
    with torch.no_grad():
        layer.gain.mul_(gain).mul_(torch.rand_like(layer.gain) + 0.5)
        layer.bias.copy_(torch.randn_like(layer.bias) + bias)
        if held:
            layer.weight[0] *= 1e-4  # so small that eps, not the filter, is what it is divided by
    return layer


STANDARDISED = {
    "plain": (lambda: ws_conv(8, 8, 3), (8, 3, 3)),
    "stride 2, uneven padding": (lambda: ws_conv(8, 8, 3, stride=2), (8, 6, 6)),
    "filter held by eps": (lambda: ws_conv(8, 8, 3, held=True), (8, 3, 3)),
    "tiny gain": (lambda: ws_conv(8, 8, 3, gain=1e-3), (8, 3, 3)),
    "large bias": (lambda: ws_conv(8, 8, 3, bias=30.0), (8, 3, 3)),
    "grouped": (lambda: ws_conv(4, 8, 3, groups=2), (4, 4, 3)),
    "dilated": (lambda: ws_conv(8, 8, 3, dilation=2), (8, 4, 4)),
    "1x1, stride 2": (lambda: ws_conv(12, 12, 1, stride=2), (12, 4, 4)),
    "many channels": (lambda: ws_conv(18, 8, 3), (18, 3, 3)),
    "many channels, stride 2": (lambda: ws_conv(32, 8, 3, stride=2), (32, 5, 5)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", STANDARDISED)
def test_weight_standardised_convolutions_equal_autograd_by_every_strategy(name, units, dtype):
    torch.manual_seed(2)
    make, shape = STANDARDISED[name]
    inputs = torch.randn(8, *shape, dtype=dtype)
    model = classifier(make(), nn.Tanh(), inputs=inputs)
    # With a large bias <G, u> would be a small difference of large numbers: no strategy may lose it.
    found = assert_exact(model, inputs, unit_index=UNITS[units])
    assert ("gram" in found) == (name not in ("large bias", "grouped", "tiny gain")) or units != "rows"


class Middle(nn.Module):
    """One entry of a sequence per row."""

    def forward(self, x):
        return x.mean(dim=1)


def frozen_statistics(channels: int) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(channels)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    layer.weight.data.normal_()
    layer.train = lambda mode=True: layer  # stays in eval mode, as somebody freezing it would have it
    return nn.Module.train(layer, False)


OTHERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 7), (5,)),
    "linear without bias": (lambda: nn.Linear(5, 7, bias=False), (5,)),
    "linear over positions": (lambda: nn.Linear(16, 16), (4, 16)),
    "linear over a map": (lambda: nn.Linear(16, 12, bias=False), (2, 2, 16)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (6, 3, 4)),
    "group norm of vectors": (lambda: nn.GroupNorm(2, 6), (6,)),
    "group norm over a line": (lambda: nn.GroupNorm(3, 6), (6, 5)),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 6)),
    "layer norm of vectors": (lambda: nn.LayerNorm(6), (6,)),
    "layer norm over a map": (lambda: nn.LayerNorm((3, 4)), (2, 3, 4)),
    "layer norm without bias": (lambda: nn.LayerNorm(6, bias=False), (4, 6)),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 6)),
    "instance norm 2d": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 3, 4)),
    "instance norm 3d": (lambda: nn.InstanceNorm3d(2, affine=True), (2, 2, 3, 2)),
    "batch norm with frozen statistics": (lambda: frozen_statistics(4), (4, 3, 3)),
    "frozen batch norm": (lambda: FrozenBatchNorm(4), (4, 3, 3)),
    "scale": (lambda: Scale(0.7), (3, 4)),
    "prelu": (lambda: nn.PReLU(4), (4, 3, 3)),
    "bilinear by torch.func": (lambda: Twice(nn.Bilinear(4, 4, 5)), (4,)),
    "rms norm by torch.func": (lambda: nn.RMSNorm(6), (4, 6)),
    "transposed convolution by torch.func": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), (4, 3, 3)),
}


class Twice(nn.Module):
    """A layer of two arguments."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x.sin())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_equal_autograd_by_every_strategy(name, units, dtype):
    torch.manual_seed(3)
    make, shape = OTHERS[name]
    inputs = torch.randn(8, *shape, dtype=dtype) + 0.3
    model = classifier(make(), nn.Tanh(), inputs=inputs)
    for value in model[0].parameters():
        nn.init.normal_(value)
    assert_exact(model, inputs, unit_index=UNITS[units])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_embeddings_equal_autograd_by_every_strategy(padding_idx, units, dtype):
    torch.manual_seed(4)
    tokens = torch.randint(0, 5, (8, 6))  # words come up several times in a row, and some never
    model = nn.Sequential(
        nn.Embedding(9, 4, padding_idx=padding_idx), nn.Linear(4, 4), nn.Tanh(), Middle(), nn.Linear(4, 3)
    ).to(dtype)
    found = assert_exact(model, tokens, unit_index=UNITS[units])
    assert {"scatter", "gram"} <= found


def test_a_reference_that_clips_rows_instead_of_units_is_told_apart():
    torch.manual_seed(5)
    inputs, targets = torch.randn(8, 5), torch.arange(8) % 3
    model = classifier(nn.Linear(5, 7), nn.Tanh(), inputs=inputs)
    total = clipped_sum(model, inputs, targets, clip_norm=0.5, unit_index=UNEVEN)
    right = reference(model, inputs, targets, unit_index=UNEVEN)
    wrong = reference(model, inputs, targets)  # clips each row
    assert distance(total.gradients, right.clipped_sum(0.5)) < 1e-5
    assert distance(total.gradients, wrong.clipped_sum(0.5)) > 1e-2


def test_a_reference_that_sums_instead_of_averages_a_units_rows_is_told_apart():
    torch.manual_seed(5)
    inputs, targets = torch.randn(8, 5), torch.arange(8) % 3
    model = classifier(nn.Linear(5, 7), nn.Tanh(), inputs=inputs)
    total = clipped_sum(model, inputs, targets, clip_norm=100.0, unit_index=UNEVEN)
    right = reference(model, inputs, targets, unit_index=UNEVEN)
    sums = {
        name: value * torch.bincount(UNEVEN).view(-1, *[1] * (value.dim() - 1))
        for name, value in right.per_unit.items()
    }
    assert distance(total.gradients, right.clipped_sum(100.0)) < 1e-5
    assert distance(total.gradients, {name: value.sum(0) for name, value in sums.items()}) > 1e-2


def test_grouped_convolutions_in_channels_last_are_exact_in_float64():
    """Where a row alone has the strides of a slice; with others the library's gradient is another one."""
    torch.manual_seed(5)
    layers = nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, 6, 3, groups=2, bias=False)
    inputs = torch.randn(8, 2, 9, 9, dtype=torch.float64).to(memory_format=torch.channels_last)
    model = classifier(*layers, inputs=inputs).to(memory_format=torch.channels_last)
    assert "library" in assert_exact(model, inputs)
    assert_exact(model, inputs, unit_index=UNEVEN)


def test_an_input_that_was_padded_unevenly_is_not_padded_again():
    """Behind another layer autograd keeps the padded input, which the rule takes instead of the input."""
    torch.manual_seed(4)
    inputs = torch.randn(5, 3, 8, 8)
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(2, 16), WSConv2d(16, 16, 3, stride=2), nn.Tanh())
    assert_exact(classifier(*layers, inputs=inputs).to(memory_format=torch.channels_last), inputs)


def moved_by_small_inputs(scale: float) -> float:
    """How far one unit moves the sum, in clip norms, by Gram norms of standardised filters with a bias."""
    torch.manual_seed(0)
    layer = WSConv2d(64, 16, 3)
    nn.init.normal_(layer.bias, std=3)
    layer.bias.requires_grad_(False)
    layer.gain.requires_grad_(False)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(64, 3).requires_grad_(False))
    choices = Forced(wanted="gram")
    total = clipped_sum(
        model,
        scale * torch.randn(1, 64, 2, 2),
        torch.full((1, 3), 1e12),
        clip_norm=1.0,
        loss=nn.functional.mse_loss,
        choices=choices,
    )
    assert "gram" in choices.offered
    return norm_of(total.gradients)


def test_inputs_far_below_the_bias_of_standardised_filters_keep_to_the_bound(monkeypatch):
    """<G, u> is read off the output, in which such inputs are lost to rounding."""
    for scale in (1.0, 1e-2, 1e-4, 1e-6, 1e-8):
        assert moved_by_small_inputs(scale) <= 1
    monkeypatch.setattr("sfumato.gradients.weight_standardisation.LOST_TO_BIAS", 0)
    assert moved_by_small_inputs(1e-8) > 1.5  # control: it can go wrong


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_a_gain_of_zero_says_nothing_of_its_filter_and_drops_no_unit(bias):
    torch.manual_seed(0)
    layer = WSConv2d(16, 8, 3)
    with torch.no_grad():
        layer.gain[0] = 0
        layer.bias.fill_(bias)
    inputs = torch.randn(4, 16, 2, 2)
    assert "gram" not in assert_exact(classifier(layer, inputs=inputs), inputs)
