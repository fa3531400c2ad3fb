"""From trained weights to published files: final scores, ``release/``, ``environment.json``, the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn

from sfumato.files import write_json
from sfumato.release.card import headline, model_card, with_audit
from sfumato.release.documents import Config, DecisionDocument, RenderingDocument
from sfumato.release.release import FORMAT, write_release
from sfumato.release.run_folder import RunFolder, describe_environment
from sfumato.reporting.records import read_audit
from sfumato.reporting.report import write_report
from sfumato.run.filing import History, filing_of, keep_filing
from sfumato.run.prepare import Prepared, ProgressObserver, ScoredSet, features_counter
from sfumato.run.private_releases import private_releases, release_sentences
from sfumato.run.scoring import scored_logits
from sfumato.training.assessment import Outputs, assess, flat_measures
from sfumato.training.averaging import WeightAverage
from sfumato.training.decision import Decision
from sfumato.training.evaluation import AnyScores
from sfumato.training.evaluation import scores as score_logits
from sfumato.training.finding_scores import finding_scores

NO_PRIVACY = (
    "NO PRIVACY. This model was trained by ordinary SGD without clipping or noise. It carries no guarantee "
    "for anybody whose images it was trained on and may reveal them. Do not publish it unless all training "
    "images are public."
)
CUSTOM_MODEL = (
    "The network was brought by whoever trained it. The values that its parameters and buffers had before "
    "training are assumed to be public: what was not trained is released as it was, and ε covers none of it."
)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run."""

    folder: Path
    num_steps: int
    privacy: dict[str, Any]
    scores: AnyScores | None
    assessment: dict[str, Any] | None  # of classes: intervals, per class, curves and calibration
    scored_split: str | None
    scores_are_sensitive: bool  # measured on private images: for those who may see these, and nobody else
    seconds: float

    def for_other_ranks(self) -> dict[str, Any]:
        """What other ranks are told; scores may be private, and stay with the first one."""
        return {
            "folder": str(self.folder),
            "num_steps": self.num_steps,
            "privacy": self.privacy,
            "seconds": self.seconds,
        }

    @classmethod
    def of_first_rank(cls, told: dict[str, Any]) -> RunResult:
        """The result of the run on another rank than the first."""
        unknown = {"scores": None, "assessment": None, "scored_split": None, "scores_are_sensitive": False}
        return cls(**{**told, "folder": Path(told["folder"]), **unknown})


def publish(
    prepared: Prepared,
    folder: RunFolder,
    *,
    average: WeightAverage,
    num_steps: int,
    seconds: float,
    total_seconds: float,
    max_rows: int,
    decision: Decision,
    observer: ProgressObserver | None = None,
    history: History,
) -> RunResult:
    """Score the averaged weights with their decision, then write release and report.

    Guarantee: only the weights, the plan and public settings go into ``release/``; scores go there if they
    were measured on images that may be shown.
    """
    released = average.averaged(prepared.model)
    scored = prepared.final
    privacy = stated_privacy(prepared, num_steps=num_steps, history=history)
    keep_filing(folder.state, history, prepared.plan)
    # repeated in each file, so that none is mistaken when it is read alone
    label = {"releasable": privacy["releasable"], "guarantee": headline(privacy)}
    scores, assessment = None, None
    if scored is not None:
        scores, assessment = _scored(released, prepared, scored, decision, observer)
        measured_on = {"split": scored.split, "sensitive": scored.sensitive, "epsilon": privacy["epsilon"]}
        document = {**measured_on, **label, **scores.as_dict()}
        if assessment is not None:
            document |= {**flat_measures(assessment), **assessment}
        write_json(folder.scores(sensitive=scored.sensitive), document)
    config = {**model_config(prepared, decision), **label}
    public = scored is not None and not scored.sensitive
    card = model_card(
        config=config,
        privacy=privacy,
        scores=scores if public else None,
        assessment=assessment if public else None,
        recipe=prepared.recipe,
    )
    audit = read_audit(folder.audit)
    if audit is not None:  # of the same run, finished before
        card = with_audit(card, audit["sentence"], audit["violations"])
    times = {"seconds": seconds, "total_seconds": total_seconds}
    environment = {**describe_environment(), **times, "max_rows": max_rows, "num_ranks": prepared.ranks.size}
    write_json(folder.environment, environment)
    write_release(folder.release, model=released, config=config, privacy=privacy, card=card)
    write_report([folder.path], folder.report)
    return RunResult(
        folder=folder.path,
        num_steps=num_steps,
        privacy=privacy,
        scores=scores,
        assessment=assessment,
        scored_split=None if scored is None else scored.split,
        scores_are_sensitive=scored is not None and scored.sensitive,
        seconds=seconds,
    )


def _scored(
    model: nn.Module,
    prepared: Prepared,
    scored: ScoredSet,
    decision: Decision,
    observer: ProgressObserver | None,
) -> tuple[AnyScores, dict[str, Any] | None]:
    """The scores, and for images of one class each the whole assessment."""
    images, counter = scored.images, features_counter(observer, scored.split)
    logits = scored_logits(prepared, model, scored, on_progress=counter)
    if images.multi_label:
        people = images.patients
        found_each = finding_scores(logits, images.labels, images.classes, decision=decision, groups=people)
        return found_each, None
    found = score_logits(logits, images.labels, images.classes, decision=decision)
    return found, assess(Outputs.of(logits, images, decision))


def stated_privacy(prepared: Prepared, *, num_steps: int, history: History) -> dict[str, object]:
    """privacy.json: the guarantee of the whole plan, also after a run that stopped early.

    Stopping was decided by looking at the model, so the steps not taken count as if they had been:
    composition bounds the plan, not a length chosen during training.
    """
    plan, provenance = prepared.plan, prepared.provenance
    if plan is None:
        privacy, sentences = no_privacy_values(prepared), [NO_PRIVACY]
    else:
        statement = plan.statement(releasable=prepared.source.releasable, earlier=history.earlier(plan))
        privacy, sentences = statement.as_dict(), [statement.text]
    if plan is not None:
        sentences += release_sentences(prepared.recipe)
        privacy["releases"] = [asdict(release) for release in private_releases(prepared.recipe)]
    if provenance is not None:
        sentences.append(provenance.text)
        origin: dict[str, object] = {"data": provenance.data, "public": provenance.public}
        if provenance.backbone is not None:
            origin["backbone"] = provenance.backbone.as_dict()
        privacy["weights_from"] = {**origin, "unprotected": list(provenance.unprotected)}
    if plan is not None:
        if prepared.resolved.custom_model:
            sentences.append(CUSTOM_MODEL)
        if num_steps < prepared.num_steps:
            sentences.append(f"Training stopped early after {num_steps:,} of these steps; ε counts them all.")
        privacy["num_steps_taken"] = num_steps
    privacy["filing"] = filing_of(history, prepared.recipe, plan)
    return {**privacy, "statement": "\n".join(sentences)}


def model_config(prepared: Prepared, decision: Decision) -> Config:
    """config.json: how to rebuild and feed the model."""
    resolved = prepared.resolved.document()
    settings = prepared.recipe.data
    constants = {name: getattr(settings, name) for name in ("window", "range", "bits", "frame")}
    rendering = {name: value for name, value in constants.items() if value is not None}
    config = Config(
        format=FORMAT,
        model=resolved["model"],
        task=prepared.resolved.task,
        classes=resolved["classes"],
        image_size=resolved["image_size"],
        channels=resolved["channels"],
        mean=resolved["mean"],
        std=resolved["std"],
        fit=settings.fit,
        data=resolved["data"],
        decision=cast(DecisionDocument, decision.as_dict()),
    )
    if rendering:
        config["rendering"] = cast(RenderingDocument, rendering)
    return config


def no_privacy_values(prepared: Prepared) -> dict[str, object]:
    """The keys of privacy.json for a model without a guarantee; the figures of one are None."""
    absent = ("epsilon", "delta", "neighbouring", "accountant", "noise_multiplier", "clip_norm", "mu_gdp")
    return {
        **dict.fromkeys(absent),
        "unit": prepared.recipe.privacy.unit,
        "sampling_rate": prepared.sampler.sampling_rate,
        "num_steps": prepared.num_steps,
        "num_examples": len(prepared.units),
        "releasable": False,
    }
