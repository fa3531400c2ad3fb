"""The passes leave no trace on the model, and refuse what they could only get wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.errors import ConfigError, ModelError, PrivacyError, SfumatoError
from sfumato.gradients import Choices, clipped_sum


def small_model() -> nn.Sequential:
    torch.manual_seed(12)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6), nn.Linear(6, 3)
    )


def footprint(model: nn.Module) -> tuple:
    """Everything about a model that a pass must leave as it was."""
    modules = [
        (name, module.training, len(module._forward_hooks), len(module._backward_hooks), sorted(vars(module)))
        for name, module in model.named_modules()
    ]
    parameters = [
        (name, id(value), value.requires_grad, value.grad, value._version, sorted(vars(value)))
        for name, value in model.named_parameters()
    ]
    return modules, parameters, list(model.state_dict())


def test_nothing_is_left_on_the_model():
    model = small_model()
    model[0].weight.requires_grad_(False)
    before = footprint(model)
    clipped_sum(model, torch.randn(5, 2, 4, 4), torch.arange(5) % 3, clip_norm=1.0)
    assert footprint(model) == before
    assert all(value.grad is None for value in model.parameters())
    model[4].register_forward_hook(lambda *_: None)  # control: a hook would have been seen
    assert footprint(model) != before


def test_nothing_is_left_on_the_model_after_an_error():
    model, images = small_model(), torch.randn(5, 2, 4, 4)
    before = footprint(model)

    def loss(outputs, targets):
        raise ValueError("no loss today")

    with pytest.raises(ValueError, match="today"):
        clipped_sum(model, images, torch.arange(5) % 3, clip_norm=1.0, loss=loss)
    with pytest.raises(RuntimeError):
        clipped_sum(model, torch.randn(5, 7, 4, 4), torch.arange(5) % 3, clip_norm=1.0)
    assert footprint(model) == before


def test_gradients_switched_off_around_the_call_change_nothing():
    model, images, targets = small_model(), torch.randn(5, 2, 4, 4), torch.arange(5) % 3
    expected = clipped_sum(model, images, targets, clip_norm=1.0)
    with torch.no_grad():
        total = clipped_sum(model, images, targets, clip_norm=1.0)
    torch.testing.assert_close(total.norms, expected.norms)
    torch.testing.assert_close(total.gradients, expected.gradients)


def test_results_carry_no_graph():
    total = clipped_sum(small_model(), torch.randn(5, 2, 4, 4), torch.arange(5) % 3, clip_norm=1.0)
    tensors = [*total.gradients.values(), total.norms, total.losses]
    assert not any(value.requires_grad for value in tensors)
    assert total.norms.dtype == torch.float64
    assert (total.norms > 0).all()


def test_the_inputs_may_require_gradients_and_stay_as_they_are():
    model, images = small_model(), torch.randn(5, 2, 4, 4, requires_grad=True)
    version = images._version
    clipped_sum(model, images, torch.arange(5) % 3, clip_norm=1.0)
    assert images.grad is None
    assert images._version == version


def test_only_trained_parameters_have_gradients():
    model = small_model()
    model[0].requires_grad_(False)
    total = clipped_sum(model, torch.randn(5, 2, 4, 4), torch.arange(5) % 3, clip_norm=1.0)
    assert list(total.gradients) == ["1.weight", "1.bias", "4.weight", "4.bias", "5.weight", "5.bias"]
    model[5].requires_grad_(False)  # between two calls, as gradual unfreezing does
    model[0].requires_grad_(True)
    total = clipped_sum(model, torch.randn(5, 2, 4, 4), torch.arange(5) % 3, clip_norm=1.0)
    assert "0.weight" in total.gradients
    assert "5.weight" not in total.gradients


def refused(model: nn.Module, inputs: torch.Tensor, kind: type[SfumatoError] = ModelError) -> SfumatoError:
    with pytest.raises(kind) as caught:
        clipped_sum(model, inputs, torch.arange(len(inputs)) % 3, clip_norm=1.0)
    return caught.value


class Overwrites(nn.Module):
    """Changes a layer's input after the layer has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = x + 0
        y = self.first(x)
        x.mul_(2)
        return self.second(torch.tanh(y) + x)


def test_an_input_that_was_overwritten_is_refused_by_name():
    error = refused(Overwrites(), torch.randn(4, 4))
    assert error.code == "changed-in-place"
    assert "first (Linear)" in str(error)


class LosesRows(nn.Module):
    """Returns one output for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.mean(dim=0, keepdim=True))


def test_a_model_whose_output_loses_the_rows_is_refused():
    assert refused(LosesRows(), torch.randn(4, 4)).code == "no-rows"


def test_batch_norm_that_mixes_examples_is_refused_and_frozen_is_not():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    images = torch.randn(5, 2, 4, 4)
    assert refused(model, images, PrivacyError).code == "mixes-examples"
    clipped_sum(model.eval(), images, torch.arange(5) % 3, clip_norm=1.0)


def test_a_model_without_trained_parameters_is_refused():
    error = refused(nn.Linear(4, 3).requires_grad_(False), torch.randn(2, 4), ConfigError)
    assert error.code == "nothing-to-train"


def test_the_loss_is_applied_to_each_row_on_its_own():
    model, images, targets = small_model(), torch.randn(5, 2, 4, 4), torch.arange(5) % 3

    def batch_mean(outputs, labels):
        return F.cross_entropy(outputs, labels)  # over a batch it would divide by the number of rows

    own = clipped_sum(model, images, targets, clip_norm=1.0, loss=batch_mean)
    standard = clipped_sum(model, images, targets, clip_norm=1.0)
    torch.testing.assert_close(own.norms, standard.norms)
    torch.testing.assert_close(own.losses, standard.losses)


def test_claims_follow_the_model_when_a_layer_is_replaced():
    model, choices = small_model(), Choices()
    images, targets = torch.randn(5, 2, 4, 4), torch.arange(5) % 3
    clipped_sum(model, images, targets, clip_norm=1.0, choices=choices)
    model[5] = nn.Linear(6, 3)  # a new head under the old name
    found = clipped_sum(model, images, targets, clip_norm=1.0, choices=choices)
    fresh = clipped_sum(model, images, targets, clip_norm=1.0, choices=Choices())
    torch.testing.assert_close(found.norms, fresh.norms)
    torch.testing.assert_close(found.gradients, fresh.gradients)
