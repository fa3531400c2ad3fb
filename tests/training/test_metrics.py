"""Measures against scikit-learn, and intervals against what they claim to cover."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax
from sklearn import metrics as oracle

from sfumato.errors import ConfigError
from sfumato.training import metrics


def case(rows=300, seed=0, *, ties=True):
    random = np.random.default_rng(seed)
    positive = random.random(rows) < 0.3
    scores = random.normal(size=rows) + positive
    return positive, np.round(scores, 1) if ties else scores, random.integers(0, 4, rows).astype(float)


def test_roc_and_precision_recall_agree_with_scikit_learn_with_and_without_weights():
    for seed in range(5):
        positive, scores, weights = case(seed=seed)
        for counts in (None, weights):
            area = metrics.area_under_roc(positive, scores, counts)
            assert area == pytest.approx(oracle.roc_auc_score(positive, scores, sample_weight=counts))
            precision = metrics.average_precision(positive, scores, counts)
            assert precision == pytest.approx(
                oracle.average_precision_score(positive, scores, sample_weight=counts)
            )
        ours = metrics.curve(positive, scores)
        false_rate, true_rate, thresholds = oracle.roc_curve(positive, scores, drop_intermediate=False)
        assert ours.false_positive_rate == pytest.approx(false_rate)
        assert ours.sensitivity == pytest.approx(true_rate)
        assert ours.thresholds == pytest.approx(thresholds)
        assert metrics.area_under_roc(~positive, scores) != pytest.approx(area)


def test_an_operating_point_agrees_with_scikit_learn():
    positive, scores, weights = case(seed=7)
    called = scores >= 0.4
    point = metrics.operating_point(positive, called, weights)
    expected = {
        "sensitivity": oracle.recall_score(positive, called, sample_weight=weights),
        "specificity": oracle.recall_score(~positive, ~called, sample_weight=weights),
        "balanced_accuracy": oracle.balanced_accuracy_score(positive, called, sample_weight=weights),
        "precision": oracle.precision_score(positive, called, sample_weight=weights),
        "negative_predictive_value": oracle.precision_score(~positive, ~called, sample_weight=weights),
        "f1": oracle.f1_score(positive, called, sample_weight=weights),
        "mcc": oracle.matthews_corrcoef(positive, called, sample_weight=weights),
    }
    assert point == pytest.approx(expected)
    assert metrics.operating_point(positive, scores >= 0.5, weights) != pytest.approx(expected)


def test_measures_over_several_classes_agree_with_scikit_learn():
    random = np.random.default_rng(1)
    labels, predicted = random.integers(0, 5, 400), random.integers(0, 5, 400)
    predicted = np.where(random.random(400) < 0.5, labels, predicted)
    weights = random.integers(0, 3, 400).astype(float)
    matrix = metrics.confusion(labels, predicted, 5, weights)
    assert matrix == pytest.approx(oracle.confusion_matrix(labels, predicted, sample_weight=weights))
    assert metrics.overall(matrix) == pytest.approx(
        {
            "accuracy": oracle.accuracy_score(labels, predicted, sample_weight=weights),
            "balanced_accuracy": oracle.balanced_accuracy_score(labels, predicted, sample_weight=weights),
            "f1": oracle.f1_score(labels, predicted, average="macro", sample_weight=weights),
            "mcc": oracle.matthews_corrcoef(labels, predicted, sample_weight=weights),
        }
    )


def test_many_weights_at_once_are_the_same_as_one_after_another():
    positive, scores, _ = case()
    labels, predicted = positive.astype(int), (scores > 0.3).astype(int)
    many = np.random.default_rng(3).integers(0, 3, (4, len(scores))).astype(float)
    for measure in (metrics.area_under_roc, metrics.average_precision):
        assert measure(positive, scores, many) == pytest.approx(
            [float(measure(positive, scores, row)) for row in many]
        )
    together = metrics.overall(metrics.confusion(labels, predicted, 2, many))
    point = metrics.operating_point(positive, scores > 0.3, many)
    assert together["balanced_accuracy"] == pytest.approx(point["balanced_accuracy"])
    assert together["mcc"] == pytest.approx(point["mcc"])


def test_what_is_not_defined_is_not_a_number():
    scores = np.array([0.1, 0.2, 0.3])
    nobody, all_of_them = np.zeros(3, bool), np.ones(3, bool)
    for positive in (nobody, all_of_them):
        assert np.isnan(metrics.area_under_roc(positive, scores))
    assert np.isnan(metrics.average_precision(nobody, scores))
    assert np.isnan(metrics.operating_point(nobody, scores > 0.2)["sensitivity"])
    assert np.isnan(metrics.area_under_roc(np.zeros(0, bool), np.zeros(0)))


def test_calibration_is_read_from_bins_and_temperature_undoes_a_known_one():
    random = np.random.default_rng(5)
    logits = random.normal(size=(20_000, 3)) * 2
    labels = (softmax(logits, axis=1).cumsum(1) > random.random((20_000, 1))).argmax(1)
    assert metrics.fit_temperature(logits * 2.5, labels) == pytest.approx(2.5, rel=0.03)
    probability = softmax(logits, axis=1)[:, 0]
    happened = labels == 0
    honest = metrics.calibration(happened, probability)
    assert honest.error < 0.02
    assert metrics.calibration(happened, softmax(logits * 2.5, axis=1)[:, 0]).error > 0.05
    inside = (probability >= 0.2) & (probability < 0.3)
    assert honest.observed[2] == pytest.approx(happened[inside].mean())
    assert metrics.brier_score(happened, probability) == pytest.approx(
        oracle.brier_score_loss(happened, probability)
    )


def test_intervals_draw_people_and_cover_the_truth_about_as_often_as_they_say():
    truth, covered_by_people, covered_by_images = 0.5, 0, 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        value = np.repeat(random.random(40), 10)  # ten images of one person say the same thing
        people = np.repeat(np.arange(40), 10)

        def mean(weights, value=value):
            return (weights * value).sum(-1) / weights.sum(-1)

        found = metrics.interval(mean, people, num_resamples=200)
        covered_by_people += found.lower <= truth <= found.upper
        found = metrics.interval(mean, np.arange(400), num_resamples=200)
        covered_by_images += found.lower <= truth <= found.upper
    assert 175 <= covered_by_people <= 199
    assert covered_by_images < 120  # images as if they were people: far too narrow


def test_intervals_leave_out_resamples_without_a_value_and_refuse_senseless_requests():
    positive, scores = np.array([True, False, False]), np.array([0.9, 0.1, 0.2])
    found = metrics.interval(lambda weights: metrics.area_under_roc(positive, scores, weights), np.arange(3))
    assert (found.lower, found.upper) == (1.0, 1.0)
    nothing = metrics.interval(lambda weights: np.full(len(weights), np.nan), np.arange(3))
    assert np.isnan(nothing.lower)
    with pytest.raises(ConfigError, match="bad-resamples"):
        metrics.interval(lambda weights: weights.sum(-1), np.arange(3), num_resamples=0)
