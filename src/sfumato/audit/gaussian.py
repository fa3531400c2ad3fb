"""Scores that are Gaussian on both sides: a sharper bound of μ, and the total variation of two fits."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import nctdtr, ndtr, ndtri

from sfumato.accounting import check_delta
from sfumato.audit.bounds import Bound, epsilon_of_mu
from sfumato.audit.scores import check_confidence, check_scores
from sfumato.errors import ConfigError


def gaussian_scores_bound(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    known_stddev: float | None = None,
) -> Bound:
    """μ = (difference of means) / stddev from below, if both sides are Gaussian with one standard deviation.

    Guarantee: under that assumption the bound exceeds the true μ with probability at most 1 − ``confidence``,
    exactly, for every number of scores (noncentral t; normal with ``known_stddev``). The assumption is yours:
    it holds for the projection of one full-batch Gaussian sum on the canary, not for losses of trained models
    nor for sampled batches. A ``known_stddev`` that the noise does not have falsifies the bound.
    """
    check_delta(delta)
    failure_probability = check_confidence(confidence)
    scores_in, scores_out = check_scores(scores_in, scores_out, at_least=1 if known_stddev else 2)
    # One standard error of the difference, in standard deviations of a score.
    error = math.sqrt(1 / len(scores_in) + 1 / len(scores_out))
    difference = float(scores_in.mean() - scores_out.mean())
    if known_stddev is not None:
        if not (math.isfinite(known_stddev) and known_stddev > 0):
            raise ConfigError(
                "bad-known-stddev",
                f"known_stddev is {known_stddev}, but a standard deviation is finite and above 0.",
                fix="Leave it out to estimate it from the scores.",
            )
        mu = max(0.0, difference / known_stddev + error * float(ndtri(failure_probability)))
    else:
        mu = error * _noncentrality_below(difference, error, scores_in, scores_out, failure_probability)
    return Bound(
        method="gaussian-scores",
        epsilon=epsilon_of_mu(mu, delta),
        delta=delta,
        confidence=confidence,
        ceiling=None,
        mu=mu,
        threshold=None,
        threshold_choice="none",
        num_in=len(scores_in),
        num_out=len(scores_out),
        false_positive_rate=None,
        false_negative_rate=None,
        fpr_upper=None,
        fnr_upper=None,
    )


def _noncentrality_below(
    difference: float, error: float, scores_in: np.ndarray, scores_out: np.ndarray, failure_probability: float
) -> float:
    """The largest noncentrality at which the observed t is still surprisingly large; at least 0."""
    freedom = len(scores_in) + len(scores_out) - 2
    squares = float(
        ((scores_in - scores_in.mean()) ** 2).sum() + ((scores_out - scores_out.mean()) ** 2).sum()
    )
    if squares == 0 or difference <= 0:
        return 0.0  # scores without spread are no Gaussian: nothing can be said of their μ
    observed = difference / (error * math.sqrt(squares / freedom))

    def refuted(noncentrality: float) -> bool:
        return 1 - nctdtr(freedom, noncentrality, observed) <= failure_probability

    low, high = 0.0, observed
    if not refuted(0.0):
        return 0.0
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def gaussian_total_variation(scores_in: ArrayLike, scores_out: ArrayLike) -> float:
    """Total variation between the Gaussians fitted to both sides: 0 (alike) to 1 (apart).

    Phase I of De et al. 2022 (appendix A.2) ranks canaries and settings by it. An estimate, not a bound.
    """
    scores_in, scores_out = check_scores(scores_in, scores_out, at_least=2)
    mean, other_mean = float(scores_in.mean()), float(scores_out.mean())
    stddev, other_stddev = float(scores_in.std(ddof=1)), float(scores_out.std(ddof=1))
    if stddev == 0 or other_stddev == 0:  # a point against anything but itself
        return float(stddev != other_stddev or mean != other_mean)
    scale = max(stddev, other_stddev)
    return _total_variation((mean - other_mean) / scale, stddev / scale, other_stddev / scale)


def _total_variation(shift: float, stddev: float, other_stddev: float) -> float:
    """Between N(shift, stddev²) and N(0, other_stddev²): the densities cross once or twice."""
    quadratic = 1 / stddev**2 - 1 / other_stddev**2
    linear = -2 * shift / stddev**2
    constant = shift**2 / stddev**2 + 2 * math.log(stddev / other_stddev)
    if abs(quadratic) < 1e-12:
        crossings = [-constant / linear] if linear else []
    else:
        root = math.sqrt(max(0.0, linear**2 - 4 * quadratic * constant))
        # The root that loses no digits first, the other from the product of both.
        far = -(linear + math.copysign(root, linear)) / 2
        crossings = sorted({far / quadratic, constant / far if far else 0.0})
    edges = np.array([-np.inf, *crossings, np.inf])
    mass = np.diff(ndtr((edges - shift) / stddev)) - np.diff(ndtr(edges / other_stddev))
    return float(np.clip(np.abs(mass).sum() / 2, 0.0, 1.0))
