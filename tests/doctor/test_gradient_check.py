"""The engine's sums are autograd's on the very model, parameter by parameter and unit by unit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hostile_models import BACKWARD_MIXERS, backward, net
from torch import nn
from torch.nn.functional import cross_entropy

from sfumato.doctor import check_engine, check_model
from sfumato.doctor.gradient_check import row_gradients
from sfumato.doctor.probing import rows_like
from sfumato.errors import ModelError, PrivacyError
from sfumato.gradients import Choices, clipped_sum
from sfumato.gradients.call import Strategy
from sfumato.gradients.linear import linear_rule
from sfumato.gradients.piece import Materialised
from sfumato.models import create_model
from small_runs import SmallNet

IMAGES = torch.randn(4, 1, 8, 8)


class SmallPositions(nn.Module):
    """A parameter whose gradient is a small part of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SmallNet()
        self.positions = nn.Parameter(torch.randn(1, 8, 8))

    def forward(self, x):
        return self.net(x + 1e-3 * self.positions)


@pytest.mark.parametrize("fault", ["scale", "small", "norm", "missing", "unclipped"])
def test_an_engine_that_disagrees_with_autograd_is_found(fault):
    def faulty(model, inputs, targets, *, clip_norm, loss, choices):
        factor = 1e9 if fault == "unclipped" else clip_norm
        total = clipped_sum(model, inputs, targets, clip_norm=factor, loss=loss, choices=choices)
        gradients, norms = dict(total.gradients), total.norms
        first = "net.convolution.weight"
        if fault == "scale":
            gradients[first] = gradients[first] * 1.05
        if fault == "small":  # counted twice, but a thousandth of the whole: as shared positions may be
            gradients["positions"] = gradients["positions"] * 2
        if fault == "missing":
            del gradients[first]
        if fault == "norm":
            norms = norms * 0.99
        return replace(total, gradients=gradients, norms=norms)

    model = SmallPositions()
    check_engine(model, IMAGES)
    with pytest.raises(ModelError, match="engine-disagrees"):
        check_engine(model, IMAGES, sum_function=faulty)


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


def test_norms_behind_frozen_layers_are_checked_in_channels_last():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3)
    ).to(memory_format=torch.channels_last)
    model[0].requires_grad_(False)
    images = torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last)
    assert check_model(model, images) == []


@pytest.mark.parametrize("name", BACKWARD_MIXERS)
def test_a_backward_pass_that_mixes_examples_is_found(name):
    assert check_model(net(backward(lambda g: 2 * g)), IMAGES) == []
    with pytest.raises((PrivacyError, ModelError), match=r"mixes-examples|engine-disagrees"):
        check_model(net(backward(BACKWARD_MIXERS[name])), IMAGES)


CRASH = """
import sys, torch
from torch import nn
from torch.nn.functional import group_norm
from sfumato.doctor.crash import no_crash
from sfumato.errors import ModelError
guarded, size = sys.argv[1] == "guarded", int(sys.argv[2])
scale, images = torch.ones(4, requires_grad=True), torch.randn(2, size, size, 4).permute(0, 3, 1, 2)
if not guarded:
    group_norm(images, 2, scale).sum().backward()
with no_crash(nn.GroupNorm(2, 4), images):
    group_norm(images.clone(memory_format=torch.contiguous_format), 2, scale).sum().backward()
    try:
        group_norm(images, 2, scale).sum().backward()
    except ModelError as error:
        print(error.code)
"""


@pytest.mark.parametrize("size", [8, 1])
def test_the_norm_that_kills_the_process_is_an_error_instead(size):
    """In a process of its own: without the guard it would take the other tests with it."""

    def run(kind):
        command = [sys.executable, "-c", CRASH, kind, str(size)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run("bare").returncode < 0  # a signal; if PyTorch has fixed it, the guard can go
    guarded = run("guarded")
    assert guarded.returncode == 0, guarded.stderr
    assert "crashing-norm" in guarded.stdout


@pytest.mark.parametrize("count", [2, 7])
def test_probe_rows_have_the_layout_of_the_rows_given(count):
    images = torch.randn(3, 6, 5, 4).permute(0, 3, 1, 2)
    rows = rows_like(images, count)
    assert rows.stride()[1:] == images.stride()[1:]
    assert torch.equal(rows[: min(3, count)], images[:count])
    assert rows_like(images.contiguous(), count).is_contiguous()  # the control


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
