"""The decision of a run: prevalence, class weights and threshold, declared or released with counted noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sfumato.data.pixels import Pixels
from sfumato.errors import ConfigError, PrivacyError, RunError
from sfumato.run.private_releases import (
    CLASS_COUNTS,
    SCORE_HISTOGRAM,
    private_releases,
    release_of,
)
from sfumato.training.decision import (
    Decision,
    Shares,
    logit_shift,
    positive_class,
    shares_of_classes,
    shares_of_findings,
    thresholds_of_findings,
    weighted_shares,
    weights_of_classes,
)
from sfumato.training.private_counts import (
    NUM_BINS,
    check_counted,
    exact_counts,
    finding_shares,
    finding_thresholds,
    noisy_counts,
    prior_of_counts,
    score_cells,
    threshold_of_histogram,
)
from sfumato.training.thresholds import best_threshold, fitted_temperature, public_threshold

if TYPE_CHECKING:
    from sfumato.data import DataSplits, ImageSet
    from sfumato.recipes.recipe import Recipe
    from sfumato.run.prepare import Prepared

LogitsOf = Callable[[Pixels], Tensor]  # of the released model, for images


def check_decision(recipe: Recipe, splits: DataSplits) -> None:
    """Refuse a decision that cannot be made, or only by looking at private images without paying."""
    classes, data, settings = splits.train.classes, recipe.data, recipe.decision
    prior = declared_prior(recipe, splits.train)
    first_decision(recipe, splits.train, prior=prior, class_weights=None)
    if data.prevalence is not None and data.class_counts == "released":
        raise ConfigError(
            "prevalence-twice",
            f"data.prevalence = {data.prevalence} is declared, and data.class_counts = released pays for it.",
            fix="Keep one of the two.",
        )
    knows = data.prevalence is not None or data.class_counts == "released"
    weights = recipe.training.class_weights
    if not knows and (weights == "balanced" or settings.prevalence_at_use is not None):
        what = "training.class_weights = balanced" if weights == "balanced" else "decision.prevalence_at_use"
        raise ConfigError(
            "no-prevalence",
            f"{what} needs to know how frequent the classes are.",
            why="Counting private images without noise would be a release that nobody accounts.",
            fix="Declare data.prevalence if it is public, or set data.class_counts=released.",
        )
    many = splits.train.multi_label
    weights_of_classes(weights, prior, num_classes=len(classes))
    one_of_two = len(classes) == 2 and not isinstance(settings.threshold, tuple)
    if settings.threshold != "auto" and not many and not one_of_two:
        raise ConfigError(
            "threshold-of-many",
            f"decision.threshold = {settings.threshold} with {len(classes)} classes.",
            why="One threshold tells two classes apart; of more the likeliest is chosen.",
            fix="Leave it out.",
        )
    if settings.threshold == "public" and (splits.val is None or not data.val_is_public):
        raise PrivacyError(
            "private-validation",
            "decision.threshold = public needs validation images that are public",
            why="A threshold chosen on private images tells something of them that epsilon does not count.",
            fix="Set data.val_is_public = true if they are, or use decision.threshold = released.",
        )


def declared_prior(recipe: Recipe, train: ImageSet) -> Shares | None:
    """What is publicly known of the frequencies of classes or findings; nothing of an image is looked at."""
    classes = train.classes
    if train.multi_label:
        return shares_of_findings(recipe.data.prevalence, num_findings=len(classes))
    return shares_of_classes(
        recipe.data.prevalence,
        setting="data.prevalence",
        num_classes=len(classes),
        positive=positive_class(recipe.decision.positive, classes),
    )


def first_decision(
    recipe: Recipe, train: ImageSet, *, prior: Shares | None, class_weights: Shares | None
) -> Decision:
    """What is known before the model is trained; a threshold that is chosen later is 0.5 until then.

    A finding is called from its frequency on, if that is known: by Bayes' rule that is where balanced
    accuracy is best, and its probability stays what it says.
    """
    settings, classes = recipe.decision, train.classes
    if train.multi_label:
        cuts = thresholds_of_findings(settings.threshold, num_findings=len(classes))
        seen = None if prior is None else weighted_shares(prior, recipe.training.positive_weights)
        return Decision(thresholds=seen if cuts is None else cuts, positive=0)
    positive = positive_class(settings.positive, classes)
    at_use = shares_of_classes(
        settings.prevalence_at_use,
        setting="decision.prevalence_at_use",
        num_classes=len(classes),
        positive=positive,
    )
    return Decision(
        shift=logit_shift(prior, class_weights, at_use),
        threshold=settings.threshold if isinstance(settings.threshold, float) else 0.5,
        positive=min(positive, len(classes) - 1),
    )


@dataclass
class Released:
    """What a run released besides its steps: noisy values, kept in its state so that none is drawn twice."""

    class_counts: list[float] | None = None
    score_histogram: list[float] | None = None

    def values(self) -> dict[str, Any]:
        """For the state of the run."""
        return {"class_counts": self.class_counts, "score_histogram": self.score_histogram}

    @classmethod
    def restored(cls, saved: Mapping[str, Any] | None, recipe: Recipe) -> Released:
        """From a saved state; states of earlier versions have none, and their recipes ask for none."""
        released = cls(**(saved or {}))
        if release_of(recipe, CLASS_COUNTS) is not None and released.class_counts is None:
            raise RunError(
                "no-state",
                "the state does not hold the class counts that the run has released",
                why="Released a second time with fresh noise, they would cost more than was accounted.",
                fix="Start anew with another --out, or restore the file.",
            )
        return released

    def prior(self, prepared: Prepared) -> Shares | None:
        """The classes' frequencies: declared, or as released; without privacy as they are."""
        recipe, units = prepared.recipe, prepared.units
        shares = finding_shares if units.data.multi_label else prior_of_counts
        if self.class_counts is not None:
            return shares(self.class_counts, recipe.decision.class_counts_noise_multiplier)
        if recipe.data.class_counts == "released" and prepared.plan is None:
            return shares(exact_counts(*_label_cells(units.data), units).tolist(), 0.0)
        return prepared.prior

    def release_class_counts(self, prepared: Prepared, spend: Callable[[int], None]) -> None:
        """Count the units of each class or finding, once per run: spent before it is used."""
        plan, units = prepared.plan, prepared.units
        release = release_of(prepared.recipe, CLASS_COUNTS)
        if plan is None or release is None:
            return
        check_counted(plan, private_releases(prepared.recipe))
        spend(1)
        cells, num_cells = _label_cells(units.data)
        self.class_counts = noisy_counts(cells, num_cells, units, release, source=prepared.source).tolist()

    def release_score_histogram(
        self, prepared: Prepared, logits_of: LogitsOf, spend: Callable[[int], None]
    ) -> None:
        """How the trained model scores the units of either class, once per run: spent before it is used."""
        plan, units = prepared.plan, prepared.units
        release = release_of(prepared.recipe, SCORE_HISTOGRAM)
        if plan is None or release is None or self.score_histogram is not None:
            return
        check_counted(plan, private_releases(prepared.recipe))
        spend(plan.num_steps)
        cells = _cells(prepared, logits_of)
        noisy = noisy_counts(cells, 2 * NUM_BINS, units, release, source=prepared.source)
        self.score_histogram = noisy.tolist()

    def decision(self, prepared: Prepared, logits_of: LogitsOf) -> Decision:
        """The decision of the released model: with its threshold, and its temperature if images tell it."""
        decision, settings = prepared.decision, prepared.recipe.decision
        noise = settings.threshold_noise_multiplier
        many, counts = prepared.splits.train.multi_label, self.score_histogram
        if counts is None and settings.threshold == "released":  # without privacy: of the images as they are
            noise = 0.0
            counts = exact_counts(_cells(prepared, logits_of), 2 * NUM_BINS, prepared.units).tolist()
        if counts is not None and many:
            return replace(decision, thresholds=finding_thresholds(counts, noise))
        if counts is not None:
            return replace(decision, threshold=threshold_of_histogram(counts, noise))
        val = prepared.splits.val
        if val is None or not prepared.recipe.data.val_is_public:
            return decision
        if many:
            return _publicly_chosen(decision, logits_of(val.images), val, settings.threshold)
        corrected = decision.correct(logits_of(val.images))
        decision = replace(decision, temperature=fitted_temperature(corrected, val.labels))
        if len(val.classes) != 2 or not isinstance(settings.threshold, str):
            return decision
        corrected = corrected / decision.temperature
        chosen = public_threshold(
            corrected, val.labels, positive=decision.positive, asked=settings.threshold == "public"
        )
        return decision if chosen is None else replace(decision, threshold=chosen)


def _publicly_chosen(decision: Decision, logits: Tensor, val: ImageSet, wanted: object) -> Decision:
    """The findings' thresholds on public images; where too few have a finding, it keeps the one it had."""
    if not isinstance(wanted, str):
        return decision
    cuts = list(decision.thresholds or (0.5,) * len(val.classes))
    for number in range(len(cuts)):
        chosen = best_threshold(logits[:, number], val.labels[:, number] > 0, asked=wanted == "public")
        cuts[number] = cuts[number] if chosen is None else chosen
    return replace(decision, thresholds=tuple(cuts))


def _label_cells(data: ImageSet) -> tuple[Tensor, int]:
    """The cell in which each image is counted, and their number: of each finding with it and without."""
    return (data.labels.long(), 2) if data.multi_label else (data.labels, len(data.classes))


def _cells(prepared: Prepared, logits_of: LogitsOf) -> Tensor:
    """The cell of each training image in the histogram of corrected log-odds; of each finding its own."""
    data, decision = prepared.units.data, prepared.decision
    corrected = decision.correct(logits_of(data.images))
    if data.multi_label:
        return score_cells(corrected, data.labels > 0)
    log_odds = corrected[:, decision.positive] - corrected[:, 1 - decision.positive]
    return score_cells(log_odds, data.labels == decision.positive)
