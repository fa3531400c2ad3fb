"""The doctor finds what voids the guarantee, names it, and lets sound models and data pass."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.cli import cli
from sfumato.data import augment
from sfumato.doctor import (
    Finding,
    check_augmentation,
    check_engine,
    check_model,
    examine_data,
    examine_plan,
    examine_surroundings,
)
from sfumato.doctor.gradient_check import row_gradients
from sfumato.errors import ModelError, PrivacyError
from sfumato.gradients import Choices, clipped_sum
from sfumato.gradients.call import Strategy
from sfumato.gradients.linear import linear_rule
from sfumato.gradients.piece import Materialised
from sfumato.models import create_model
from sfumato.privacy import Plan
from small_runs import SmallNet, small_set, small_splits

IMAGES = torch.randn(4, 1, 8, 8)


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *layers, nn.Flatten(), nn.Linear(4 * 64, 3))


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


class Counter(nn.Module):
    """Outputs do not mix, but it keeps the mean of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += x.mean()
        return x


class FrozenNorm(nn.BatchNorm2d):
    """Batch norm with fixed statistics that stays in evaluation mode."""

    def train(self, mode: bool = True) -> FrozenNorm:
        return super().train(False)


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
        net(nn.Dropout(0.5)),
        net(nn.LayerNorm([4, 8, 8]), nn.SELU()),
        net(nn.InstanceNorm2d(4, affine=True)),
        SmallNet(),
    ],
)
def test_a_model_that_treats_each_row_on_its_own_passes(model):
    assert check_model(model, IMAGES) == []


def test_frozen_batch_norm_is_allowed_and_said():
    model = net(FrozenNorm(4).requires_grad_(False))
    findings = check_model(model, IMAGES)
    assert [finding.code for finding in findings] == ["frozen-batch-norm"]
    assert findings[0].severity == "note"


def test_statistics_kept_in_a_buffer_are_refused():
    with pytest.raises(PrivacyError, match="private-statistics"):
        check_model(net(Counter()), IMAGES)


def test_a_model_is_left_as_it_was():
    model = net(FrozenNorm(4).requires_grad_(False), nn.Dropout(0.5)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    check_model(model, IMAGES)
    assert torch.equal(random_state, torch.get_rng_state())  # a seeded run goes on as if nobody had looked
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    broken = net(Counter())
    with pytest.raises(PrivacyError):
        check_model(broken, IMAGES)
    assert broken[1].seen == 0


def test_one_row_is_enough_to_ask_with():
    with pytest.raises(PrivacyError, match="mixes-examples"):
        check_model(net(nn.BatchNorm2d(4)), IMAGES[:1])


def test_a_zoo_model_passes_with_group_norm_and_fails_with_batch_norm():
    images = torch.randn(3, 3, 32, 32)
    check_model(create_model("resnet9", num_classes=10, width=8, groups=4), images)
    with pytest.raises(PrivacyError, match="BatchNorm2d"):
        check_model(create_model("resnet9", num_classes=10, width=8, norm="batch"), images)


def test_a_deep_net_is_not_refused_for_where_its_kinks_fall():
    differences = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = create_model("wrn_40_4", num_classes=10, width=1)
        images, targets = torch.randn(3, 3, 16, 16), torch.arange(3)
        check_model(model, images)
        together = row_gradients(model, images, targets, cross_entropy)
        for i in range(3):
            alone = row_gradients(model, images[i : i + 1], targets[i : i + 1], cross_entropy)[0]
            differences += [
                (alone[name] - value).norm() / value.norm() for name, value in together[i].items()
            ]
    assert max(differences) > 1e-3  # a pass for each row would have refused it: rounding moves a ReLU's kink


def test_outputs_that_are_no_numbers_or_no_rows_are_model_errors():
    overflowing = net()
    with torch.no_grad():
        overflowing[-1].weight.fill_(float("inf"))
    with pytest.raises(ModelError, match="non-finite-output"):
        check_model(overflowing, IMAGES)

    class Total(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    with pytest.raises(ModelError, match="no-row-outputs"):
        check_model(Total(), IMAGES)


@pytest.mark.parametrize("fault", ["scale", "norm", "missing", "unclipped"])
def test_an_engine_that_disagrees_with_autograd_is_found(fault):
    def faulty(model, inputs, targets, *, clip_norm, loss, choices):
        factor = 1e9 if fault == "unclipped" else clip_norm
        total = clipped_sum(model, inputs, targets, clip_norm=factor, loss=loss, choices=choices)
        gradients, norms = dict(total.gradients), total.norms
        first = next(iter(gradients))
        if fault == "scale":
            gradients[first] = gradients[first] * 1.05
        if fault == "missing":
            del gradients[first]
        if fault == "norm":
            norms = norms * 0.99
        return replace(total, gradients=gradients, norms=norms)

    check_engine(SmallNet(), IMAGES)
    with pytest.raises(ModelError, match="engine-disagrees"):
        check_engine(SmallNet(), IMAGES, sum_function=faulty)


class TwoWays(nn.Linear):
    """A layer whose second strategy, which counting never chooses but timing might, is wrong."""

    wrong_by = 1.0

    @staticmethod
    def gradient_rule(call):
        right = linear_rule(call)[0]

        def pieces():
            factor = type(call.module).wrong_by
            return {name: Materialised(piece.gradients * factor) for name, piece in right.pieces().items()}

        return [right, Strategy("slow", 1e18, pieces)]


class Wrong(TwoWays):
    wrong_by = 1.01


def test_every_strategy_is_checked_that_timing_may_choose():
    def head(kind):
        return nn.Sequential(nn.Flatten(), kind(IMAGES[0].numel(), 3))

    check_engine(head(TwoWays), IMAGES)
    with pytest.raises(ModelError, match="engine-disagrees"):
        check_engine(head(Wrong), IMAGES)

    def counting_only(model, inputs, targets, *, clip_norm, loss, choices):
        counted = Choices(deterministic=True)
        return clipped_sum(model, inputs, targets, clip_norm=clip_norm, loss=loss, choices=counted)

    check_engine(head(Wrong), IMAGES, sum_function=counting_only)  # which would not have met the fault


def test_augmentation_across_examples_is_found():
    def ours(images: Tensor, generator: torch.Generator) -> Tensor:
        return augment(images, views=3, padding=2, flip=True, generator=generator)

    def mixup(images: Tensor, generator: torch.Generator) -> Tensor:
        return 0.9 * images + 0.1 * images[torch.randperm(len(images), generator=generator)]

    images = torch.rand(4, 1, 8, 8)
    check_augmentation(ours, images)
    with pytest.raises(PrivacyError, match="mixes-examples"):
        check_augmentation(mixup, images)


def codes(findings: list[Finding], severity: str | None = None) -> list[str]:
    return [finding.code for finding in findings if severity in (None, finding.severity)]


def test_sound_data_give_only_the_note_about_class_names():
    assert codes(examine_data(small_splits())) == ["public-class-names"]


def test_the_private_images_own_statistics_are_found():
    splits = small_splits(train=60)
    pixels = splits.train.images.float() / 255
    own = pixels.mean().item(), pixels.std().item()
    assert "private-normalisation" in codes(examine_data(splits, mean=own[:1], std=own[1:]), "void")
    assert "private-normalisation" in codes(examine_data(splits, mean=own[:1]), "void")
    assert "private-normalisation" not in codes(examine_data(splits, mean=[0.5], std=[0.25]))
    assert "private-normalisation" not in codes(examine_data(splits, mean=[0.7], std=[0.9]))


def test_a_class_that_one_unit_brought_is_found():
    train = small_set(61, seed=1)
    labels = torch.where(train.labels == 2, 1, train.labels)
    alone = replace(train, labels=labels.index_fill(0, torch.tensor([5]), 2))
    splits = replace(small_splits(), train=alone)
    assert "class-of-one" in codes(examine_data(splits), "void")
    patient = replace(train, patients=torch.where(train.labels == 2, 0, 1 + torch.arange(61)))
    assert "class-of-one" in codes(examine_data(replace(splits, train=patient), unit="patient"), "void")
    assert "class-of-one" not in codes(examine_data(replace(splits, train=patient), unit="image"))


def test_copies_inside_and_across_splits_are_found():
    train = small_set(30, seed=1)
    doubled = train.select(torch.cat([torch.arange(30), torch.tensor([3, 3])]))
    found = examine_data(replace(small_splits(), train=doubled))
    assert "duplicate-images" in codes(found)
    assert any("one occurs 3 times" in finding.what for finding in found)
    shared = replace(small_splits(train=30), test=train.select(torch.arange(4)))
    assert "shared-images" in codes(examine_data(shared))


def test_patients_in_two_places_are_found():
    train = small_set(24, seed=1, patients=6)
    overlapping = replace(small_splits(), train=train, test=small_set(6, seed=2, patients=3))
    assert {"shared-patients", "images-not-patients"} <= set(codes(examine_data(overlapping)))
    assert "images-not-patients" not in codes(examine_data(overlapping, unit="patient"))
    twice = train.select(torch.cat([torch.arange(24), torch.tensor([0])]))
    mixed = replace(twice, patients=torch.cat([train.patients, torch.tensor([5])]))
    assert "images-of-two-patients" in codes(examine_data(replace(overlapping, train=mixed), unit="patient"))
    assert "images-of-two-patients" not in codes(examine_data(overlapping, unit="patient"))


def test_private_validation_images_are_found():
    splits = small_splits(val=9)
    assert "private-validation-set" in codes(examine_data(splits))
    assert "carved" in str(examine_data(splits, holdout=0.1))
    assert "private-validation-set" not in codes(examine_data(replace(splits, val_is_public=True)))


def test_weak_plans_are_found():
    def plan(**changes) -> Plan:
        fixed = {"num_examples": 1000, "batch_size": 100, "num_steps": 50, "allow_large_delta": True}
        return Plan(**{**fixed, "noise_multiplier": 2.0, "delta": 1e-5, **changes})

    assert examine_plan(plan()) == []
    assert codes(examine_plan(plan(delta=2e-3)), "void") == ["delta-too-large"]
    assert codes(examine_plan(plan(delta=9e-4))) == ["delta-near-limit"]
    assert codes(examine_plan(plan(noise_multiplier=0.4))) == ["large-epsilon"]
    assert codes(examine_plan(plan(uncounted_search=True))) == ["uncounted-search"]


def test_a_remote_tracker_within_reach_is_found(monkeypatch, tmp_path):
    assert examine_surroundings() == []
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert examine_surroundings() == []  # the package is not installed
    (tmp_path / "wandb.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert codes(examine_surroundings()) == ["remote-tracker"]
    assert "secret" not in str(examine_surroundings())


def test_the_command_reports_and_fails_only_on_what_voids():
    sound = CliRunner().invoke(cli, ["doctor", "--data", "digits", "--json"])
    assert sound.exit_code == 0, sound.output
    assert json.loads(sound.stdout)["sound"] is True
    void = CliRunner().invoke(cli, ["doctor", "--model", "wrn_10_1", "--image-size", "8"])
    assert void.exit_code == 0
    assert "Nothing found" in void.output
    assert "Give --data" in CliRunner().invoke(cli, ["doctor"]).output


def test_the_command_fails_on_a_class_of_one(image_folder):
    folder = image_folder(train=3)
    (folder / "train" / "cat" / "p0-1.png").unlink()
    (folder / "train" / "cat" / "p1-2.png").unlink()
    result = CliRunner().invoke(cli, ["doctor", "--data", str(folder), "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["sound"] is False
    assert "class-of-one" in [finding["code"] for finding in found["findings"]]


def test_norms_behind_frozen_layers_are_checked_in_channels_last():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3)
    ).to(memory_format=torch.channels_last)
    model[0].requires_grad_(False)
    images = torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last)
    assert check_model(model, images) == []
