"""Whom privacy costs most: accuracy of private and of ordinary training, class by class and group by group.

De et al. 2022, section 6, after Bagdasaryan et al. 2019: it may cost under-represented groups more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sfumato.audit.scores import check_confidence
from sfumato.errors import DataError, RunError
from sfumato.features.cache import OnProgress, features_of
from sfumato.models.fixed_features import FixedFeatures
from sfumato.release.release import load
from sfumato.release.scored_images import data_of, images_of, is_sensitive, with_one_class
from sfumato.study.documents import COLOURS, GREY, INK, StudyResult, new_figure, styled
from sfumato.training.evaluation import predict_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Flags = NDArray[np.float64]  # of each image: whether it is classified correctly, or the share of runs that do


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Accuracy of ordinary minus that of private training, on the same images."""

    name: str
    kind: str  # "all", "class" or "group"
    num_images: int
    ordinary: float
    private: float
    gap: float
    lower: float
    upper: float


@dataclass(frozen=True, kw_only=True)
class Fairness:
    """The gaps, and how unequally they fall."""

    overall: Gap
    classes: list[Gap]
    groups: list[Gap]
    confidence: float

    def spread(self, gaps: Sequence[Gap]) -> float | None:
        """Largest minus smallest gap: 0 if privacy costs everybody alike. None for fewer than two."""
        return max(g.gap for g in gaps) - min(g.gap for g in gaps) if len(gaps) > 1 else None


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Which images of a split the runs of one side classify correctly: the share of runs, image by image."""

    right: Flags
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    image_ids: Tensor
    data: str
    epsilons: tuple[float | None, ...]
    sensitive: bool

    def check_same_images(self, other: Answers) -> None:
        """Refuse to compare answers to other questions."""
        if self.classes != other.classes or not torch.equal(self.image_ids, other.image_ids):
            raise DataError(
                "unpaired-scores",
                f"the runs were asked about other images or classes: {self.data} and {other.data}",
                why="A gap between accuracies means something on the same images only.",
                fix="Give the images with --data, and runs for the same classes.",
            )


def gather_answers(
    runs: Sequence[Path],
    *,
    private: bool,
    data: str | None = None,
    split: str = "test",
    on_progress: OnProgress | None = None,
) -> Answers:
    """The answers of all runs of one side; refuses a run of the other side."""
    gathered: list[Answers] = []
    for number, run in enumerate(runs, 1):
        released = load(run)
        epsilon = released.privacy["epsilon"]
        if (epsilon is not None) != private:
            raise RunError(
                "wrong-side",
                f"{run} was trained {'without' if private else 'with'} privacy",
                why="The study compares private runs with ordinary ones.",
                fix="Give private runs with --private, and those of train --no-privacy with --ordinary.",
            )
        name, images = images_of(released, data_of(run, released, data), split)
        with_one_class(images)
        if isinstance(released.model, FixedFeatures):
            logits = predict_rows(released.model, features_of(released.model.extractor, images.images))
        else:
            logits = released.logits(images.images)
        gathered.append(
            Answers(
                right=(logits.argmax(1) == images.labels).double().numpy(),
                labels=images.labels.numpy(),
                classes=released.classes,
                image_ids=images.known_ids,
                data=images.name,
                epsilons=(epsilon,),
                sensitive=is_sensitive(run, name, own_data=data is None),
            )
        )
        gathered[0].check_same_images(gathered[-1])
        if on_progress is not None:
            on_progress(number, len(runs))
    return replace(
        gathered[0],
        right=np.mean([answers.right for answers in gathered], axis=0),
        epsilons=tuple(answers.epsilons[0] for answers in gathered),
        sensitive=any(answers.sensitive for answers in gathered),
    )


def paired_gap(ordinary: Flags, private: Flags, *, name: str, kind: str, confidence: float = 0.95) -> Gap:
    """The difference with its interval over images; the two sides saw the same ones, in one order.

    Interval: Agresti & Min 2005 for paired shares, which adds half an image to each of the four cells; with
    shares over several runs instead of 0 and 1 it is the same formula. It covers the choice of images alone.
    """
    if len(ordinary) != len(private) or not len(ordinary):
        raise DataError(
            "unpaired-scores",
            f"{name}: {len(ordinary)} images on one side, {len(private)} on the other",
            fix="Compare runs on the same images, at least one.",
        )
    differences = ordinary - private
    count = len(differences) + 2.0  # half an image each: right on both, on neither, on one, on the other
    mean = differences.sum() / count
    variance = (np.square(differences).sum() + 1.0) / count - mean**2
    reach = NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(max(variance, 0.0) / count)
    return Gap(
        name=name,
        kind=kind,
        num_images=len(differences),
        ordinary=float(ordinary.mean()),
        private=float(private.mean()),
        gap=float(differences.mean()),
        lower=max(-1.0, float(mean - reach)),
        upper=min(1.0, float(mean + reach)),
    )


def measure_fairness(
    ordinary: Flags,
    private: Flags,
    labels: NDArray[np.int64],
    classes: Sequence[str],
    *,
    groups: Mapping[str, tuple[Flags, Flags]] | None = None,
    confidence: float = 0.95,
) -> Fairness:
    """Gaps over all images, by class (classes without images are left out), and by group.

    ``groups`` hold (ordinary, private) for the images of each group.
    """
    check_confidence(confidence)
    of_classes = [
        paired_gap(ordinary[members], private[members], name=name, kind="class", confidence=confidence)
        for index, name in enumerate(classes)
        if (members := labels == index).any()
    ]
    of_groups = [
        paired_gap(*sides, name=name, kind="group", confidence=confidence)
        for name, sides in (groups or {}).items()
    ]
    overall = paired_gap(ordinary, private, name="all images", kind="all", confidence=confidence)
    return Fairness(overall=overall, classes=of_classes, groups=of_groups, confidence=confidence)


def fairness_result(found: Fairness, described: Mapping[str, object], notice: str | None) -> StudyResult:
    """Document and rows; ``described`` says which runs and images were compared."""
    gaps = [found.overall, *found.groups, *found.classes]
    document = {
        **described,
        "confidence": found.confidence,
        "class_spread": found.spread(found.classes),
        "group_spread": found.spread(found.groups),
        "gaps": [asdict(gap) for gap in gaps],
    }
    return StudyResult(study="fairness", document=document, rows=[asdict(gap) for gap in gaps], notice=notice)


@styled
def draw_fairness(found: Fairness, *, private_label: str, most: int = 40) -> Figure:
    """Both accuracies of each class and group, and the gap with its interval, largest on top.

    Beyond ``most`` classes only those with the largest and the smallest gaps are drawn.
    """
    classes = sorted(found.classes, key=lambda gap: gap.gap)
    if len(classes) > most:
        classes = [*classes[: most // 2], *classes[-(most - most // 2) :]]
    shown = [*classes, *sorted(found.groups, key=lambda gap: gap.gap), found.overall]
    figure, axes = new_figure(
        6.9, 0.9 + 0.2 * len(shown), 1, 2, sharey=True, gridspec_kw={"width_ratios": [1.35, 1]}
    )
    left, right = axes[0]
    rows = np.arange(len(shown), dtype=float)
    rows[len(classes) :] += 0.5 if found.groups else 0.0
    rows[-1] += 0.5
    ordinary, private = ([100 * getattr(gap, side) for gap in shown] for side in ("ordinary", "private"))
    left.hlines(rows, private, ordinary, color="#c4c9d1", linewidth=1.6, zorder=1)
    left.plot(ordinary, rows, "o", color=COLOURS[0], markersize=4.5, label="ordinary training")
    left.plot(private, rows, "s", color=COLOURS[1], markersize=4.5, label=private_label)
    left.set_yticks(rows, [gap.name if len(gap.name) <= 28 else gap.name[:27] + "…" for gap in shown])
    left.set(xlabel="accuracy (%)", ylim=(-0.7, rows[-1] + 0.7))
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    gaps = [100 * gap.gap for gap in shown]
    low = [max(0.0, 100 * (gap.gap - gap.lower)) for gap in shown]
    high = [max(0.0, 100 * (gap.upper - gap.gap)) for gap in shown]
    right.axvline(0, color=INK, linewidth=0.7)
    right.axvline(100 * found.overall.gap, color=GREY, linewidth=0.8, linestyle=(0, (4, 2)))
    right.errorbar(
        gaps, rows, xerr=[low, high], fmt="D", color=INK, markersize=3.5, elinewidth=0.9, capsize=1.8
    )
    right.set_xlabel(f"ordinary − private (points), {100 * found.confidence:g} % interval")
    right.tick_params(axis="y", length=0)
    for one in (left, right):
        one.grid(axis="x")
    return figure
