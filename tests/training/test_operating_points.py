"""The operating point of another place: right for shifted scores, hardly moved by a wrong prevalence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from sfumato.errors import DataError
from sfumato.training.decision import Decision
from sfumato.training.operating_points import matching_shift, middle, moved_decision


def two_heaps(*, below=2.0, above=5.0, prevalence=0.3, number=2000, seed=0):
    """Log-odds of a place where all scores are shifted upwards, and who is ill."""
    random = np.random.default_rng(seed)
    ill = np.arange(number) < prevalence * number
    return random.normal(np.where(ill, above, below), 1.0), ill


def balanced_accuracy(called, ill):
    return (called[ill].mean() + (~called[~ill]).mean()) / 2


def likeliest_middle(scores, prevalence):
    """The oracle: the same likelihood, its largest value looked for by a general minimiser over a grid."""
    best = (np.inf, 0.0)
    for distance in np.linspace(1, 6, 51):
        for spread in np.linspace(0.6, 2, 15):

            def loss(centre, distance=distance, spread=spread):
                upper = prevalence * norm.pdf(scores, centre + distance / 2, spread)
                lower = (1 - prevalence) * norm.pdf(scores, centre - distance / 2, spread)
                return -np.log(upper + lower).sum()

            found = minimize_scalar(loss, bounds=(scores.min(), scores.max()), method="bounded")
            best = min(best, (found.fun, found.x))
    return best[1]


def test_the_middle_is_that_of_the_likeliest_mixture():
    scores, _ = two_heaps(number=400)
    found = middle(scores, np.ones(400), 0.3)
    assert found == pytest.approx(likeliest_middle(scores, 0.3), abs=0.03)
    assert abs(found - np.quantile(scores, 0.7)) > 0.03  # the control: the declared share's cut is another


@pytest.mark.parametrize("declared", [0.2, 0.3, 0.4])
def test_shifted_scores_are_told_apart_again_also_by_a_wrong_prevalence(declared):
    scores, ill = two_heaps()
    best = max(balanced_accuracy(scores >= cut, ill) for cut in scores[::5])
    cut = middle(scores, np.ones(len(scores)), declared)
    assert balanced_accuracy(scores >= cut, ill) > best - 0.01
    assert balanced_accuracy(scores >= 0, ill) < 0.6  # the control: as the training patients had it
    if declared != 0.3:  # and what the share of those called would make of the wrong prevalence
        share = np.quantile(scores, 1 - declared)
        assert balanced_accuracy(scores >= share, ill) < best - 0.015


def test_an_image_that_counts_twice_is_as_two_images():
    scores, _ = two_heaps(number=300)
    counts = np.where(np.arange(300) % 3 == 0, 2.0, 1.0)
    repeated = np.repeat(scores, counts.astype(int))
    weighted = middle(scores, counts, 0.3)
    assert weighted == pytest.approx(middle(repeated, np.ones(len(repeated)), 0.3), abs=1e-5)
    assert weighted != pytest.approx(middle(scores, np.ones(300), 0.3), abs=1e-5)


def test_two_classes_are_called_from_one_half_on_whichever_is_positive():
    scores, ill = two_heaps()
    for positive in (0, 1):
        columns = [np.zeros_like(scores), np.zeros_like(scores)]
        columns[positive] = scores
        logits = torch.tensor(np.stack(columns, axis=1))
        decision = Decision(shift=(0.25, -0.25), temperature=2.0, threshold=0.6, positive=positive)
        corrected = decision.correct(logits)
        prevalence = (0.3, 0.7) if positive == 0 else (0.7, 0.3)
        ones = torch.ones(len(scores))
        after, moved = moved_decision(decision, corrected, ones, prevalence, several=False)
        called = (after.choose(after.correct(logits)) == positive).numpy()
        assert balanced_accuracy(called, ill) > 0.92
        assert after.threshold == 0.5
        assert after.temperature == 2.0
        assert sum(moved) == pytest.approx(0)
        as_before = (decision.choose(corrected) == positive).numpy()
        assert balanced_accuracy(as_before, ill) < 0.9


def test_each_finding_has_a_point_of_its_own():
    first, with_first = two_heaps()
    second, with_second = two_heaps(below=-6.0, above=-3.0, prevalence=0.5, seed=1)
    logits = torch.tensor(np.stack([first, second], axis=1))
    decision = Decision(positive=0, thresholds=(0.9, 0.1))
    after, _ = moved_decision(decision, logits, torch.ones(len(first)), (0.3, 0.5), several=True)
    assert after.thresholds is None
    found = after.found(after.correct(logits)).numpy()
    for column, ill in ((0, with_first), (1, with_second)):
        assert balanced_accuracy(found[:, column], ill) > 0.92
    before = decision.found(logits).numpy()
    assert balanced_accuracy(before[:, 1], with_second) < 0.8


def test_mean_probabilities_of_many_classes_become_the_declared_ones():
    random = np.random.default_rng(2)
    logits, wanted = random.normal(0, 3, (500, 4)) + [4, 0, 0, -2], (0.1, 0.2, 0.3, 0.4)
    counts = random.uniform(0.5, 1, 500)

    def mean(shift):
        chances = torch.tensor(logits + shift).softmax(1).numpy()
        return counts @ chances / counts.sum()

    shift = matching_shift(logits, counts, wanted)
    assert mean(shift) == pytest.approx(wanted, abs=1e-5)
    assert mean(np.zeros(4)) != pytest.approx(wanted, abs=0.1)
    assert sum(shift) == pytest.approx(0, abs=1e-9)


def test_scores_that_tell_nothing_give_no_operating_point():
    for scores in (np.ones(100), np.append(np.arange(99.0), np.inf)):
        with pytest.raises(DataError, match="no-operating-point"):
            middle(scores, np.ones(100), 0.5)
    logits = torch.tensor([[0.0, 5e3], [0.0, 6e3]] * 50)
    with pytest.raises(DataError, match="beyond"):
        moved_decision(Decision(), logits, torch.ones(100), (0.5, 0.5), several=False)
