"""Small releases besides the steps: how many units there are of each class, and how their scores lie.

Each is one noisy sum over units, an event of the plan like any other. A unit gives the mean over its images
of a vector that has a single 1: whatever its images are, its share has norm at most 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sfumato.accounting import Event, SampledGaussian
from sfumato.errors import PrivacyError
from sfumato.noise import add_noise
from sfumato.privacy.plan import Plan
from sfumato.randomness import RandomSource
from sfumato.training.inputs import Units

SCORE_RANGE = 6.0  # log-odds beyond it are counted at its ends
NUM_BINS = 48
_WHOLE = 2**30  # a unit's whole share: in whole numbers, sums are exact


@dataclass(frozen=True, kw_only=True)
class PrivateRelease:
    """One noisy sum over all units: ``what`` was released, and its noise, one unit's share being 1."""

    what: str
    noise_multiplier: float

    @property
    def event(self) -> SampledGaussian:
        """What it costs, for ``Plan.extra_events``."""
        return SampledGaussian(noise_multiplier=self.noise_multiplier)


def check_counted(plan: Plan, releases: Sequence[PrivateRelease]) -> None:
    """Refuse a release that the plan does not count.

    Guarantee: on return each of ``releases`` has an event of its own among the plan's.
    """
    wanted: Counter[Event] = Counter(release.event for release in releases)
    missing = wanted - Counter(plan.extra_events)
    if missing:
        names = [release.what for release in releases if release.event in missing]
        raise PrivacyError(
            "uncounted-release",
            f"{names[0]} would be released, but the plan has no event for it.",
            why="ε would leave out what it tells about the private images.",
            fix="Plan it: Plan(extra_events=…), as run/planning.py does for what a recipe asks for.",
        )


def noisy_counts(
    cells: Tensor, num_cells: int, units: Units, release: PrivateRelease, *, source: RandomSource
) -> Tensor:
    """How many units lie in each cell, with noise; ``cells`` (images,) has the cell of each image.

    With ``cells`` (images, findings) each finding is counted in ``num_cells`` of its own, one finding after
    the other.

    Guarantee: however many images it has, one unit moves the sum by at most 1 in norm for each finding, by
    the root of their number in all; the noise has so many times ``release.noise_multiplier`` as its standard
    deviation. Account it as ``release.event``, once.
    """
    total = exact_counts(cells, num_cells, units)
    sensitivity = 1.0 if cells.ndim == 1 else math.nextafter(math.sqrt(cells.shape[1]), math.inf)
    noisy = add_noise(
        {"counts": total},
        stddev=release.noise_multiplier * sensitivity,
        source=source,
        step=0,
        purpose=release.what,
    )
    return noisy["counts"]


def exact_counts(cells: Tensor, num_cells: int, units: Units) -> Tensor:
    """The same without noise: sensitive. A unit with images in several cells counts in each by its share.

    Guarantee: one unit moves the sum by at most 1 in norm, exactly, for each column of ``cells``. Thirds
    added up in floating point would round the sums differently once a unit is there; shares are therefore
    whole numbers, rounded down, and float64 holds the result exactly for up to 2²³ units in a cell.
    """
    if cells.ndim == 2:
        return torch.cat([_column_counts(column, num_cells, units) for column in cells.T])
    return _column_counts(cells, num_cells, units)


def _column_counts(cells: Tensor, num_cells: int, units: Units) -> Tensor:
    sizes = units.offsets.diff()
    share = torch.empty(len(units.rows), dtype=torch.int64)
    share[units.rows] = (_WHOLE // sizes).repeat_interleave(sizes)
    return torch.zeros(num_cells, dtype=torch.int64).index_add_(0, cells, share).double() / _WHOLE


def prior_of_counts(counts: Sequence[float], noise: float) -> tuple[float, ...]:
    """Shares of the classes from noisy counts; a class that the noise hides is taken to be as large as it."""
    held = np.maximum(np.asarray(counts, dtype=np.float64), max(noise, 1.0))
    return tuple((held / held.sum()).tolist())


def finding_shares(counts: Sequence[float], noise: float) -> tuple[float, ...]:
    """How frequent each finding is, from noisy counts of units (without, with) for each."""
    table = np.asarray(counts, dtype=np.float64).reshape(-1, 2)
    return tuple(prior_of_counts(row.tolist(), noise * math.sqrt(len(table)))[1] for row in table)


def finding_thresholds(counts: Sequence[float], noise: float) -> tuple[float, ...]:
    """``threshold_of_histogram`` for each finding."""
    table = np.asarray(counts, dtype=np.float64).reshape(-1, 2 * NUM_BINS)
    return tuple(threshold_of_histogram(row.tolist(), noise * math.sqrt(len(table))) for row in table)


def score_cells(log_odds: Tensor, positive: Tensor) -> Tensor:
    """The cell of each image in a histogram of log-odds: NUM_BINS for negative ones, then for positive.

    Both are of one shape: (images,), or (images, findings).
    """
    place = ((log_odds.double() + SCORE_RANGE) * (NUM_BINS / (2 * SCORE_RANGE))).nan_to_num(0.0)
    inside = place.clamp(
        0, NUM_BINS - 1
    )  # before it is whole: what int64 cannot hold would come out negative
    return inside.long() + NUM_BINS * positive.long()


def threshold_of_histogram(counts: Sequence[float], noise: float) -> float:
    """The probability above which calling positive gives the best balanced accuracy, by a noisy histogram.

    The best edge of the histogram as it is would follow its noise, so that it is smoothed first. That is
    arithmetic on a released value and costs nothing.
    """
    table = np.asarray(counts, dtype=np.float64).reshape(2, NUM_BINS)
    edges = np.linspace(-SCORE_RANGE, SCORE_RANGE, NUM_BINS + 1)
    smooth = np.array([_smoothed(row, noise) for row in table])
    below = np.cumsum(smooth, axis=1)[:, :-1] / smooth.sum(1, keepdims=True)
    balanced = (below[0] + 1 - below[1]) / 2  # specificity and sensitivity at each inner edge
    best = float(edges[1 + int(balanced.argmax())])
    return float(1 / (1 + np.exp(-best)))


def _smoothed(row: np.ndarray, noise: float) -> np.ndarray:
    """A histogram without the jags of its noise: smoothed by its neighbours, nothing below zero."""
    width = 1.5
    reach = np.arange(-6, 7)
    kernel = np.exp(-0.5 * (reach / width) ** 2)
    padded = np.pad(row, 6, mode="edge")
    smooth = np.convolve(padded, kernel / kernel.sum(), mode="valid")
    return np.maximum(smooth, noise / len(row))
