"""A tight white-box audit of the mechanism: many small trainings, half of them with a canary.

Each training gives two scores. ``likelihood`` is the log-likelihood ratio of all its noisy updates, projected
on the canary's clipped gradient (Nasr et al. 2023): the best test there is if everything is as planned, so
that its bound comes close to the nominal ε. ``scale`` is how large the noise was where no unit has a
gradient: if that depends on the canary, the number of units leaks. Noise that occurs twice is reported apart.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.stats import chi2

from sfumato.audit.bounds import clopper_pearson_bound
from sfumato.audit.curves import auc
from sfumato.audit.gaussian import gaussian_scores_bound
from sfumato.audit.pipeline import NUM_CLASSES, NUM_UNITS, SIDE, Canary, Observation, Part, Pipeline
from sfumato.audit.sampled import refuted_epsilon, total_error, total_error_above
from sfumato.audit.score_file import Batch, ScoreFile
from sfumato.audit.scores import Scores, check_confidence
from sfumato.audit.thresholds import Threshold, choose_threshold
from sfumato.errors import ConfigError
from sfumato.privacy.plan import Plan

OnProgress = Callable[[int, int], None]  # pairs done, of how many
SCALE_SHARE = 0.1  # of the allowed misses, for the second score: what it finds is never close
BATCH = 50  # pairs of trainings between two savings, and for one process at a time
MOST_REPETITIONS = 2_000_000
STATISTICS = ("likelihood", "scale")


@dataclass(frozen=True, kw_only=True)
class MechanismAudit:
    """What is audited, and how sure the answer has to be."""

    epsilon: float
    delta: float = 1e-5
    sampling_rate: float = 1.0
    num_steps: int = 1
    over: tuple[Part, ...] = ()
    canary: Canary = "input"
    confidence: float = 0.95

    def __post_init__(self) -> None:
        check_confidence(self.confidence)
        object.__setattr__(self, "over", tuple(sorted(set(self.over))))
        if not 0 < self.sampling_rate <= 1:
            raise ConfigError(
                "sampling-rate-out-of-range",
                f"sampling_rate is {self.sampling_rate}, but it is a probability above 0 and at most 1.",
                fix="Give 1 for full batches, or for example 0.1.",
            )

    @cached_property
    def plan(self) -> Plan:
        return Plan.calibrate(
            epsilon=self.epsilon,
            delta=self.delta,
            num_examples=NUM_UNITS,
            batch_size=self.sampling_rate * NUM_UNITS,
            num_steps=self.num_steps,
            sampling="full" if self.sampling_rate == 1 else "poisson",
        )

    @cached_property
    def pipeline(self) -> Pipeline:
        return Pipeline(plan=self.plan, over=frozenset(self.over), canary=self.canary)

    def check(self) -> None:
        """Refuse what cannot be audited, before anything is trained or written."""
        _ = self.pipeline

    @property
    def miss(self) -> float:
        """What the bound by the likelihood may miss."""
        return (1 - SCALE_SHARE) * check_confidence(self.confidence)

    def identity(self) -> dict[str, object]:
        """What scores must have in common to be put together."""
        values = {**asdict(self), "over": list(self.over), "noise_multiplier": self.plan.noise_multiplier}
        del values["confidence"]
        return values


@dataclass(frozen=True, kw_only=True)
class MechanismResult:
    """The bounds beside what is promised. ``violations`` in whole sentences; none is good news."""

    nominal_epsilon: float
    delta: float
    confidence: float
    noise_multiplier: float
    repetitions: int  # trainings with the canary, and as many without
    epsilon: float  # the bound: of the likelihood or of the scale, whichever is higher
    share: float  # epsilon / nominal_epsilon
    ceiling: float  # what a test without any error would have shown
    family_epsilon: (
        float  # by trade-off curves: Gaussian DP with full batches, the sampled Gaussian otherwise
    )
    clopper_pearson_epsilon: float  # assumes nothing about the mechanism
    gaussian_scores_epsilon: float | None  # full batches: assumes Gaussian scores too
    scale_epsilon: float
    total_error: float  # upper bound of the sum of both error rates
    auc: float
    measured_noise_multiplier: float
    measured_noise_upper: float
    repeated_noise: int
    violations: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "violations": list(self.violations)}


def log_likelihood_ratio(projections: np.ndarray, *, sampling_rate: float, noise_multiplier: float) -> Scores:
    """ln P[with the canary] / P[without] of each training's steps, rows of projections in clip norms."""
    with np.errstate(divide="ignore"):
        absent = np.log1p(-sampling_rate) if sampling_rate < 1 else -np.inf
    present = math.log(sampling_rate) + (2 * projections - 1) / (2 * noise_multiplier**2)
    return np.logaddexp(absent, present).sum(-1)


def enough_repetitions(audit: MechanismAudit, *, share: float) -> int:
    """How many prove ``share`` of the nominal ε with probability 95 %, if all is as planned."""
    plan = audit.plan
    rate, goal = total_error(plan) / 2, total_error(plan.with_epsilon(share * plan.epsilon))
    repetitions = 100
    while repetitions < MOST_REPETITIONS:
        scores = 2 * repetitions
        errors = math.ceil(rate * scores + 1.645 * math.sqrt(scores * rate * (1 - rate)))
        if errors < scores and total_error_above(errors, scores, audit.miss) < goal:
            break
        repetitions = math.ceil(1.1 * repetitions)
    return repetitions


def run_mechanism_audit(
    audit: MechanismAudit,
    *,
    repetitions: int,
    scores: Path | None = None,
    workers: int = 1,
    on_progress: OnProgress | None = None,
) -> tuple[MechanismResult, dict[str, tuple[Scores, Scores]]]:
    """Train ``repetitions`` times with the canary and without, and judge; scores go to a file if given.

    An interrupted audit goes on with the scores that the file holds.
    """
    if repetitions < 2:
        raise ConfigError(
            "bad-repetitions",
            f"repetitions is {repetitions}.",
            fix="Give 2 or more; hundreds find something.",
        )
    audit.check()
    file = ScoreFile(scores)
    batches = file.open(audit.identity())
    done = sum(batch.size for batch in batches)
    for batch in _batches(audit, repetitions - done, workers):
        file.append(batch)
        batches.append(batch)
        done += batch.size
        if on_progress is not None:
            on_progress(done, repetitions)
    sides = {name: _joined(batches, name, repetitions) for name in STATISTICS}
    return judge(audit, sides, batches), sides


def judge(
    audit: MechanismAudit, sides: dict[str, tuple[Scores, Scores]], batches: list[Batch]
) -> MechanismResult:
    """Bounds from the scores, beside what the plan promises."""
    plan, (inner, outer) = audit.plan, sides["likelihood"]
    # 0 is best if all is as planned. The average weighs the steps anew, and its scores have another middle.
    threshold: Threshold = "split" if "ema" in audit.over else 0.0
    family, total = _family_bound(audit, inner, outer, threshold, audit.miss)
    scale_miss = SCALE_SHARE * check_confidence(audit.confidence)
    scale_in, scale_out = sides["scale"]
    directions = (
        (scale_in, scale_out),
        (-scale_in, -scale_out),
    )  # the canary may make the noise larger or smaller
    by_scale = max(_family_bound(audit, more, less, "split", scale_miss / 2)[0] for more, less in directions)
    tail = clopper_pearson_bound(inner, outer, delta=plan.delta, confidence=1 - audit.miss)
    flawless = total_error_above(0, 2 * len(inner), audit.miss)
    measured, measured_upper = measured_noise(audit, sides["scale"])
    repeated = repeated_noise(batches)
    found = max(family, by_scale)
    result = MechanismResult(
        nominal_epsilon=plan.epsilon,
        delta=plan.delta,
        confidence=audit.confidence,
        noise_multiplier=plan.noise_multiplier,
        repetitions=len(inner),
        epsilon=found,
        share=found / plan.epsilon,
        ceiling=refuted_epsilon(plan, flawless),
        family_epsilon=family,
        clopper_pearson_epsilon=tail.epsilon,
        gaussian_scores_epsilon=_gaussian_epsilon(audit, inner, outer),
        scale_epsilon=by_scale,
        total_error=total,
        auc=auc(inner, outer).value,
        measured_noise_multiplier=measured,
        measured_noise_upper=measured_upper,
        repeated_noise=repeated,
        violations=(),
    )
    return replace(result, violations=tuple(_violations(result)))


def measured_noise(audit: MechanismAudit, scale: tuple[Scores, Scores]) -> tuple[float, float]:
    """The noise multiplier where no unit has a gradient, and its upper bound at 99.9 %.

    ``scale`` holds, for each training, the sum of squares over silent coordinates in planned variances.
    """
    total = float(np.concatenate(scale).sum())
    freedom = (len(scale[0]) + len(scale[1])) * audit.num_steps * NUM_CLASSES * SIDE**2
    planned = audit.plan.noise_multiplier
    return planned * math.sqrt(total / freedom), planned * math.sqrt(total / chi2.ppf(1e-3, freedom))


def repeated_noise(batches: list[Batch]) -> int:
    """Steps whose noise had been there before, in the same training or in another."""
    prints = [one for batch in batches for one in batch.fingerprints]
    return sum(batch.repeated for batch in batches) + len(prints) - len(set(prints))


def _violations(result: MechanismResult) -> Iterator[str]:
    nominal, sure = result.nominal_epsilon, f"{100 * result.confidence:g} %"
    for found, how in (
        (result.family_epsilon, "the updates along the canary"),
        (result.scale_epsilon, "the size of the noise"),
        (result.clopper_pearson_epsilon, "the updates along the canary, whatever the mechanism"),
    ):
        if found > nominal:
            yield f"ε is at least {found:.3g} by {how} ({sure} sure), but {nominal:.3g} is promised."
    if result.measured_noise_upper < result.noise_multiplier:
        yield (
            f"The noise multiplier is at most {result.measured_noise_upper:.4g} (99.9 % sure), but "
            f"{result.noise_multiplier:.4g} is accounted."
        )
    if result.repeated_noise:
        yield (
            f"{result.repeated_noise:,} steps had the noise of another step: subtracting the two "
            "leaves no noise at all."
        )


def _family_bound(
    audit: MechanismAudit, inner: Scores, outer: Scores, threshold: Threshold, miss: float
) -> tuple[float, float]:
    """ε, and the upper bound of the sum of both error rates that it comes from."""
    bounds = choose_threshold(
        inner, outer, lambda fpr, fnr: -fpr - fnr, threshold=threshold, failure_probability=miss
    )
    errors = int(bounds.false_positives[0] + bounds.false_negatives[0])
    total = total_error_above(errors, bounds.num_in + bounds.num_out, miss)
    return refuted_epsilon(audit.plan, total), total


def _gaussian_epsilon(audit: MechanismAudit, inner: Scores, outer: Scores) -> float | None:
    if audit.sampling_rate < 1:
        return None
    return gaussian_scores_bound(inner, outer, delta=audit.delta, confidence=1 - audit.miss).epsilon


def _batches(audit: MechanismAudit, pairs: int, workers: int) -> Iterator[Batch]:
    sizes = [min(BATCH, pairs - start) for start in range(0, pairs, BATCH)]
    if workers == 1 or len(sizes) < 2:
        yield from (observe_batch(audit, size) for size in sizes)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small sums gain nothing from threads
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(observe_batch, [audit] * len(sizes), sizes)


def observe_batch(audit: MechanismAudit, pairs: int) -> Batch:
    """``pairs`` trainings with the canary, and as many without, each scored."""
    scores: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in STATISTICS}
    prints, repeated = [], 0
    for side, member in enumerate((True, False)):
        for _ in range(pairs):
            seen = _pipeline(audit).observe(member=member)
            for name, value in _scores(audit, seen).items():
                scores[name][side].append(value)
            prints.append(seen.fingerprints[0])
            repeated += len(seen.fingerprints) - len(set(seen.fingerprints))
    return Batch(scores=scores, fingerprints=prints, repeated=repeated)


_PIPELINES: dict[MechanismAudit, Pipeline] = {}  # of this process: models are checked once


def _pipeline(audit: MechanismAudit) -> Pipeline:
    return _PIPELINES.setdefault(audit, audit.pipeline)


def _scores(audit: MechanismAudit, seen: Observation) -> dict[str, float]:
    noise = audit.plan.noise_multiplier
    score = (
        seen.averaged
        if "ema" in audit.over
        else float(
            log_likelihood_ratio(seen.projections, sampling_rate=audit.sampling_rate, noise_multiplier=noise)
        )
    )
    # a score without bound would be refused later; such a training is certain to be seen
    return {"likelihood": float(np.clip(score, -1e12, 1e12)), "scale": seen.silent_squares / noise**2}


def _joined(batches: list[Batch], name: str, repetitions: int) -> tuple[Scores, Scores]:
    inner, outer = (
        np.array([value for batch in batches for value in batch.scores[name][side]][:repetitions])
        for side in (0, 1)
    )
    return inner, outer
