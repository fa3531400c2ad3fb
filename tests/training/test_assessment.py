"""The whole assessment: figures against scikit-learn, intervals over people, subgroups and gaps."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sklearn import metrics as oracle

from sfumato.training.assessment import Outputs, assess, gaps, subgroups
from sfumato.training.decision import Decision


def outputs(rows=240, classes=2, *, seed=0, decision=None, signal=1.5):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (rows,), generator=generator)
    logits = torch.randn(rows, classes, generator=generator)
    logits[torch.arange(rows), labels] += signal
    return Outputs(
        logits=logits,
        labels=labels,
        people=torch.arange(rows) // 3,
        classes=tuple("abcdefgh"[:classes]),
        decision=decision or Decision(),
    )


def test_two_classes_are_read_at_their_threshold_with_the_figures_of_medicine():
    given = outputs(decision=Decision(shift=(0.3, -0.3), threshold=0.35, positive=0))
    found = json.loads(json.dumps(assess(given), allow_nan=False))
    probability = given.probabilities[:, 0]
    ill, called = given.labels.numpy() == 0, probability >= 0.35
    measures = {name: entry["value"] for name, entry in found["measures"].items()}
    assert measures == pytest.approx(
        {
            "accuracy": oracle.accuracy_score(ill, called),
            "balanced_accuracy": oracle.balanced_accuracy_score(ill, called),
            "auc": oracle.roc_auc_score(ill, probability),
            "average_precision": oracle.average_precision_score(ill, probability),
            "sensitivity": oracle.recall_score(ill, called),
            "specificity": oracle.recall_score(~ill, ~called),
            "precision": oracle.precision_score(ill, called),
            "negative_predictive_value": oracle.precision_score(~ill, ~called),
            "f1": oracle.f1_score(ill, called),
            "mcc": oracle.matthews_corrcoef(ill, called),
        }
    )
    assert (found["positive"], found["threshold"], found["num_people"]) == ("a", 0.35, 80)
    for entry in found["measures"].values():
        assert entry["lower"] < entry["value"] < entry["upper"]
    assert found["classes"]["b"]["sensitivity"]["value"] == pytest.approx(measures["specificity"])
    roc = np.array(found["curves"]["a"]["roc"])
    assert np.trapezoid(roc[:, 1], roc[:, 0]) == pytest.approx(measures["auc"], abs=0.005)
    assert sum(found["calibration"]["counts"]) == 240


def test_several_classes_have_means_over_classes_and_each_its_own_figures():
    given = outputs(classes=5)
    found = assess(given)
    labels = given.labels.numpy()
    expected = oracle.roc_auc_score(labels, given.probabilities, multi_class="ovr")
    assert found["measures"]["auc"]["value"] == pytest.approx(expected)
    one = oracle.roc_auc_score(labels == 2, given.probabilities[:, 2])
    assert found["classes"]["c"]["auc"]["value"] == pytest.approx(one)
    assert found["threshold"] is None
    assert "sensitivity" not in found["measures"]


def test_intervals_are_wider_over_people_than_over_their_images():
    given = outputs(rows=300)
    copies = torch.arange(300) // 6 * 6  # six images of one person that say the same
    same = given.select(copies)
    people = Outputs(**{**same.__dict__, "people": copies})
    images = Outputs(**{**same.__dict__, "people": torch.arange(300)})

    def width(found):
        return found["measures"]["auc"]["upper"] - found["measures"]["auc"]["lower"]

    assert width(assess(people)) > 1.5 * width(assess(images))


def test_subgroups_are_assessed_alone_and_one_without_a_class_has_no_auc():
    given = outputs()
    words = ["f" if number % 2 else "m" for number in range(240)]
    found = subgroups(given, words)
    rows = torch.arange(1, 240, 2)
    assert found["f"]["measures"] == assess(given.select(rows))["measures"]
    assert (found["f"]["num_examples"], found["m"]["num_examples"]) == (120, 120)
    alone = subgroups(given, ["ill" if label else "well" for label in given.labels.tolist()])
    assert alone["ill"]["measures"]["auc"]["value"] is None
    assert alone["ill"]["measures"]["auc"]["lower"] is None


def test_a_gap_is_the_difference_on_the_same_images_with_a_paired_interval():
    worse, better = outputs(signal=1.0), outputs(signal=3.0)
    better = Outputs(**{**better.__dict__, "labels": worse.labels})
    found = gaps(worse, better)["auc"]
    expected = assess(better)["measures"]["auc"]["value"] - assess(worse)["measures"]["auc"]["value"]
    assert found["value"] == pytest.approx(expected)
    assert 0 < found["lower"] < found["upper"]
    nothing = gaps(worse, worse)["auc"]
    assert (nothing["value"], nothing["lower"], nothing["upper"]) == (0, 0, 0)
