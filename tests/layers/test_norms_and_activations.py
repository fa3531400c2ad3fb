"""Norms, activations and initialisations by name, against their definitions."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from sfumato.errors import ConfigError
from sfumato.layers import (
    Activation,
    FrozenBatchNorm,
    NfActivation,
    SamePad2d,
    Scale,
    ScaledActivation,
    SqueezeExcite,
    WSConv2d,
    initialise,
    make_activation,
    make_norm,
    make_scale_norm,
    same_conv2d,
    suitable_groups,
)


def normalised_by_hand(x: torch.Tensor, groups: int) -> torch.Tensor:
    parts = x.reshape(x.shape[0], groups, -1)
    centred = parts - parts.mean(-1, keepdim=True)
    return (centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)).reshape(x.shape)


@pytest.mark.parametrize(("kind", "groups"), [("group", 4), ("layer", 1), ("instance", 12)])
def test_each_norm_normalises_over_its_groups(kind: str, groups: int) -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(2, 12, 5, 5) + 1
    torch.testing.assert_close(make_norm(kind, 12, groups=4)(x), normalised_by_hand(x, groups))
    assert not torch.allclose(make_norm(kind, 12, groups=4)(x), normalised_by_hand(x, 6), atol=1e-3)


@pytest.mark.parametrize("kind", ["group", "layer", "instance", "none"])
def test_no_norm_but_batch_mixes_examples(kind: str) -> None:
    x = torch.randn(4, 8, 3, 3)
    changed = torch.cat([x[:1], 5 * x[1:]])
    norm = make_norm(kind, 8)
    assert torch.equal(norm(x)[0], norm(changed)[0])
    batch = make_norm("batch", 8)
    assert not torch.allclose(batch(x)[0], batch(changed)[0], atol=1e-3)


@pytest.mark.parametrize(
    ("channels", "groups", "expected"), [(64, 32, 32), (24, 16, 12), (7, 4, 1), (5, 9, 5)]
)
def test_groups_always_divide_the_channels(channels: int, groups: int, expected: int) -> None:
    assert suitable_groups(channels, groups) == expected


def test_scale_norm_is_a_norm_only_where_it_is_wanted() -> None:
    assert isinstance(make_scale_norm(True, "group", 8, groups=4), nn.GroupNorm)
    assert isinstance(make_scale_norm(False, "group", 8, groups=4), nn.Identity)


def test_frozen_batch_norm_is_batch_norm_in_eval_mode_even_in_training() -> None:
    torch.manual_seed(0)
    theirs = nn.BatchNorm2d(6)
    theirs(torch.randn(8, 6, 4, 4) * 2 + 1)
    frozen = FrozenBatchNorm(6).train()
    frozen.load_state_dict({k: v for k, v in theirs.state_dict().items() if k != "num_batches_tracked"})
    x = torch.randn(4, 6, 4, 4)
    torch.testing.assert_close(frozen(x), theirs.eval()(x))
    assert not torch.allclose(frozen(x), theirs.train()(x), atol=1e-3)
    assert torch.equal(frozen(x)[:1], frozen(x[:1]))


@pytest.mark.parametrize("name", get_args(Activation))
def test_activations_leave_their_input_alone(name: str) -> None:
    x = torch.randn(100)
    before = x.clone()
    make_activation(name)(x)
    assert torch.equal(x, before)
    assert not torch.equal(nn.ReLU(inplace=True)(x), before)  # this one would have been noticed
    assert not torch.equal(x, before)


def test_the_tempered_sigmoid_is_tanh_by_default() -> None:
    x = torch.linspace(-4, 4, 100)
    torch.testing.assert_close(make_activation("tempered_sigmoid")(x), torch.tanh(x))


@pytest.mark.parametrize("name", get_args(NfActivation))
def test_scaled_activations_keep_the_variance_of_a_normal_input(name: str) -> None:
    z = torch.linspace(-12, 12, 400_001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2)
    density /= density.sum()

    def variance(values: torch.Tensor) -> float:
        mean = (values * density).sum()
        return ((values - mean).square() * density).sum().item()

    assert variance(ScaledActivation(name)(z)) == pytest.approx(1, abs=1e-6)
    assert variance(ScaledActivation(name, scale=0.5)(z)) == pytest.approx(0.25, abs=1e-6)
    if name != "selu":  # whose gain is 1 by design
        assert variance(make_activation(name)(z)) != pytest.approx(1, abs=0.1)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean group"):
        make_norm("groups", 8)
    with pytest.raises(ConfigError, match="Did you mean selu"):
        make_activation("selo")
    with pytest.raises(ConfigError, match="Did you mean fan_in_normal"):
        initialise(nn.Linear(1, 1), "fan_in")
    with pytest.raises(ConfigError, match="no known gain"):
        ScaledActivation("relu6")
    with pytest.raises(ConfigError, match="bad-groups"):
        make_norm("group", 8, groups=0)


@pytest.mark.parametrize("layer", [nn.Linear(400, 500), nn.Conv2d(40, 500, 3), WSConv2d(40, 500, 3)])
def test_fan_in_normal_has_variance_one_over_fan_in(layer: nn.Module) -> None:
    torch.manual_seed(0)
    initialise(layer, "fan_in_normal")
    fan_in = layer.weight[0].numel()
    assert layer.weight.var().item() * fan_in == pytest.approx(1, abs=0.02)
    assert torch.count_nonzero(layer.bias) == 0


def test_xavier_has_the_gain_of_selu_and_no_more_than_its_bound() -> None:
    torch.manual_seed(0)
    layer = initialise(nn.Linear(400, 500), "xavier_selu")
    bound = 0.75 * (6 / 900) ** 0.5
    assert layer.weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert layer.weight.var().item() == pytest.approx(bound**2 / 3, rel=0.02)  # uniform, not normal


def test_xavier_has_the_variance_of_glorot_and_bengio() -> None:
    layer = initialise(nn.Linear(400, 500), "xavier")
    assert layer.weight.var().item() == pytest.approx(2 / 900, rel=0.02)
    assert layer.weight.abs().max().item() <= (6 / 900) ** 0.5
    selu = initialise(nn.Linear(400, 500), "xavier_selu")
    assert selu.weight.var().item() != pytest.approx(2 / 900, rel=0.02)


def test_torch_initialisation_changes_nothing() -> None:
    layer = nn.Linear(3, 3)
    before = layer.weight.clone()
    assert torch.equal(initialise(layer, "torch").weight, before)
    assert not torch.equal(initialise(layer, "fan_in_normal").weight, before)


def test_scale_multiplies_by_one_learnable_number() -> None:
    layer = Scale(0.5, constant=3.0)
    x = torch.ones(2, 3)
    torch.testing.assert_close(layer(x), 1.5 * x)
    layer(x).sum().backward()
    assert layer.scale.grad.item() == pytest.approx(18)


def test_squeeze_excite_weighs_each_channel_by_the_whole_image() -> None:
    torch.manual_seed(0)
    layer = SqueezeExcite(4, 2, factor=2.0)
    x = torch.randn(3, 4, 5, 5)
    means = x.mean(dim=(2, 3))
    hidden = torch.relu(means @ layer.reduce.weight.T + layer.reduce.bias)
    weights = 2 * torch.sigmoid(hidden @ layer.expand.weight.T + layer.expand.bias)
    torch.testing.assert_close(layer(x), x * weights[..., None, None])


def test_same_convolution_pads_with_a_layer_only_where_it_is_uneven() -> None:
    assert [type(layer) for layer in same_conv2d(2, 2, 3, stride=2)] == [SamePad2d, nn.Conv2d]
    assert [type(layer) for layer in same_conv2d(2, 2, 3)] == [nn.Conv2d]
    x = torch.randn(1, 2, 8, 8)
    assert nn.Sequential(*same_conv2d(2, 2, 5, stride=2))(x).shape == (1, 2, 4, 4)
    assert nn.Sequential(*same_conv2d(2, 2, 5))(x).shape == (1, 2, 8, 8)
