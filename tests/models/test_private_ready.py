"""make_private_ready: what it replaces, what it keeps, what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from private_step import assert_private_step_is_exact, changes_with_another_example
from torch import nn
from users_models import MobileNetLike, TiedNet

import sfumato
from sfumato.errors import ConfigError, ModelError
from sfumato.models import make_private_ready


def trained_mobile_net() -> nn.Module:
    torch.manual_seed(0)
    model = MobileNetLike()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias, 0, 0.2)
    for _ in range(5):
        model(torch.randn(16, 3, 16, 16))
    return model


def test_a_batch_norm_model_becomes_one_that_treats_each_example_alone() -> None:
    model, inputs = trained_mobile_net(), torch.randn(4, 3, 16, 16)
    assert changes_with_another_example(model.train(), inputs)
    ready, changes = make_private_ready(model)
    assert not changes_with_another_example(ready.train(), inputs)
    assert_private_step_is_exact(ready, inputs)
    before = [type(module) for module in model.modules()]
    assert len(changes) == before.count(nn.BatchNorm2d) + before.count(nn.ReLU6) + before.count(nn.Hardswish)
    assert not [module for module in ready.modules() if getattr(module, "inplace", False)]


def test_the_original_is_left_as_it_was() -> None:
    model = trained_mobile_net()
    before = copy.deepcopy(model.state_dict())
    ready, _ = make_private_ready(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    with torch.no_grad():
        ready.classifier[1].weight.zero_()
    assert model.classifier[1].weight.abs().sum() > 0


def test_learnt_weights_are_carried_over_and_the_report_says_so() -> None:
    model = trained_mobile_net()
    ready, changes = make_private_ready(model)
    old = model.state_dict()
    for name, value in ready.state_dict().items():
        assert torch.equal(value, old[name])
    assert str(changes[0]) == (
        "features.1: BatchNorm2d(8) → GroupNorm(1, 8) (scale and shift kept, running statistics dropped)"
    )
    assert str(changes[1]) == "features.2: ReLU6(inplace=True) → ReLU6(inplace=False)"


def test_frozen_statistics_keep_what_the_model_computed_in_eval_mode() -> None:
    model, inputs = trained_mobile_net(), torch.randn(4, 3, 16, 16)
    ready, changes = make_private_ready(model, batch_norm="frozen")
    with torch.no_grad():
        expected = model.eval()(inputs)
        torch.testing.assert_close(ready.train()(inputs), expected)
        assert not torch.allclose(make_private_ready(model)[0](inputs), expected, atol=1e-2)
    assert "public data" in changes[0].note
    assert not changes_with_another_example(ready, inputs)


def test_groups_have_at_least_sixteen_channels() -> None:
    """One channel at one pixel has no variance: a group of its own would always give the shift alone."""
    net = nn.Sequential(nn.BatchNorm2d(24), nn.BatchNorm2d(7), nn.BatchNorm2d(256), nn.BatchNorm2d(1))
    ready, _ = make_private_ready(net)
    assert [layer.num_groups for layer in ready] == [1, 1, 16, 1]
    x = torch.randn(2, 24, 1, 1)
    assert ready[0](x).abs().sum() > 1
    assert nn.GroupNorm(24, 24)(x).abs().sum() < 1e-3
    assert all(layer.num_channels // layer.num_groups >= min(16, layer.num_channels) for layer in ready)
    pairs = nn.GroupNorm(12, 24, affine=False)(x)  # control: of two values only their order is left
    assert (pairs.abs() - 1).abs().median() < 1e-3


def test_a_layer_in_two_places_stays_one_layer() -> None:
    ready, changes = make_private_ready(TiedNet())
    assert ready.norm1 is ready.norm2
    assert isinstance(ready.norm1, nn.GroupNorm)
    assert len(changes) == 1


def test_frozen_parameters_precision_and_mode_are_kept() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4).double()).eval()
    model[0].weight.requires_grad_(False)
    ready, _ = make_private_ready(model)
    assert ready[0].weight.dtype == torch.float64
    assert (ready[0].weight.requires_grad, ready[0].bias.requires_grad) == (False, True)
    assert not ready[0].training
    root, changes = make_private_ready(nn.BatchNorm2d(8, affine=False))
    assert isinstance(root, nn.GroupNorm)
    assert root.weight is None
    assert str(changes[0]).startswith("(the model): BatchNorm2d(8)")


def test_instance_norm_stops_recording_statistics() -> None:
    model = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
    ready, changes = make_private_ready(model)
    x = torch.randn(2, 6, 5, 5)
    torch.testing.assert_close(ready(x), model.train()(x))
    assert not list(ready.buffers())
    assert len(changes) == 1
    assert make_private_ready(nn.InstanceNorm2d(6))[1] == ()


class BatchNormAct(nn.BatchNorm2d):
    """As in timm: norm and activation in one module."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


class StrangeBatchNorm(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_norm_with_its_activation_inside_keeps_the_activation() -> None:
    ready, changes = make_private_ready(nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct(4)))
    assert [type(layer) for layer in ready[1]] == [nn.GroupNorm, nn.ReLU]
    assert ready(torch.randn(2, 3, 8, 8)).min() == 0
    assert len(changes) == 2


def test_a_batch_norm_of_unknown_behaviour_is_refused() -> None:
    with pytest.raises(ModelError, match="unknown-batch-norm"):
        make_private_ready(nn.Sequential(StrangeBatchNorm(4)))
    with pytest.raises(ModelError, match="lazy-model"):
        make_private_ready(nn.Sequential(nn.LazyBatchNorm2d()))
    with pytest.raises(ModelError, match="no-running-statistics"):
        make_private_ready(nn.BatchNorm2d(4, track_running_stats=False), batch_norm="frozen")
    with pytest.raises(ConfigError, match="bad-model-option"):
        make_private_ready(nn.BatchNorm2d(4), batch_norm="groups")


def test_models_of_the_zoo_are_ready_as_they_are() -> None:
    assert make_private_ready(sfumato.create_model("wrn_16_1", num_classes=3))[1] == ()
    batch = sfumato.create_model("resnet9", num_classes=3, norm="batch", width=8)
    assert len(make_private_ready(batch)[1]) == 8
