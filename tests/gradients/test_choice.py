"""The choice among strategies is remembered, can be made without a clock, and never changes the result."""

from __future__ import annotations

import time

import torch
from comparison import Forced, classifier
from torch import nn

from oracles import distance
from sfumato.gradients import Choices, Strategy, clipped_sum
from sfumato.layers import WSConv2d


def problem(rows: int = 6) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(13)
    inputs = torch.randn(rows, 8, 3, 3)
    layers = (nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), WSConv2d(8, 9, 3), nn.Tanh())
    return classifier(*layers, inputs=inputs), inputs, torch.arange(rows) % 3


class Counting(Choices):
    """Counts how often a choice had to be made."""

    made = 0

    def _best(self, strategies: list[Strategy]) -> str:
        self.made += 1
        return super()._best(strategies)


def test_a_choice_is_made_once_per_layer_and_shape():
    model, inputs, targets = problem()
    choices = Counting()
    clipped_sum(model, inputs, targets, clip_norm=1.0, choices=choices)
    first = choices.made
    assert first == 3  # the group norm has but one way
    clipped_sum(model, inputs, targets, clip_norm=1.0, choices=choices)
    assert choices.made == first
    clipped_sum(model, torch.randn(6, 8, 3, 3), targets, clip_norm=0.1, choices=choices)
    assert choices.made == first
    clipped_sum(model, inputs[:1], targets[:1], clip_norm=1.0, choices=choices)  # control: another size
    assert choices.made > first


def test_deterministic_choices_are_the_same_twice_and_give_the_same_bits():
    model, inputs, targets = problem()
    runs = []
    for _ in range(2):
        choices = Choices(deterministic=True)
        total = clipped_sum(model, inputs, targets, clip_norm=0.1, choices=choices)
        runs.append((choices.strategies, total))
    (first, one), (second, two) = runs
    assert list(first.values()) == list(second.values())
    assert all(torch.equal(one.gradients[name], two.gradients[name]) for name in one.gradients)
    assert torch.equal(one.norms, two.norms)


def test_deterministic_choices_do_not_look_at_the_clock(monkeypatch):
    model, inputs, targets = problem()
    monkeypatch.setattr("sfumato.gradients.choice._now", lambda: 1 / 0)
    clipped_sum(model, inputs, targets, clip_norm=0.1, choices=Choices(deterministic=True))


def test_all_strategies_agree_and_all_were_tried():
    model, inputs, targets = problem()
    totals = {}
    for name in ("columns", "library", "gram"):
        choices = Forced(wanted=name)
        totals[name] = clipped_sum(model, inputs, targets, clip_norm=0.1, choices=choices)
        assert name in choices.strategies.values()
    for name in ("library", "gram"):
        assert distance(totals[name].gradients, totals["columns"].gradients) < 1e-5
        torch.testing.assert_close(totals[name].norms, totals["columns"].norms, rtol=1e-5, atol=0.0)
    bits = [torch.equal(totals["gram"].norms, totals[name].norms) for name in ("columns", "library")]
    assert not all(bits)  # control: they are different computations


def test_timing_takes_the_fastest():
    def slow() -> dict:
        end = time.thread_time() + 0.02  # not asleep: of one thread its own time is counted
        while time.thread_time() < end:
            pass
        return {}

    choices = Choices()
    choices.pieces("layer", [Strategy("slow", 1.0, slow), Strategy("quick", 2.0, dict)])
    assert choices.strategies == {"layer": "quick"}
    choices = Choices(deterministic=True)  # control: without the clock, the count decides
    choices.pieces("layer", [Strategy("slow", 1.0, slow), Strategy("quick", 2.0, dict)])
    assert choices.strategies == {"layer": "slow"}
