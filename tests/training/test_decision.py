"""From outputs to a class: prevalence by Bayes' rule, thresholds, and class weights under the clip."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from sfumato.errors import ConfigError, DataError
from sfumato.gradients import clipped_sum
from sfumato.training.components import WeightedLoss
from sfumato.training.decision import (
    MOST_WEIGHT,
    Decision,
    logit_shift,
    positive_class,
    shares_of_classes,
    weights_of_classes,
)
from sfumato.training.head import SoftmaxRegression
from sfumato.training.private_counts import prior_of_counts
from sfumato.training.thresholds import fitted_temperature, public_threshold


def test_the_shift_turns_one_prevalence_into_another_by_bayes_rule():
    trained, use = np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.3, 0.1])
    likelihood = np.random.default_rng(0).random((50, 3))
    logits = torch.from_numpy(np.log(likelihood * trained))
    shift = logit_shift(tuple(trained), None, tuple(use))
    found = Decision(shift=shift).correct(logits).softmax(1).numpy()
    expected = likelihood * use
    assert found == pytest.approx(expected / expected.sum(1, keepdims=True))
    assert Decision().correct(logits).softmax(1).numpy() != pytest.approx(found, abs=0.01)


def test_weights_in_the_loss_count_as_part_of_what_the_training_saw():
    prior = (0.8, 0.2)
    balanced = weights_of_classes("balanced", prior, num_classes=2)
    assert balanced == pytest.approx((0.625, 2.5))
    assert sum(w * share for w, share in zip(balanced, prior, strict=True)) == pytest.approx(1)
    assert logit_shift(prior, balanced, None) == pytest.approx((0, 0))  # nothing is corrected twice
    assert logit_shift(prior, None, None) == pytest.approx((-math.log(2), math.log(2)))
    assert logit_shift(None, None, None) is None


def test_a_class_that_released_counts_find_nearly_empty_gets_the_most_weight_and_no_refusal():
    prior = prior_of_counts([25000.0, 3.0], 1.0)
    rare = weights_of_classes("balanced", prior, num_classes=2)
    assert rare[1] / rare[0] == pytest.approx(MOST_WEIGHT)
    assert sum(w * share for w, share in zip(rare, prior, strict=True)) == pytest.approx(1)


def test_a_threshold_decides_between_two_classes_and_the_largest_output_otherwise():
    logits = torch.tensor([[0.0, 0.5], [0.0, -0.5], [0.0, 3.0]])
    assert Decision().choose(logits).tolist() == [1, 0, 1]
    assert Decision(threshold=0.9).choose(logits).tolist() == [0, 0, 1]
    assert Decision(threshold=0.3).choose(logits).tolist() == [1, 1, 1]
    assert Decision(threshold=0.3, positive=0).choose(logits).tolist() == [0, 0, 1]
    assert Decision(threshold=0.3).choose(torch.eye(3)).tolist() == [0, 1, 2]
    assert Decision(temperature=2.0).correct(logits).tolist() == (logits / 2).tolist()


def test_a_decision_survives_its_file_and_one_that_does_not_fit_is_refused():
    decision = Decision(shift=(0.5, -0.5), temperature=1.5, threshold=0.3, positive=0)
    assert Decision.from_dict(decision.as_dict(), num_classes=2) == decision
    assert Decision.from_dict(None, num_classes=7) == Decision()
    with pytest.raises(ValueError, match="2 values for 3 classes"):
        Decision.from_dict(decision.as_dict(), num_classes=3)
    with pytest.raises(ValueError, match="positive is 5"):
        Decision.from_dict({**decision.as_dict(), "shift": None, "positive": 5}, num_classes=2)


@pytest.mark.parametrize("declared", [(0.5,), (0.5, 0.6), (1.0, 0.0), (0.2, 0.3, 0.5)])
def test_shares_that_do_not_fit_the_classes_are_refused(declared):
    with pytest.raises(ConfigError, match="bad-prevalence"):
        shares_of_classes(declared, setting="data.prevalence", num_classes=4, positive=1)
    assert shares_of_classes(0.3, setting="", num_classes=2, positive=1) == pytest.approx((0.7, 0.3))
    assert shares_of_classes(0.3, setting="", num_classes=2, positive=0) == pytest.approx((0.3, 0.7))


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0), (1.0, 2000.0)])
def test_class_weights_that_do_not_fit_are_refused(weights):
    with pytest.raises(ConfigError, match="bad-class-weights"):
        weights_of_classes(weights, None, num_classes=2)
    assert positive_class("ill", ("healthy", "ill")) == 1
    with pytest.raises(ConfigError, match="unknown-positive"):
        positive_class("sick", ("healthy", "ill"))


def test_weighted_sums_are_equal_by_the_engine_in_closed_form_and_by_autograd():
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(40, 6, generator=generator) * 2
    targets = torch.randint(3, (40,), generator=generator)
    model = torch.nn.Linear(6, 3)
    weights, clip = (0.2, 1.0, 5.0), 1.5
    total = {"weight": torch.zeros(3, 6), "bias": torch.zeros(3)}
    for row, target in zip(rows, targets, strict=True):  # the slow, obvious way
        model.zero_grad()
        loss = weights[int(target)] * cross_entropy(model(row[None]), target[None])
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        for name, parameter in model.named_parameters():
            total[name] += parameter.grad * min(1.0, clip / norm)
    engine = clipped_sum(
        model, rows, targets, clip_norm=clip, loss=WeightedLoss(loss=cross_entropy, class_weights=weights)
    )
    closed = SoftmaxRegression(rows, targets, num_classes=3, class_weights=weights)(
        model.weight.detach(), model.bias.detach(), clip_norm=clip
    )
    plain = clipped_sum(model, rows, targets, clip_norm=clip)
    for name, expected in total.items():
        assert torch.allclose(engine.gradients[name].float(), expected, atol=1e-4)
        assert torch.allclose(closed.gradients[name].float(), expected, atol=1e-4)
        assert not torch.allclose(plain.gradients[name].float(), expected, atol=1e-2)
    assert closed.norms == pytest.approx(engine.norms, rel=1e-4)
    assert closed.sensitivity == engine.sensitivity == clip


def test_a_public_threshold_is_the_best_one_and_few_images_choose_none():
    random = np.random.default_rng(2)
    labels = torch.from_numpy((random.random(400) < 0.3).astype(np.int64))
    margin = torch.from_numpy(random.normal(size=400)) + 2 * labels + 1
    logits = torch.stack([torch.zeros(400), margin], 1)
    chosen = public_threshold(logits, labels, positive=1, asked=True)

    def balanced(threshold):
        called = Decision(threshold=threshold).choose(logits)
        return sum(float((called == labels)[labels == c].double().mean()) for c in (0, 1)) / 2

    assert balanced(chosen) >= max(balanced(t) for t in np.linspace(0.01, 0.99, 99)) - 1e-9
    assert balanced(0.5) < balanced(chosen) - 0.05
    assert public_threshold(logits[:50], labels[:50], positive=1, asked=False) is None
    with pytest.raises(DataError, match="few-validation-images"):
        public_threshold(logits[:50], labels[:50], positive=1, asked=True)
    assert fitted_temperature(logits[:30], labels[:30]) == 1.0
