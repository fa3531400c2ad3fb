"""What a membership test proves: a lower bound on ε from its successes and false alarms."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import stats


def proven_epsilon(members: np.ndarray, others: np.ndarray, *, delta: float, threshold: float) -> float:
    """The ε that the test "score above threshold" proves, with 99.9 % confidence (Clopper and Pearson).

    (ε, δ)-privacy means: true positive rate <= e^ε · false positive rate + δ.
    """
    hits, alarms = int((members > threshold).sum()), int((others > threshold).sum())
    true_positives = stats.beta.ppf(5e-4, hits, len(members) - hits + 1) if hits else 0.0
    false_positives = stats.beta.ppf(1 - 5e-4, alarms + 1, len(others) - alarms)
    return math.log((true_positives - delta) / false_positives) if true_positives > delta else -math.inf


def report(
    title: str, without: Callable[[], tuple[bool, str]], guarded: Callable[[], tuple[bool, str]]
) -> bool:
    """Run an attack without and with the safeguard, say what happened, and whether it went as it should."""
    succeeded, told = without()
    stopped, told_guarded = guarded()
    print(title)
    print(f"  without the safeguard: the attack {'SUCCEEDS' if succeeded else 'fails'}: {told}")
    print(f"  with the safeguard:    the attack {'SUCCEEDS' if stopped else 'fails'}: {told_guarded}")
    return succeeded and not stopped
