"""White-box scores of gradient canaries: what the noisy sums of all steps show along each canary's vector.

Everything here is a function of the noisy sums, which are private for the real units: scores, plots and
bounds tell nothing more about them than the guarantee allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2
from scipy.stats import t as student_t

from sfumato.audit.mechanism import log_likelihood_ratio
from sfumato.audit.scores import Scores

MEASUREMENT_SHARE = 0.02  # of the allowed failures, for each of three measurements: 0.1 % at 95 %

Projections = NDArray[np.float64]  # (steps, canaries), in clip norms


def projection_scores(seen: Projections, *, sampling_rate: float, noise_multiplier: float) -> Scores:
    """The log-likelihood ratio of each canary's steps, once what the real units do there is taken out.

    Without real units in a canary's coordinates the ratio is the best score there is.
    """
    quiet = without_interference(seen, sampling_rate=sampling_rate, noise_multiplier=noise_multiplier)
    scores = log_likelihood_ratio(quiet.T, sampling_rate=sampling_rate, noise_multiplier=noise_multiplier)
    return np.clip(scores, -1e12, 1e12)  # a score beyond all numbers is certain


def without_interference(seen: Projections, *, sampling_rate: float, noise_multiplier: float) -> Projections:
    """``seen`` without the courses over time that stand out of the noise.

    Gradients of real units change slowly, so that along all canaries their courses are mixtures of a few.
    These are the principal components of the steps' deviations from each canary's mean that lie above
    the edge of pure noise (Marchenko and Pastur 1967); a canary that is in leaves no course but the
    chance of its draws. What goes with them in the means is found by regression. With nothing above
    the edge all stays as it is.
    """
    steps, canaries = seen.shape
    if steps < 3 or canaries < 3:
        return seen
    variance = noise_multiplier**2 + sampling_rate * (1 - sampling_rate) / 2
    means = seen.mean(0)
    deviations = seen - means
    centred = deviations - deviations.mean(1, keepdims=True)
    ratio = steps / canaries
    courses, sizes, _ = np.linalg.svd(centred / math.sqrt(canaries), full_matrices=False)
    loud = sizes**2 > variance * (1 + math.sqrt(ratio)) ** 2 * 1.05
    if not loud.any():
        return seen
    courses, squares = courses[:, loud], sizes[loud] ** 2
    middle = squares + variance * (1 - ratio)
    # the size that a component had before noise was added to it (Baik and Silverstein 2006)
    true = (middle + np.sqrt(np.maximum(middle**2 - 4 * squares * variance, 0))) / 2
    strengths = courses.T @ deviations  # (components, canaries)
    spread = strengths - strengths.mean(1, keepdims=True)
    slopes = spread @ (means - means.mean()) / np.square(spread).sum(1)
    shrunk = (1 - variance / true)[:, None] * strengths
    return seen - courses @ shrunk - slopes @ strengths


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What canaries show of the mechanism itself, each beside its bound."""

    noise_multiplier: float
    noise_upper: float
    sampling_rate: float
    rate_lower: float | None  # None: real gradients may react to canaries, and nothing is sure
    repeated_noise: int  # steps that had the noise of another step


def measure(
    seen: Projections,
    members: NDArray[np.bool_],
    *,
    noise_multiplier: float,
    silent: bool,
    failure_probability: float,
) -> Measured:
    """Noise, rate and repetitions from the projections on all canaries.

    Each bound fails with ``failure_probability`` at most. ``silent``: no real unit has a gradient along any
    canary, whatever the weights are.
    """
    noise, noise_upper = measured_noise(seen[:, ~members], failure_probability)
    rate, rate_lower = measured_rate(seen, members, failure_probability)
    return Measured(
        noise_multiplier=noise,
        noise_upper=noise_upper,
        sampling_rate=rate,
        rate_lower=rate_lower if silent else None,
        # where noise is too small as such, steps are compared by what there is of it
        repeated_noise=repeated_noise(seen[:, ~members], min(noise_multiplier, noise), failure_probability),
    )


def measured_noise(seen_out: Projections, failure_probability: float) -> tuple[float, float]:
    """The noise multiplier as the canaries that are out show it, and its upper bound.

    Real units can only make it look larger: a sum of squares grows with every mean that is added.
    """
    total, count = float(np.square(seen_out).sum()), seen_out.size
    if not count or not math.isfinite(total):
        return math.nan, math.inf
    return math.sqrt(total / count), math.sqrt(total / float(chi2.ppf(failure_probability, count)))


def measured_rate(
    seen: Projections, members: NDArray[np.bool_], failure_probability: float
) -> tuple[float, float]:
    """How far a canary that is in moves the sum in a step, in clip norms, and its lower bound.

    If all is as planned it is the sampling rate. The interval is Welch's for the difference of two means. It
    holds only if no real gradient reacts to a canary: one that follows it, downhill on a ridge of the loss,
    looks like a canary that comes more often.
    """
    inner, outer = (seen[:, side].mean(0) for side in (members, ~members))
    if min(len(inner), len(outer)) < 2:
        return math.nan, -math.inf
    rate = float(inner.mean() - outer.mean())
    shares = inner.var(ddof=1) / len(inner), outer.var(ddof=1) / len(outer)
    error = math.sqrt(sum(shares))
    if not 0 < error < math.inf:
        return rate, -math.inf
    freedom = sum(shares) ** 2 / (shares[0] ** 2 / (len(inner) - 1) + shares[1] ** 2 / (len(outer) - 1))
    return rate, rate - float(student_t.isf(failure_probability, freedom)) * error


def repeated_noise(seen_out: Projections, noise_multiplier: float, failure_probability: float) -> int:
    """Steps whose difference from an earlier one is smaller than one draw of noise can be.

    Real gradients may cancel the earlier step's noise, to which they react, but never what is drawn after
    them. So fresh noise alone has to explain the difference, of all pairs of steps together.
    """
    steps, count = seen_out.shape
    if steps < 2 or not count or not np.isfinite(seen_out).all():
        return 0
    least = float(chi2.ppf(failure_probability / (steps * (steps - 1) / 2), count)) * noise_multiplier**2
    squares = np.square(seen_out).sum(1)
    repeated = 0
    for step in range(1, steps):
        distances = squares[:step] + squares[step] - 2 * seen_out[:step] @ seen_out[step]
        repeated += bool(distances.min() < least)
    return repeated
