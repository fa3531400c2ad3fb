"""Threshold and temperature from images that are public: whoever calls it has made sure of that."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sfumato.errors import DataError
from sfumato.training.metrics import curve, fit_temperature

FEWEST = 20  # images of either class below which a threshold would follow single images


def fitted_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature of Guo et al. 2017; 1 if there are too few images to tell."""
    if len(labels) < 2 * FEWEST:
        return 1.0
    return fit_temperature(logits.double().numpy(), labels.numpy())


def public_threshold(logits: Tensor, labels: Tensor, *, positive: int, asked: bool) -> float | None:
    """The probability of the positive class above which balanced accuracy is best; None with too few images.

    Few images are refused if the threshold was ``asked`` for.
    """
    log_odds = logits[:, positive] - logits[:, 1 - positive]
    return best_threshold(log_odds, labels == positive, asked=asked)


def best_threshold(log_odds: Tensor, positive: Tensor, *, asked: bool) -> float | None:
    """The same of one finding, or of one class against the other.

    It lies half way to the next score, so that an image of exactly that score decides nothing.
    """
    is_positive = positive.numpy()
    fewest = int(min(is_positive.sum(), (~is_positive).sum()))
    if fewest < FEWEST:
        if not asked:
            return None
        raise DataError(
            "few-validation-images",
            f"there are {fewest} public validation images of one class.",
            why=f"A threshold chosen on fewer than {FEWEST} of either class follows single images.",
            fix="Add public images to val/, or leave decision.threshold at auto.",
        )
    counts = curve(is_positive, log_odds.double().numpy())
    best = int(np.argmax(counts.sensitivity - counts.false_positive_rate))
    ends = np.append(counts.thresholds, counts.thresholds[-1] - 1)
    cut = ends[best] if best == 0 else (ends[best] + ends[best + 1]) / 2
    return float(np.clip(1 / (1 + np.exp(-cut)), 1e-6, 1 - 1e-6))
