"""The average of the weights: warm-up, then exponential."""

from __future__ import annotations

import torch

from sfumato.training.averaging import WeightAverage
from small_runs import SmallNet


def set_all(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_the_average_follows_the_stated_decay():
    model = SmallNet()
    set_all(model, 0.0)
    average, expected = WeightAverage.start(model, decay=0.5), 0.0
    for step, value in enumerate((1.0, 4.0, -2.0, 3.0, 8.0, 1.0)):
        set_all(model, value)
        average.update(model)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
    assert torch.allclose(average.weights["head.bias"], torch.full((3,), expected))
    assert not torch.allclose(average.weights["head.bias"], torch.full((3,), 1.0))  # it is not the last


def test_decay_zero_releases_the_last_weights():
    model = SmallNet()
    average = WeightAverage.start(model, decay=0.0)
    set_all(model, 3.0)
    average.update(model)
    assert torch.equal(average.averaged(model).head.bias, torch.full((3,), 3.0))


def test_the_averaged_model_is_a_copy_and_keeps_frozen_parts():
    model = SmallNet()
    model.convolution.weight.requires_grad_(False)
    average = WeightAverage.start(model, decay=0.9)
    assert "convolution.weight" not in average.weights
    frozen = model.convolution.weight.clone()
    set_all(model, 7.0)
    model.convolution.weight.data.copy_(frozen)
    average.update(model)
    averaged = average.averaged(model)
    assert torch.equal(averaged.convolution.weight, frozen)
    assert torch.equal(model.head.bias, torch.full((3,), 7.0))
    assert not torch.equal(averaged.head.bias, model.head.bias)
