"""What the scores of a mechanism audit prove: bounds beside what the plan promises, and violations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from scipy.stats import chi2

from sfumato.audit.bounds import clopper_pearson_bound
from sfumato.audit.curves import auc
from sfumato.audit.gaussian import gaussian_scores_bound
from sfumato.audit.mechanism import (
    NOISE_SHARE,
    PROBE_SHARE,
    PROBE_STEPS,
    TAIL_SHARE,
    Batch,
    MechanismAudit,
    OnProgress,
    observe_scores,
)
from sfumato.audit.mechanism_size import total_error_above
from sfumato.audit.pipeline import NUM_CLASSES
from sfumato.audit.sampled import refuted_epsilon
from sfumato.audit.scores import Scores
from sfumato.audit.thresholds import choose_threshold
from sfumato.audit.watched import NUM_SILENT, SIDE
from sfumato.privacy.statement import round_down, round_up


@dataclass(frozen=True, kw_only=True)
class MechanismResult:
    """The bounds beside what is promised. ``violations`` in whole sentences; none is good news.

    All that can be a violation shares the failures: what is sound has one with probability 1 - confidence
    at most.
    """

    nominal_epsilon: float
    delta: float
    confidence: float
    noise_multiplier: float
    sampling_rate: float
    mu_gdp: float  # exact with full batches
    trainings: int
    canaries: int  # of each training, each in or out by its own coin
    epsilon: float  # the bound: the highest of the likelihood, the scale and the others
    share: float  # epsilon / nominal_epsilon
    ceiling: float  # what guesses without any error would have shown
    family_epsilon: float  # by the likelihood, among Gaussian mechanisms of this sampling rate
    clopper_pearson_epsilon: float  # assumes nothing about the mechanism; one canary of each training
    gaussian_scores_epsilon: float | None  # full batches: assumes Gaussian scores, independent canaries
    scale_epsilon: float
    others_epsilon: float | None  # full batches
    total_error: float  # upper bound of the sum of both error rates
    auc: float
    measured_noise_multiplier: float
    measured_noise_upper: float
    repeated_noise: int
    violations: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "violations": list(self.violations)}


@dataclass(frozen=True)
class Trials:
    """The trainings of an audit that its bounds are made of; rows are trainings."""

    present: np.ndarray  # (trainings, canaries)
    likelihood: np.ndarray
    probe_present: np.ndarray  # (probes,)
    scale: np.ndarray  # (probes,)
    others: np.ndarray  # (probes,), or empty

    @classmethod
    def of(cls, batches: Sequence[Batch], trainings: int) -> Trials:
        """The first ``trainings``, whatever came after them."""
        probes = [batch for batch in batches if batch.probe]
        full = [batch for batch in batches if not batch.probe]
        return cls(
            present=_rows(full, "present")[:trainings].astype(bool),
            likelihood=_rows(full, "likelihood")[:trainings],
            probe_present=_rows(probes, "present")[:, 0].astype(bool),
            scale=_rows(probes, "scale"),
            others=_rows(probes, "others"),
        )

    @property
    def sides(self) -> tuple[Scores, Scores]:
        """The likelihood of all canaries that were in, and of those that were out."""
        return self.likelihood[self.present], self.likelihood[~self.present]


def run_mechanism_audit(
    audit: MechanismAudit,
    *,
    trainings: int,
    scores: Path | None = None,
    workers: int = 1,
    on_progress: OnProgress | None = None,
    num_audits: int = 1,
) -> tuple[MechanismResult, Trials]:
    """Train, score and judge: see ``observe_scores``.

    Of ``num_audits`` whose violations count as one verdict, each has its share of the failures there; the
    bounds themselves keep the confidence of the audit.
    """
    batches = observe_scores(
        audit, trainings=trainings, scores=scores, workers=workers, on_progress=on_progress
    )
    trials = Trials.of(batches, trainings)
    result = judge(audit, trials, batches)
    if num_audits > 1:
        surer = replace(audit, confidence=1 - (1 - audit.confidence) / num_audits)
        result = replace(result, violations=judge(surer, trials, batches).violations)
    return result, trials


def judge(audit: MechanismAudit, trials: Trials, batches: Sequence[Batch]) -> MechanismResult:
    """Bounds from the scores, beside what the plan promises."""
    plan, failure_probability = audit.plan, audit.failure_probability
    # 0 is the best threshold if all is as planned: in, if that is likelier
    wrong = ((trials.likelihood >= 0) != trials.present).mean(1)
    total, flawless = (
        total_error_above(shares, plan, canaries=audit.num_canaries, failure_probability=failure_probability)
        for shares in (wrong, np.zeros(len(wrong)))
    )
    family = refuted_epsilon(plan, total)
    first = _sides(trials.likelihood[:, 0], trials.present[:, 0])
    tail = clopper_pearson_bound(*first, delta=plan.delta, confidence=1 - audit.share_of_failures(TAIL_SHARE))
    by_scale, by_others = _scale_epsilon(audit, trials), _others_epsilon(audit, trials)
    measured, measured_upper = measured_noise(audit, batches)
    found = max(family, by_scale, by_others or 0.0)
    result = MechanismResult(
        nominal_epsilon=plan.epsilon,
        delta=plan.delta,
        confidence=audit.confidence,
        noise_multiplier=plan.noise_multiplier,
        sampling_rate=plan.sampling_rate,
        mu_gdp=plan.mu_gdp,
        trainings=len(wrong),
        canaries=audit.num_canaries,
        epsilon=found,
        share=found / plan.epsilon,
        ceiling=refuted_epsilon(plan, flawless),
        family_epsilon=family,
        clopper_pearson_epsilon=tail.epsilon,
        gaussian_scores_epsilon=_gaussian_epsilon(audit, trials),
        scale_epsilon=by_scale,
        others_epsilon=by_others,
        total_error=total,
        auc=auc(*trials.sides).value,
        measured_noise_multiplier=measured,
        measured_noise_upper=measured_upper,
        repeated_noise=repeated_noise(batches),
        violations=(),
    )
    return replace(result, violations=tuple(_violations(result)))


def measured_noise(audit: MechanismAudit, batches: Sequence[Batch]) -> tuple[float, float]:
    """The noise multiplier where no unit has a gradient, and its upper bound.

    A scale is the sum of squares over a training's silent coordinates, in planned variances.
    """
    total = sum(sum(batch.scale) for batch in batches)
    steps = sum(
        batch.size * (min(PROBE_STEPS, audit.num_steps) if batch.probe else audit.num_steps)
        for batch in batches
    )
    freedom, planned = steps * NUM_CLASSES * NUM_SILENT * SIDE**2, audit.plan.noise_multiplier
    least = chi2.ppf(audit.share_of_failures(NOISE_SHARE), freedom)
    return planned * math.sqrt(total / freedom), planned * math.sqrt(total / least)


def repeated_noise(batches: Sequence[Batch]) -> int:
    """Steps whose noise had been there before, in the same training or in another."""
    prints = [one for batch in batches for one in batch.fingerprints]
    return sum(batch.repeated for batch in batches) + len(prints) - len(set(prints))


def _violations(result: MechanismResult) -> Iterator[str]:
    nominal, sure = result.nominal_epsilon, f"{100 * result.confidence:g} %"
    for found, how in (
        (result.family_epsilon, "the updates along the canaries"),
        (result.scale_epsilon, "the size of the noise"),
        (result.others_epsilon or 0.0, "what becomes of the other units"),
        (result.clopper_pearson_epsilon, "the updates along the canaries, whatever the mechanism"),
    ):
        if found > nominal:
            yield (
                f"ε is at least {round_down(found, 3)} by {how} ({sure} sure), but {round_up(nominal, 3)} "
                "is promised."
            )
    if result.measured_noise_upper < result.noise_multiplier:
        yield (
            f"The noise multiplier is at most {result.measured_noise_upper:.4g} ({sure} sure), but "
            f"{result.noise_multiplier:.4g} is accounted."
        )
    if result.repeated_noise:
        yield (
            f"{result.repeated_noise:,} steps had the noise of another step: subtracting the two "
            "leaves no noise at all."
        )


def _scale_epsilon(audit: MechanismAudit, trials: Trials) -> float:
    """Either direction of the scale, with a threshold chosen on one half of the probes."""
    inner, outer = _sides(trials.scale, trials.probe_present)
    if min(len(inner), len(outer)) < 2:
        return 0.0
    failure_probability, found = audit.share_of_failures(PROBE_SHARE) / 4, 0.0
    for sign in (1, -1):
        bounds = choose_threshold(
            sign * inner,
            sign * outer,
            lambda fpr, fnr: -fpr - fnr,
            threshold="split",
            failure_probability=failure_probability,
        )
        found = max(
            found, refuted_epsilon(audit.probe.plan, float(bounds.fpr_upper[0] + bounds.fnr_upper[0]))
        )
    return found


def _others_epsilon(audit: MechanismAudit, trials: Trials) -> float | None:
    if not len(trials.others):
        return None
    wrong = (trials.others > 0) != trials.probe_present
    total = total_error_above(
        wrong.astype(float),
        audit.probe.plan,
        canaries=1,
        failure_probability=audit.share_of_failures(PROBE_SHARE) / 2,
    )
    return refuted_epsilon(audit.probe.plan, total)


def _gaussian_epsilon(audit: MechanismAudit, trials: Trials) -> float | None:
    if audit.sampling_rate < 1:
        return None
    return gaussian_scores_bound(
        *trials.sides, delta=audit.delta, confidence=1 - audit.failure_probability
    ).epsilon


def _sides(scores: np.ndarray, present: np.ndarray) -> tuple[Scores, Scores]:
    return scores[present], scores[~present]


def _rows(batches: Sequence[Batch], name: str) -> np.ndarray:
    return np.array([row for batch in batches for row in getattr(batch, name)], dtype=np.float64)
