"""A tight white-box audit of the mechanism: many small trainings, each canary in or out by a fair coin.

Scores of a training:
- ``likelihood``, of each canary: the log-likelihood ratio of all noisy updates, projected on the canary's
  clipped gradient (Nasr et al. 2023): the best test there is if everything is as planned, so that its bound
  comes close to the nominal ε. Trainings hold many canaries; ``mechanism_size`` says why that is allowed.
- ``scale``: how large the noise was where no unit has a gradient. If that depends on the canary, the number
  of units leaks. One canary among few others shows it best: these trainings are called probes.
- ``others``, of probes with full batches: whether the other units' part looks like a replay with the canary
  or one without. A replay draws its own randomness, so it tells nothing unless that is predictable.
Noise that occurs twice is reported apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from sfumato.audit.mechanism_size import best_canaries, enough_trainings
from sfumato.audit.pipeline import NUM_OTHERS, Canary, Part, Pipeline
from sfumato.audit.score_file import ScoreFile
from sfumato.audit.scores import Scores, check_confidence
from sfumato.audit.worker_processes import worker_pool
from sfumato.errors import ConfigError
from sfumato.privacy.plan import Plan

OnProgress = Callable[[int, int], None]  # trainings done, of how many
# Shares of the allowed failures; the likelihood has the rest, since what the others find is never close.
PROBE_SHARE, TAIL_SHARE, NOISE_SHARE = 0.1, 0.1, 0.02
SCORING = 1  # one more whenever the same training would get other scores
PROBES, PROBE_STEPS = 200, 10
FEWEST_TRAININGS = 20
STEPS_AT_ONCE = 500  # of all trainings between two savings, and for one process at a time


class Batch(msgspec.Struct, kw_only=True):
    """Some trainings of one kind, in the order in which they were made."""

    probe: bool  # one canary and few steps, for the scale and the others
    present: list[list[bool]]  # which canaries of each training were there
    likelihood: list[list[float]]  # of each canary of each training
    scale: list[float]
    others: list[float]  # of probes with full batches
    fingerprints: list[int]  # of the first step's noise, one for each training
    repeated: int  # steps with noise that another step of the same training had

    @property
    def size(self) -> int:
        return len(self.present)


@dataclass(frozen=True, kw_only=True)
class MechanismAudit:
    """What is audited, and how sure the answer has to be."""

    epsilon: float
    delta: float = 1e-5
    sampling_rate: float = 1.0
    num_steps: int = 1
    over: tuple[Part, ...] = ()
    canary: Canary = "input"
    num_canaries: int = 1  # of each training
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
        num_units = self.num_canaries + NUM_OTHERS
        return Plan.calibrate(
            epsilon=self.epsilon,
            delta=self.delta,
            num_examples=num_units,
            batch_size=self.sampling_rate * num_units,
            num_steps=self.num_steps,
            sampling="full" if self.sampling_rate == 1 else "poisson",
        )

    @cached_property
    def pipeline(self) -> Pipeline:
        return Pipeline(
            plan=self.plan, over=frozenset(self.over), canary=self.canary, num_canaries=self.num_canaries
        )

    @cached_property
    def probe(self) -> MechanismAudit:
        """The same with one canary."""
        return self if self.num_canaries == 1 else replace(self, num_canaries=1)

    def check(self) -> None:
        """Refuse what cannot be audited, before anything is trained or written."""
        _ = self.pipeline, self.probe.pipeline

    @property
    def failure_probability(self) -> float:
        """What the bound by the likelihood may fail with."""
        return self.share_of_failures(1 - PROBE_SHARE - TAIL_SHARE - NOISE_SHARE)

    def share_of_failures(self, share: float) -> float:
        """What a part of the verdict may fail with; all parts together fail with 1 - ``confidence``."""
        return share * check_confidence(self.confidence)

    def identity(self) -> dict[str, object]:
        """What scores must have in common to be put together."""
        values = {**asdict(self), "over": list(self.over), "noise_multiplier": self.plan.noise_multiplier}
        values["scoring"] = SCORING
        del values["confidence"]
        return values


def sized(
    audit: MechanismAudit, *, share: float, num_canaries: int | None = None
) -> tuple[MechanismAudit, int]:
    """The audit with as many canaries, and as many trainings, as prove ``share`` of ε at the least cost."""
    number = num_canaries or best_canaries(
        audit.plan, share=share, failure_probability=audit.failure_probability
    )
    trainings = enough_trainings(
        audit.plan, canaries=number, share=share, failure_probability=audit.failure_probability
    )
    return replace(audit, num_canaries=number), trainings


def log_likelihood_ratio(projections: np.ndarray, *, sampling_rate: float, noise_multiplier: float) -> Scores:
    """ln P[with the canary] / P[without] over all steps, the last dimension; projections in clip norms."""
    with np.errstate(divide="ignore"):
        absent = np.log1p(-sampling_rate) if sampling_rate < 1 else -np.inf
    present = math.log(sampling_rate) + (2 * projections - 1) / (2 * noise_multiplier**2)
    return np.logaddexp(absent, present).sum(-1)


def observe_scores(
    audit: MechanismAudit,
    *,
    trainings: int,
    scores: Path | None = None,
    workers: int = 1,
    on_progress: OnProgress | None = None,
) -> list[Batch]:
    """The scores of PROBES probes and of ``trainings`` trainings; they go to a file if one is given.

    An interrupted audit goes on with the scores that the file holds.
    """
    if trainings < FEWEST_TRAININGS:
        raise ConfigError(
            "bad-repetitions",
            f"trainings is {trainings}.",
            why="Fair coins may put all canaries of few trainings on the same side.",
            fix=f"Give {FEWEST_TRAININGS} or more; hundreds find something.",
        )
    audit.check()
    file = ScoreFile(scores, Batch)
    batches = file.open(audit.identity())
    wanted = PROBES + trainings
    for batch in _missing(audit, batches, trainings, workers):
        file.append(batch)
        batches.append(batch)
        if on_progress is not None:
            on_progress(min(wanted, sum(batch.size for batch in batches)), wanted)
    return batches


def _missing(audit: MechanismAudit, batches: list[Batch], trainings: int, workers: int) -> Iterator[Batch]:
    """What is still to be trained, in batches of probes first."""
    tasks = []
    for probe, wanted, steps in ((True, PROBES, PROBE_STEPS), (False, trainings, audit.num_steps)):
        missing = wanted - sum(batch.size for batch in batches if batch.probe == probe)
        at_once = max(5, STEPS_AT_ONCE // steps)
        tasks += [(audit, probe, min(at_once, missing - start)) for start in range(0, missing, at_once)]
    if workers == 1 or len(tasks) < 2:
        yield from (observe_batch(*task) for task in tasks)
        return
    with worker_pool(workers) as pool:
        yield from pool.map(observe_batch, *zip(*tasks, strict=True))


def observe_batch(audit: MechanismAudit, probe: bool, number: int) -> Batch:
    """So many trainings, each scored."""
    batch = Batch(probe=probe, present=[], likelihood=[], scale=[], others=[], fingerprints=[], repeated=0)
    coins = np.random.default_rng()  # of its own: nothing of the audited code decides who is there
    for _ in range(number):
        present = coins.integers(0, 2, size=1 if probe else audit.num_canaries).astype(bool)
        _observe(audit.probe if probe else audit, present, batch)
    return batch


def _observe(audit: MechanismAudit, present: np.ndarray, batch: Batch) -> None:
    pipeline, noise = _pipeline(audit), audit.plan.noise_multiplier
    seen = pipeline.observe(present, num_steps=min(PROBE_STEPS, audit.num_steps) if batch.probe else None)
    scores = (
        seen.averaged
        if "ema" in audit.over
        else log_likelihood_ratio(
            seen.projections.T, sampling_rate=audit.sampling_rate, noise_multiplier=noise
        )
    )
    batch.present.append(present.tolist())
    # a score without bound would be refused later; such a training is certain to be seen
    batch.likelihood.append(np.clip(scores, -1e12, 1e12).tolist())
    batch.scale.append(seen.silent_squares / noise**2)
    if batch.probe and audit.sampling_rate == 1:
        with_it, without = (pipeline.replayed_others([there]) for there in (True, False))
        nearer = np.square(seen.others - without).sum() - np.square(seen.others - with_it).sum()
        batch.others.append(float(np.clip(nearer, -1e12, 1e12)))
    batch.fingerprints.append(seen.fingerprints[0])
    batch.repeated += len(seen.fingerprints) - len(set(seen.fingerprints))


_PIPELINES: dict[MechanismAudit, Pipeline] = {}  # of this process: models are checked once


def _pipeline(audit: MechanismAudit) -> Pipeline:
    return _PIPELINES.setdefault(audit, audit.pipeline)
