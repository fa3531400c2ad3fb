"""Parameters that are watched where they are used: exact, or left to the fallback."""

from __future__ import annotations

import pytest
import torch
from comparison import UNEVEN, assert_exact
from torch import nn
from torch.nn import functional as F

from oracles import distance, reference
from sfumato.gradients import Choices, clipped_sum
from sfumato.gradients.fallback import fallback_rule

WIDTH = 4


class Body(nn.Module):
    """Rows of 2 x 4 x 4, some layer of others, and three classes."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))
        self.stem, self.head = nn.Conv2d(2, WIDTH, 3, padding=1), nn.Linear(WIDTH * 16, 3)

    def forward(self, x):
        return self.head(self.middle(torch.tanh(self.stem(x))).flatten(1))


class ChannelNorm(nn.LayerNorm):
    """A layer norm over channels, as timm's LayerNorm2d."""

    def forward(self, x):
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class OneGroup(nn.GroupNorm):
    def forward(self, x):
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class Norms(Body):
    def __init__(self):
        super().__init__(root=torch.rand(4) + 0.5)
        self.first, self.second = ChannelNorm(WIDTH), OneGroup(1, WIDTH)

    def middle(self, x):
        return F.rms_norm(self.second(self.first(x)), (4,), self.root)


class LayerScale(Body):
    """ConvNeXt's gamma, a parameter of the block that is reshaped and multiplied; used twice."""

    def __init__(self):
        super().__init__(gamma=torch.randn(WIDTH), shift=torch.randn(WIDTH, 1, 1))

    def middle(self, x):
        return x * self.gamma.reshape(1, -1, 1, 1) + self.shift - torch.sin(x).mul(self.gamma[:, None, None])


class Tokens(Body):
    """A class token and positions, as in vision transformers."""

    def __init__(self):
        super().__init__(token=torch.randn(1, 1, WIDTH), positions=torch.randn(1, 17, WIDTH))

    def middle(self, x):
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return torch.tanh(x)[:, 1:] * x[:, :1]


class Windows(Body):
    """Windows as rows of their own, with an attention bias out of a table, as in Swin transformers."""

    def __init__(self):
        super().__init__(table=torch.randn(7, 2), mixing=torch.randn(WIDTH, WIDTH) / 2)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("places", torch.arange(16).view(4, 4) % 7)

    def windows(self, x):
        return x.view(len(x), WIDTH, 2, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, WIDTH)

    def middle(self, x):
        q, k, v = self.qkv(self.windows(x)).unflatten(2, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        bias = self.table[self.places.flatten()].view(4, 4, 2).permute(2, 0, 1).unsqueeze(0)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return (mixed.transpose(1, 2).reshape(len(mixed), 4, WIDTH) @ self.mixing).reshape(len(x), -1)


class Convolved(Body):
    """A weight that is made out of another one."""

    def __init__(self):
        super().__init__(weight=torch.randn(WIDTH, 2, 3, 3), gain=torch.rand(WIDTH, 1, 1, 1))

    def middle(self, x):
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return F.conv2d(x, self.gain * weight, padding=1, groups=2)


WATCHED = {
    "norms": Norms,
    "layer scale": LayerScale,
    "tokens": Tokens,
    "windows": Windows,
    "convolved": Convolved,
}


class ScaledFilters(nn.Conv2d):
    """timm's ScaledStdConv2d, word for word but for ``eps``, which is large enough to be seen."""

    def __init__(self, inputs, outputs, *, kernel=3, with_gain=True, eps=0.05, **options):
        super().__init__(inputs, outputs, kernel, **options)
        self.scale, self.eps = 1.7 * self.weight[0].numel() ** -0.5, eps
        self.gain = nn.Parameter(1 + torch.rand(outputs, 1, 1, 1)) if with_gain else None

    def forward(self, x):
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None,
            weight=None if self.gain is None else (self.gain * self.scale).view(-1),
            training=True, momentum=0.0, eps=self.eps,
        ).reshape_as(self.weight)  # fmt: skip
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Mixed(Body):
    """A function that has neither a rule nor copies for the rows."""

    def __init__(self):
        super().__init__(mixing=torch.randn(WIDTH, WIDTH))

    def middle(self, x):
        return torch.einsum("bchw,cd->bdhw", x, self.mixing)


class WindowsFirst(Windows):
    """The windows before the rows: as many entries, in another order."""

    def windows(self, x):
        return super().windows(x).unflatten(0, (len(x), -1)).transpose(0, 1).flatten(0, 1)

    def middle(self, x):
        middle = super().middle(x).view(4, len(x), 4, WIDTH)
        return middle.transpose(0, 1).flatten(1)


NOT_WATCHED = {"einsum": Mixed, "windows first": WindowsFirst}


def repeated_by(model: nn.Module, inputs: torch.Tensor) -> set[str]:
    """The parameters whose module's forward pass is repeated."""
    choices = Choices(deterministic=True)
    clipped_sum(model, inputs, torch.zeros(len(inputs), dtype=torch.int64), clip_norm=1.0, choices=choices)
    claims = choices.claims[model].claims
    return {
        name
        for claim in claims
        if claim.rule is fallback_rule and not claim.watched
        for name in claim.parameters.values()
    }


@pytest.mark.parametrize("name", WATCHED)
def test_watched_parameters_equal_autograd_without_a_second_pass(name):
    torch.manual_seed(0)
    model, inputs = WATCHED[name](), torch.randn(8, 2, 4, 4)
    assert not repeated_by(model, inputs)
    assert_exact(model, inputs)
    assert_exact(model.double(), inputs.double(), unit_index=UNEVEN, microbatch_size=4)
    assert_exact(model, inputs.double()[:1])


@pytest.mark.parametrize("name", NOT_WATCHED)
def test_what_cannot_be_watched_is_left_to_the_fallback_and_exact(name):
    torch.manual_seed(0)
    model, inputs = NOT_WATCHED[name](), torch.randn(8, 2, 4, 4)
    assert repeated_by(model, inputs)
    assert_exact(model, inputs)


def test_frozen_parameters_beside_watched_ones_and_halves_of_them():
    torch.manual_seed(0)
    inputs = torch.randn(8, 2, 4, 4)
    for frozen in ("first.weight", "first.bias", "second.weight", "stem.weight"):
        model = Norms()
        model.get_parameter(frozen).requires_grad_(False)
        assert_exact(model, inputs)
    model = Tokens()
    model.stem.requires_grad_(False)  # what the positions are added to needs no gradient itself
    assert_exact(model, inputs)


def test_without_the_rows_order_the_windows_would_be_credited_to_others(monkeypatch):
    """Control: what the check of the order prevents."""
    torch.manual_seed(0)
    model, inputs, targets = WindowsFirst(), torch.randn(4, 2, 4, 4), torch.arange(4) % 3
    expected = reference(model, inputs, targets).clipped_sum(0.05)
    good = clipped_sum(model, inputs, targets, clip_norm=0.05, choices=Choices())
    assert distance(good.gradients, expected) < 1e-4
    monkeypatch.setattr("sfumato.gradients.tape.check_row_order", lambda *_: None)
    bad = clipped_sum(model, inputs, targets, clip_norm=0.05, choices=Choices())
    assert distance(bad.gradients, expected) > 1e-2


@pytest.mark.parametrize("kind", [Windows, WindowsFirst])
def test_batches_of_any_size_follow_what_one_row_has_shown(kind):
    """As many rows as windows, classes or heads: nothing is taken for the rows that is none."""
    torch.manual_seed(0)
    model, targets = kind(), torch.arange(8) % 3
    choices, inputs = Choices(deterministic=True), torch.randn(8, 2, 4, 4)
    for rows in (1, 4, 2, 3, 8):
        expected = reference(model, inputs[:rows], targets[:rows]).clipped_sum(0.05)
        found = clipped_sum(model, inputs[:rows], targets[:rows], clip_norm=0.05, choices=choices)
        assert distance(found.gradients, expected) < 1e-4


@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 1, 1), (5, 2, 1), (3, 1, 2)])
def test_depthwise_convolutions_are_exact_by_every_strategy(kernel, stride, dilation):
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 6, kernel, stride, padding=kernel // 2, dilation=dilation, groups=6)
    model = nn.Sequential(nn.Conv2d(2, 6, 1), layer, nn.Flatten(), nn.LazyLinear(3))
    inputs = torch.randn(8, 2, 7, 7)
    model(inputs)
    assert {"shifted", "folded"} <= assert_exact(model, inputs)
    assert_exact(model, inputs, unit_index=UNEVEN)
    assert_exact(model, inputs.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("padding", [0, 3, 5, "same"])
def test_depthwise_taps_that_meet_the_border_alone_get_nothing(padding):
    torch.manual_seed(1)
    layer = nn.Conv2d(6, 6, (3, 7), padding=padding, groups=6, bias=False)
    size = 7 if padding == 0 else 2
    inputs = torch.randn(8, 2, size, size, dtype=torch.float64)
    model = nn.Sequential(nn.Conv2d(2, 6, 1), layer, nn.Flatten(), nn.LazyLinear(3)).double()
    model(inputs)
    assert "shifted" in assert_exact(model, inputs)
    assert_exact(model, inputs, unit_index=UNEVEN)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1, "dilation": 2},
        {"groups": 2, "bias": False},
        {"kernel": 1, "with_gain": False},
        {"kernel": (3, 1), "padding": (1, 0), "eps": 1e-6},
    ],
    ids=str,
)
def test_filters_standardised_by_their_variance_are_exact_by_every_strategy(options, last):
    torch.manual_seed(5)
    filters = ScaledFilters(4, 6, **options)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.Tanh(), filters, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)
    )
    inputs = torch.randn(8, 2, 9, 9)
    if last:
        model, inputs = (value.to(memory_format=torch.channels_last) for value in (model, inputs))
    offered = assert_exact(model, inputs)
    assert offered >= {"columns", "library"}
    assert_exact(model, inputs, unit_index=UNEVEN)
    assert_exact(model.double(), inputs.double())
    choices = Choices()
    clipped_sum(model, inputs.double(), torch.arange(8) % 3, clip_norm=0.1, choices=choices)
    assert all(claim.watched for claim in choices.claims[model].claims if claim.rule is fallback_rule)
    for frozen in ("weight", "gain"):
        if getattr(filters, frozen) is not None:
            getattr(filters, frozen).requires_grad_(False)
            assert_exact(model, inputs.double())
            getattr(filters, frozen).requires_grad_(True)


@pytest.mark.parametrize("bias", [True, False])
def test_norms_of_standardised_filters_are_exact_without_their_gradients(bias):
    torch.manual_seed(8)
    filters = ScaledFilters(4, 6, padding=1, bias=bias)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Tanh(), filters, nn.Flatten(), nn.Linear(24, 3))
    inputs = torch.randn(8, 2, 2, 2, dtype=torch.float64)
    assert "gram" in assert_exact(model.double(), inputs)
    assert "gram" in assert_exact(model.double(), inputs, unit_index=UNEVEN)


class OtherGain(ScaledFilters):
    """Not quite so: the gain is squared, filters are doubled before or tripled after, or taken in pairs."""

    def __init__(self, kind):
        super().__init__(4, 6, padding=1)
        self.kind = kind

    def forward(self, x):
        weight, gain = self.weight, self.gain * self.scale
        if self.kind == "gain":
            gain = gain * self.gain
        weight = weight * 2 if self.kind == "weight" else weight
        rows = weight.reshape(1, 6, -1) if self.kind != "groups" else weight.reshape(1, 3, -1)
        gain = gain.view(-1) if self.kind != "groups" else gain.view(-1)[:3]
        weight = F.batch_norm(rows, None, None, gain, training=True, eps=self.eps)
        if self.kind == "after":
            weight = weight * 3
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, padding=1)


@pytest.mark.parametrize("kind", ["", "gain", "weight", "groups", "after"])
def test_filters_that_are_standardised_in_other_ways_are_exact_too(kind):
    torch.manual_seed(6)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), OtherGain(kind), nn.Tanh(), nn.Flatten(), nn.Linear(54, 3))
    assert_exact(model.double(), torch.randn(8, 2, 3, 3, dtype=torch.float64))


def test_one_gain_for_two_layers_and_one_layer_used_twice():
    torch.manual_seed(7)
    first, second = ScaledFilters(4, 4, padding=1), ScaledFilters(4, 4, padding=1)
    second.gain = first.gain
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), first, nn.Flatten(), nn.Linear(36, 3))
    assert_exact(model.double(), torch.randn(8, 4, 3, 3, dtype=torch.float64))


class ChangedFilters(Body):
    """Standardised filters that are tripled in place before they are used."""

    def __init__(self):
        super().__init__(weight=torch.randn(8, WIDTH, 3, 3), gain=torch.rand(8) + 0.5)
        self.head = nn.Linear(8 * 16, 3)

    def middle(self, x):
        filters = F.batch_norm(self.weight.reshape(1, 8, -1), None, None, self.gain, training=True, eps=1e-3)
        filters.mul_(3)
        return F.conv2d(x, filters.reshape_as(self.weight), padding=1)


class ChangedGain(ChangedFilters):
    """The gain is a multiple of a parameter that is changed in place."""

    def middle(self, x):
        gain = self.gain * 0.5
        gain.mul_(3)
        filters = F.batch_norm(self.weight.reshape(1, 8, -1), None, None, gain, training=True, eps=1e-3)
        return F.conv2d(x, filters.reshape_as(self.weight), padding=1)


class OtherSpelling(ChangedFilters):
    """The same functions with more arguments, and with their names."""

    def middle(self, x):
        rows = torch.reshape(input=self.weight, shape=(1, 8, -1))
        filters = torch.batch_norm(rows, self.gain, None, None, None, True, 0.0, 1e-3, False)
        return F.conv2d(x, filters.reshape_as(self.weight), padding=1)


@pytest.mark.parametrize("body", [ChangedFilters, ChangedGain, OtherSpelling])
def test_derived_values_that_are_changed_in_place_are_what_they_are_then(body):
    torch.manual_seed(0)
    assert_exact(body(), torch.randn(8, 2, 4, 4), unit_index=UNEVEN)
