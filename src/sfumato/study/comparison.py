"""What paired runs show: the mean difference of two conditions over common seeds, with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median, stdev

from sfumato.recipes.families import Comparison, Statistic
from sfumato.recipes.recipe import Recipe
from sfumato.study.conditions import Condition

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One condition minus another, in points, over the seeds that both have."""

    mean: float
    lower: float | None  # None: fewer than two pairs
    upper: float | None
    num_pairs: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.lower is not None and self.upper is not None and not self.lower <= 0 <= self.upper


def paired_difference(
    first: Mapping[int, float], second: Mapping[int, float], *, confidence: float = CONFIDENCE
) -> Difference | None:
    """Mean of first - second by seed, with Student's interval; None without a common seed.

    Guarantee: if the differences are independent and normal, the interval holds their mean with probability
    ``confidence``, however much the seeds themselves differ.
    """
    from scipy.stats import t as student

    pairs = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    if not pairs:
        return None
    mean = fmean(pairs)
    if len(pairs) < 2:
        return Difference(mean=mean, lower=None, upper=None, num_pairs=len(pairs))
    half = float(student.ppf((1 + confidence) / 2, len(pairs) - 1)) * stdev(pairs) / sqrt(len(pairs))
    return Difference(mean=mean, lower=mean - half, upper=mean + half, num_pairs=len(pairs))


def summary(values: Sequence[float], statistic: Statistic) -> float:
    """The paper's statistic of our runs."""
    if statistic == "best":
        return max(values)
    return median(values) if statistic == "median" else fmean(values)


def pairs_of(conditions: Sequence[Condition], compare: Comparison) -> list[tuple[Condition, Condition]]:
    """The conditions to compare: within a column each with the previous, the first or the last row."""
    columns: dict[str, list[Condition]] = {}
    for condition in conditions:
        columns.setdefault(condition.column, []).append(condition)
    found = []
    for rows in columns.values():
        if compare == "previous":
            found += list(zip(rows[1:], rows[:-1], strict=True))
        elif compare == "first":
            found += [(row, rows[0]) for row in rows[1:]]
        elif compare == "last":
            found += [(row, rows[-1]) for row in rows[:-1]]
    return found


def shared_draws(one: Recipe, other: Recipe) -> tuple[str, ...]:
    """What two runs with one seed have in common, of what is drawn at random.

    Batches are drawn step by step from the sampling rate, noise and first weights from the shapes of the net,
    views from image and step; a run with more steps begins like the shorter one.
    """
    same_images = (one.data.name, one.data.holdout) == (other.data.name, other.data.holdout)
    same_batches = (one.training.batch_size, one.privacy.sampling) == (
        other.training.batch_size,
        other.privacy.sampling,
    )
    same_net = (one.model.name, one.model.options) == (other.model.name, other.model.options)
    shared = {
        "batches": same_images and same_batches,
        "first weights": same_net,
        "noise": same_net and one.privacy.enabled and other.privacy.enabled,
        "views": same_images and one.augmentation == other.augmentation and one.augmentation.views > 0,
    }
    return tuple(name for name, same in shared.items() if same)
