"""Scores against slow, obvious references."""

from __future__ import annotations

import pytest
import torch

from sfumato.training.evaluation import evaluate, predict_logits, scores
from small_runs import SmallNet, small_set

NAMES = tuple("abcdefg")


def random_case(count=200, classes=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, classes, generator=generator)
    return logits, torch.randint(classes, (count,), generator=generator)


def test_accuracy_top5_and_confusion_agree_with_counting():
    logits, labels = random_case()
    result = scores(logits, labels, NAMES)
    rows = [(row.argmax().item(), row.argsort(descending=True)[:5].tolist()) for row in logits]
    truth = labels.tolist()
    assert result.accuracy == sum(best == true for (best, _), true in zip(rows, truth, strict=True)) / 200
    assert result.top5_accuracy == sum(true in top for (_, top), true in zip(rows, truth, strict=True)) / 200
    for true in range(7):
        for guess in range(7):
            pairs = sum(1 for (best, _), t in zip(rows, truth, strict=True) if (t, best) == (true, guess))
            assert result.confusion[true][guess] == pairs
    assert result.balanced_accuracy == pytest.approx(sum(result.per_class.values()) / 7)


def test_the_area_under_the_curve_is_the_share_of_ordered_pairs():
    logits, labels = random_case(classes=2, seed=3)
    logits = (logits * 2).round()  # ties
    margin = logits[:, 1] - logits[:, 0]
    positive, negative = margin[labels == 1], margin[labels == 0]
    wins = (positive[:, None] > negative).double() + 0.5 * (positive[:, None] == negative).double()
    result = scores(logits, labels, ("a", "b"))
    assert result.auc == pytest.approx(wins.mean().item())
    assert scores(-logits, labels, ("a", "b")).auc == pytest.approx(1 - wins.mean().item())


def test_a_class_without_images_has_no_score_and_small_problems_no_top5():
    logits, labels = random_case(classes=3)
    result = scores(logits[labels != 1], labels[labels != 1], NAMES[:3])
    assert result.per_class["b"] is None
    assert result.top5_accuracy is None
    assert result.auc is None


def test_a_majority_guess_is_not_balanced():
    labels = torch.tensor([0] * 90 + [1] * 10)
    logits = torch.tensor([[1.0, 0.0]]).repeat(100, 1)
    result = scores(logits, labels, ("common", "rare"))
    assert (result.accuracy, result.balanced_accuracy) == (0.9, 0.5)


def test_batches_do_not_change_the_logits_and_the_mode_is_restored():
    model, data = SmallNet().train(), small_set(33, seed=0)
    constants = {"mean": (0.5,), "std": (0.25,)}
    whole = predict_logits(model, data.images, **constants)
    parts = predict_logits(model, data.images, **constants, batch_size=5)
    assert torch.allclose(whole, parts, atol=1e-6)
    assert model.training
    assert evaluate(model, data, **constants).num_examples == 33
