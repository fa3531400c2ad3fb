"""The audit of one finished run by its canaries, each of which was in the training by a fair coin.

White-box for canaries of the kind ``gradient``: all noisy sums are known, and a canary's score is what they
show along its vector. Black-box for canaries with images: the released model's loss on each. How many guesses
are right bounds ε from below (Steinke et al. 2023; Mahloujifar et al. 2024).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from sfumato.audit.curves import auc, roc_curve, score_histogram
from sfumato.audit.one_run import one_run_bound
from sfumato.audit.one_run_sampled import one_run_plan_bound
from sfumato.audit.projections import MEASUREMENT_SHARE, Measured, measure, projection_scores
from sfumato.audit.scores import Scores, check_confidence
from sfumato.data.canaries import CanaryImages
from sfumato.errors import PrivacyError, RunError
from sfumato.files import write_json, write_text
from sfumato.privacy.plan import Plan
from sfumato.privacy.statement import round_down, round_up
from sfumato.release.card import with_audit
from sfumato.release.release import CARD, load, read_description
from sfumato.release.run_folder import RunFolder
from sfumato.reporting.report import write_report
from sfumato.run.canaries import PROJECTIONS, Projections, images_of_canaries
from sfumato.run.state import load_state
from sfumato.training.canaries import toss_coins

ACCESS = {
    "gradient": "white-box: every noisy sum, along each canary's gradient",
    "mislabelled": "black-box: the released model's loss on generated images with random labels",
    "noise": "black-box: the released model's loss on images of noise with random labels",
    "optimised": "black-box: the released model's loss on images made for its features, with random labels",
}


@dataclass(frozen=True, kw_only=True)
class CanaryScores:
    """A score for each canary, higher = more likely in; white-box also what was measured on the way."""

    kind: str
    inner: Scores
    outer: Scores
    measured: Measured | None = None


@dataclass(frozen=True, kw_only=True)
class RunAudit:
    """What the canaries of one run show, beside what is promised and what so many could have shown."""

    nominal_epsilon: float
    delta: float
    confidence: float
    kind: str
    num_canaries: int
    num_members: int
    epsilon: float  # of a plan like this one with other noise
    ceiling: float
    num_guesses: int
    num_correct: int
    plain_epsilon: float  # (ε, δ)-DP, nothing else assumed
    plain_ceiling: float
    auc: float
    noise_multiplier: float
    sampling_rate: float
    measured: Measured | None  # white-box
    violations: tuple[str, ...]

    def sentence(self) -> str:
        """For the card and the report."""
        found, plain, most = (
            round_down(value, 3) for value in (self.epsilon, self.plain_epsilon, self.ceiling)
        )
        return (
            f"An audit of this run with {self.num_canaries:,} canaries ({ACCESS[self.kind]}) shows that ε is "
            f"at least {found} with {100 * self.confidence:g} % confidence ({plain} if nothing is assumed "
            f"about the mechanism); the guarantee says at most {round_up(self.nominal_epsilon, 3)}. With "
            f"every guess right, so many canaries would have shown {most}. A low figure is no proof of "
            "privacy: a better attack may show more."
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON values; what cannot be measured, with no canary on one side, becomes None."""
        values = {**asdict(self), "access": ACCESS[self.kind], "violations": list(self.violations)}
        if self.measured is not None:
            values["measured"] = {key: _finite(value) for key, value in asdict(self.measured).items()}
        return values


def audit_run(path: Path, *, confidence: float = 0.95, model: nn.Module | None = None) -> RunAudit:
    """Audit a finished run, and write the result beside it, into its card and into its report.

    ``model`` is needed for the final loss of a network of your own.
    """
    folder = RunFolder(path)
    scores, plan = canary_scores(folder, confidence=confidence, model=model)
    result = judge_scores(scores, plan, confidence=confidence)
    publish_audit(folder, result, scores)
    return result


def canary_scores(
    folder: RunFolder, *, confidence: float = 0.95, model: nn.Module | None = None
) -> tuple[CanaryScores, Plan]:
    """The scores of a finished run's canaries, and the plan that it promised.

    ``confidence`` is that of the verdict, of which white-box measurements have their share.
    """
    settings = folder.stored_recipe().audit
    if not settings.canaries:
        raise RunError(
            "no-canaries",
            f"{folder.path} was trained without canaries.",
            why="An audit of one run counts how many of them it recognises.",
            fix="Train with --audit-canaries 1000; or audit the implementation: sfumato audit mechanism.",
        )
    read_description(folder.release)  # refuses a run that is not finished
    state, key = load_state(folder.state), folder.canary_key()
    if key is None:
        raise RunError(
            "damaged-run",
            f"{folder.path} has no key of its canaries.",
            why="Without it nobody knows which canaries were in the training.",
            fix="Restore state/canaries.key.",
        )
    plan = Plan.from_dict(state.values["plan"])
    members = toss_coins(key, settings.canaries).numpy()
    kept = Projections(folder.state / PROJECTIONS, num_canaries=len(members))
    projections = kept.restored(state, key=key, white_box=settings.kind == "gradient")
    if settings.kind == "gradient":
        silent = state.values.get("silent_canaries") is True
        return white_box_scores(projections, members, plan, silent=silent, confidence=confidence), plan
    return black_box_scores(folder, key, members, kind=settings.kind, model=model), plan


def white_box_scores(
    projections: Tensor, members: np.ndarray, plan: Plan, *, silent: bool, confidence: float
) -> CanaryScores:
    """From the projections that the run has kept, of each step on each canary."""
    # what is beyond all numbers is seen by everybody
    seen = np.nan_to_num(projections.double().numpy(), nan=0.0, posinf=1e12, neginf=-1e12)
    scores = projection_scores(seen, sampling_rate=plan.sampling_rate, noise_multiplier=plan.noise_multiplier)
    measured = measure(
        seen,
        members,
        noise_multiplier=plan.noise_multiplier,
        silent=silent,
        failure_probability=MEASUREMENT_SHARE * check_confidence(confidence),
    )
    return CanaryScores(kind="gradient", inner=scores[members], outer=scores[~members], measured=measured)


def black_box_scores(
    folder: RunFolder, key: int, members: np.ndarray, *, kind: CanaryImages, model: nn.Module | None
) -> CanaryScores:
    """Minus the released model's loss on each canary, beside the mean of all canaries with its label.

    How much the model likes a label as such says nothing about a canary.
    """
    released = load(folder.path, model=model)
    shape = (released.config["channels"], released.config["image_size"], released.config["image_size"])
    canaries = images_of_canaries(
        folder,
        key,
        len(members),
        kind=kind,
        model=released.model,
        like=(shape, released.classes, released.task),
    )
    logits = released.logits(canaries.images).double()
    if canaries.multi_label:
        columns = zip(logits.T, canaries.labels.double().T, strict=True)
        parts = [
            beside_its_label(binary_cross_entropy_with_logits(column, found, reduction="none"), found.long())
            for column, found in columns
        ]
        scores = -np.sum(parts, axis=0)
    else:
        scores = -beside_its_label(cross_entropy(logits, canaries.labels, reduction="none"), canaries.labels)
    return CanaryScores(kind=kind, inner=scores[members], outer=scores[~members])


def beside_its_label(losses: Tensor, labels: Tensor) -> np.ndarray:
    """Each loss minus the mean of those with its label."""
    sizes = torch.bincount(labels).clamp_min(1)
    means = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, labels, losses) / sizes
    return (losses - means[labels]).numpy()


def judge_scores(scores: CanaryScores, plan: Plan, *, confidence: float) -> RunAudit:
    """Bounds from the scores, beside what the plan promises.

    Guarantee: if all is as planned, there is a violation with probability 1 - ``confidence`` at most. One
    bound decides, ``epsilon``; measurements have their share of the failures, and ``plain_epsilon`` has
    no part in it unless it is the only bound.
    """
    inner, outer = scores.inner, scores.outer
    measurements = 0 if scores.measured is None else 3
    deciding = 1 - (1 - measurements * MEASUREMENT_SHARE) * check_confidence(confidence)
    plain = one_run_bound(inner, outer, delta=plan.delta, confidence=confidence)
    try:
        bound = one_run_plan_bound(inner, outer, plan=plan, confidence=deciding)
    except PrivacyError as error:
        if error.code != "recorded-for-another-plan":
            raise
        # of a caller's own scheme nobody here knows what it would cost with other noise
        bound = one_run_bound(inner, outer, delta=plan.delta, confidence=deciding)
    return RunAudit(
        nominal_epsilon=plan.epsilon,
        delta=plan.delta,
        confidence=confidence,
        kind=scores.kind,
        num_canaries=len(inner) + len(outer),
        num_members=len(inner),
        epsilon=bound.epsilon,
        ceiling=bound.ceiling,
        num_guesses=bound.num_guesses,
        num_correct=bound.num_correct,
        plain_epsilon=plain.epsilon,
        plain_ceiling=plain.ceiling,
        auc=auc(inner, outer).value if len(inner) and len(outer) else 0.5,
        noise_multiplier=plan.noise_multiplier,
        sampling_rate=plan.sampling_rate,
        measured=scores.measured,
        violations=tuple(_violations(scores, plan, bound.epsilon, confidence)),
    )


def _violations(scores: CanaryScores, plan: Plan, found: float, confidence: float) -> list[str]:
    sentences = []
    sure = f"{100 * confidence:g} % sure"
    if found > plan.epsilon:
        sentences.append(
            f"ε is at least {round_down(found, 3)} ({sure}), but {round_up(plan.epsilon, 3)} is promised."
        )
    measured = scores.measured
    if measured is None:
        return sentences
    if measured.noise_upper < plan.noise_multiplier:
        sentences.append(
            f"The noise multiplier is at most {measured.noise_upper:.4g} ({sure}), but "
            f"{plan.noise_multiplier:.4g} is accounted."
        )
    if measured.rate_lower is not None and measured.rate_lower > plan.sampling_rate:
        sentences.append(
            f"A canary moves a step by at least {measured.rate_lower:.4g} clip norms on average "
            f"({sure}), but the sampling rate {plan.sampling_rate:.4g} is accounted."
        )
    if measured.repeated_noise:
        sentences.append(
            f"{measured.repeated_noise:,} steps had the noise of another step ({sure}): subtracting the "
            "two leaves no noise at all."
        )
    return sentences


def publish_audit(folder: RunFolder, result: RunAudit, scores: CanaryScores) -> None:
    """Write audit.json, and the audit's sections of the model card and of the report."""
    inner, outer = scores.inner, scores.outer
    drawn: dict[str, Any] = {"histogram": None, "roc": []}
    if len(inner) and len(outer):
        bins = score_histogram(inner, outer)
        drawn["histogram"] = {name: np.asarray(values).tolist() for name, values in bins.items()}
        drawn["roc"] = [list(point) for point in roc_curve(inner, outer).points(100, lowest=1 / len(outer))]
    write_json(folder.audit, {**result.as_dict(), "sentence": result.sentence(), **drawn})
    card = folder.release / CARD
    write_text(card, with_audit(card.read_text(encoding="utf-8"), result.sentence(), result.violations))
    write_report([folder.path], folder.report)


def _finite(value: Any) -> Any:
    """``value`` if JSON can hold it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
