"""No row's output depends on the others, on its place or on the size of its batch."""

from __future__ import annotations

import pytest
import torch
from hostile_models import (
    FORWARD_MIXERS,
    AlwaysNoisy,
    DropPath,
    FunctionalDropout,
    Layer,
    OwnGenerator,
    net,
)
from torch import Tensor, nn

from sfumato.data import augment
from sfumato.doctor import check_augmentation, check_model
from sfumato.errors import ModelError, PrivacyError
from sfumato.gradients import clipped_sum
from sfumato.models import create_model
from small_runs import SmallNet

IMAGES = torch.randn(4, 1, 8, 8)


class MeanSubtracted(nn.Module):
    """Takes a thousandth of the batch's mean away: a dependence that no list of class names would find."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 1e-3 * x.mean(0, keepdim=True)


class LargestOfBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.detach().abs().amax().clamp_min(1e-3)


class Neighbour(nn.Module):
    """Each row looks at the row before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * torch.roll(x, 1, dims=0)


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.BatchNorm2d(4), "BatchNorm2d"),
        (nn.BatchNorm2d(4, track_running_stats=False), "BatchNorm2d"),
        (MeanSubtracted(), "MeanSubtracted"),
        (LargestOfBatch(), "LargestOfBatch"),
        (Neighbour(), "Neighbour"),
    ],
)
def test_a_model_that_mixes_examples_is_refused_and_the_layer_is_named(layer, kind):
    with pytest.raises(PrivacyError, match="mixes-examples") as caught:
        check_model(net(nn.ReLU(), layer), IMAGES)
    assert f"2, {kind}" in caught.value.what


@pytest.mark.parametrize(
    "model",
    [
        net(nn.GroupNorm(2, 4), nn.ReLU()),
        net(nn.Dropout(0.0)),
        net(nn.LayerNorm([4, 8, 8]), nn.SELU()),
        net(nn.InstanceNorm2d(4, affine=True)),
        SmallNet(),
    ],
)
def test_a_model_that_treats_each_row_on_its_own_passes(model):
    assert check_model(model, IMAGES) == []


def test_one_row_is_enough_to_ask_with():
    with pytest.raises(PrivacyError, match="mixes-examples"):
        check_model(net(nn.BatchNorm2d(4)), IMAGES[:1])


def test_a_zoo_model_passes_with_group_norm_and_fails_with_batch_norm():
    images = torch.randn(3, 3, 32, 32)
    check_model(create_model("resnet9", num_classes=10, width=8, groups=4), images)
    with pytest.raises(PrivacyError, match="BatchNorm2d"):
        check_model(create_model("resnet9", num_classes=10, width=8, norm="batch"), images)


def test_augmentation_across_examples_is_found():
    def ours(images: Tensor, generator: torch.Generator) -> Tensor:
        return augment(images, views=3, padding=2, flip=True, generator=generator)

    def mixup(images: Tensor, generator: torch.Generator) -> Tensor:
        return 0.9 * images + 0.1 * images[torch.randperm(len(images), generator=generator)]

    images = torch.rand(4, 1, 8, 8)
    check_augmentation(ours, images)
    with pytest.raises(PrivacyError, match="mixes-examples"):
        check_augmentation(mixup, images)


def moved_by_one_unit(model: nn.Module, rows: int) -> float:
    """By how many clip norms the sum moves if one unit is removed, the worst of all."""
    images, targets = 3.0 * torch.randn(rows, 1, 8, 8), torch.arange(rows) % 3

    def total(kept: Tensor) -> Tensor:
        found = clipped_sum(model, images[kept], targets[kept], clip_norm=1.0)
        return torch.cat([value.double().flatten() for value in found.gradients.values()])

    whole, everyone = total(torch.arange(rows)), torch.arange(rows)
    return max((whole - total(everyone[everyone != row])).norm().item() for row in range(rows))


@pytest.mark.parametrize("name", FORWARD_MIXERS)
def test_what_breaks_the_bound_is_refused(name):
    torch.manual_seed(0)
    model = net(Layer(FORWARD_MIXERS[name]), nn.Tanh())
    try:
        assert moved_by_one_unit(model, 16) > 1.01
    except PrivacyError as error:  # the engine notices some of them itself
        assert error.code in ("mixes-examples", "reorders-rows")  # noqa: PT017
    with pytest.raises(PrivacyError, match="mixes-examples"):
        check_model(model, IMAGES)
    sound = net(Layer(lambda x: 0.5 * x), nn.Tanh())
    assert moved_by_one_unit(sound, 16) <= 1.0
    assert check_model(sound, IMAGES) == []


def test_the_probe_has_the_size_of_training():
    switching = net(Layer(lambda x: x if len(x) < 60 else x - x.mean(0, keepdim=True)))
    assert check_model(switching, IMAGES) == []  # what training never meets does no harm
    with pytest.raises(PrivacyError, match="64 rows"):
        check_model(switching, IMAGES, num_rows=64)
    assert check_model(net(), IMAGES, num_rows=64) == []


def test_a_last_layer_at_zero_hides_nothing():
    def zeroed(model: nn.Module) -> nn.Module:
        nn.init.zeros_(model[-1].weight)
        nn.init.zeros_(model[-1].bias)
        return model

    switching = net(Layer(lambda x: x if len(x) < 60 else x - x.mean(0, keepdim=True)))
    assert check_model(zeroed(net(nn.ReLU())), IMAGES, num_rows=64) == []
    with pytest.raises(PrivacyError, match="mixes-examples"):
        check_model(zeroed(switching), IMAGES, num_rows=64)


def test_modes_are_those_of_training_and_evaluation_too():
    class Centred(nn.Module):
        def __init__(self, *, in_training: bool) -> None:
            super().__init__()
            self.in_training = in_training

        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0, keepdim=True) if self.training is self.in_training else x

    for in_training in (True, False):
        with pytest.raises(PrivacyError, match="mixes-examples"):
            check_model(net(Centred(in_training=in_training)), IMAGES)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), FunctionalDropout(), DropPath(), OwnGenerator()])
def test_random_layers_are_told_and_not_taken_for_mixing(layer):
    findings = check_model(net(layer), IMAGES)
    assert [(finding.severity, finding.code) for finding in findings] == [("note", "draws-random-numbers")]
    assert "first: 1" in findings[0].what
    for mixer in (nn.BatchNorm2d(4), Layer(lambda x: x + x[torch.randperm(len(x))])):
        with pytest.raises(PrivacyError, match="mixes-examples"):
            check_model(net(layer, mixer), IMAGES)


def test_what_draws_in_evaluation_mode_too_is_refused():
    with pytest.raises(ModelError, match="random-in-evaluation"):
        check_model(net(AlwaysNoisy()), IMAGES)


def test_one_row_taken_for_a_vector_is_refused_with_the_reason():
    def pooled(shape: Layer) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), shape, nn.Linear(4, 3))

    assert check_model(pooled(Layer(lambda x: x.flatten(1))), IMAGES) == []
    with pytest.raises(ModelError, match="needs-several-rows") as caught:
        check_model(pooled(Layer(torch.squeeze)), IMAGES)
    assert "flatten" in caught.value.fix
