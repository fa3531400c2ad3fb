"""Lower bounds of ε from many independent trainings: scores with the canary in, and scores with it out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from sfumato.accounting import check_delta
from sfumato.accounting.gaussian import gaussian_delta
from sfumato.audit.scores import check_audit_delta, check_confidence, check_scores
from sfumato.audit.thresholds import MAX_CANDIDATES, ErrorBounds, Objective, Threshold, choose_threshold

LARGEST_MU = 1e3  # beyond every audit; keeps the search for ε finite


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A lower bound of ε at δ, with what it was made of.

    ``ceiling`` is what an attack without a single error would have shown with as many scores: an audit cannot
    find more. ``mu`` is the bound as μ of Gaussian differential privacy. Either is None where the method has
    none. The rates are those of the scores that the bound was computed on.
    """

    method: str
    epsilon: float
    delta: float
    confidence: float
    ceiling: float | None
    mu: float | None
    threshold: float | None
    threshold_choice: str
    num_in: int
    num_out: int
    false_positive_rate: float | None
    false_negative_rate: float | None
    fpr_upper: float | None
    fnr_upper: float | None

    def as_dict(self) -> dict[str, str | float | int | None]:
        return asdict(self)


def clopper_pearson_bound(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    threshold: Threshold = "bonferroni",
    max_candidates: int | None = MAX_CANDIDATES,
    seed: int = 0,
) -> Bound:
    """ε that the errors of one test refute, with both roles of the errors (Nasr et al. 2021).

    Guarantee: if the scores of each side are independent and equally distributed, and the mechanism is
    (ε₀, δ)-DP, the bound exceeds ε₀ with probability at most 1 − ``confidence``. Nothing else is assumed.
    0 if nothing was found. ``seed`` only divides the scores ("split").
    """
    check_audit_delta(delta)
    objective = partial(epsilon_of_errors, delta=delta)
    bounds, index = _choose(scores_in, scores_out, objective, confidence, threshold, max_candidates, seed)
    return _bound(
        "clopper-pearson",
        bounds,
        index,
        threshold,
        epsilon=max(0.0, float(objective(bounds.fpr_upper, bounds.fnr_upper)[index])),
        ceiling=max(0.0, float(objective(*bounds.flawless())[0])),
        mu=None,
        delta=delta,
        confidence=confidence,
    )


def gdp_bound(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    threshold: Threshold = "bonferroni",
    max_candidates: int | None = MAX_CANDIDATES,
    seed: int = 0,
) -> Bound:
    """The μ that the errors of one test refute, and its ε at δ (Nasr et al. 2023).

    Guarantee: as ``clopper_pearson_bound``, for a mechanism that is μ₀-GDP: μ exceeds μ₀ with probability at
    most 1 − ``confidence``. Scores need not be Gaussian. It says nothing about a mechanism that is only known
    to be (ε, δ)-DP: its trade-off curve may be a Gaussian one's equal at one δ and worse elsewhere.
    """
    check_delta(delta)
    bounds, index = _choose(scores_in, scores_out, mu_of_errors, confidence, threshold, max_candidates, seed)
    mu = max(0.0, float(mu_of_errors(bounds.fpr_upper, bounds.fnr_upper)[index]))
    return _bound(
        "gdp",
        bounds,
        index,
        threshold,
        epsilon=epsilon_of_mu(mu, delta),
        ceiling=epsilon_of_mu(float(mu_of_errors(*bounds.flawless())[0]), delta),
        mu=mu,
        delta=delta,
        confidence=confidence,
    )


def epsilon_of_errors(
    fpr: NDArray[np.float64], fnr: NDArray[np.float64], delta: float
) -> NDArray[np.float64]:
    """The smallest ε at which (ε, δ)-DP allows a test with these error rates; below 0 they show nothing."""
    with np.errstate(divide="ignore"):  # no room left above δ: -inf
        forward = np.log(np.maximum(1 - fnr - delta, 0)) - np.log(fpr)
        backward = np.log(np.maximum(1 - fpr - delta, 0)) - np.log(fnr)
    return np.maximum(forward, backward)


def mu_of_errors(fpr: NDArray[np.float64], fnr: NDArray[np.float64]) -> NDArray[np.float64]:
    """The smallest μ at which μ-GDP allows a test with these error rates; below 0 they show nothing.

    Such a test must not be turned round: that would need lower bounds of its rates, and these are upper ones.
    """
    return -ndtri(fpr) - ndtri(fnr)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """ε at δ of exact μ-GDP, rounded down by at most 1e-9: 0 if even ε = 0 needs no more than δ."""
    if mu <= 0 or gaussian_delta(0.0, mu) <= delta:
        return 0.0
    mu = min(mu, LARGEST_MU)
    low, high = 0.0, 1.0
    while gaussian_delta(high, mu) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, mu) > delta else (low, middle)
    return low


def _choose(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    objective: Objective,
    confidence: float,
    threshold: Threshold,
    max_candidates: int | None,
    seed: int,
) -> tuple[ErrorBounds, int]:
    scores_in, scores_out = check_scores(scores_in, scores_out)
    bounds = choose_threshold(
        scores_in,
        scores_out,
        objective,
        threshold=threshold,
        failure_probability=check_confidence(confidence),
        max_candidates=max_candidates,
        seed=seed,
    )
    return bounds, bounds.best(objective)


def _bound(
    method: str,
    bounds: ErrorBounds,
    index: int,
    threshold: Threshold,
    *,
    epsilon: float,
    ceiling: float,
    mu: float | None,
    delta: float,
    confidence: float,
) -> Bound:
    return Bound(
        method=method,
        epsilon=epsilon,
        delta=delta,
        confidence=confidence,
        ceiling=ceiling,
        mu=mu,
        threshold=float(bounds.thresholds[index]),
        threshold_choice=threshold if isinstance(threshold, str) else "given",
        num_in=bounds.num_in,
        num_out=bounds.num_out,
        false_positive_rate=float(bounds.false_positives[index] / bounds.num_out),
        false_negative_rate=float(bounds.false_negatives[index] / bounds.num_in),
        fpr_upper=float(bounds.fpr_upper[index]),
        fnr_upper=float(bounds.fnr_upper[index]),
    )
