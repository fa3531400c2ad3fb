"""What De et al. 2022 audit: tables 8 and 9 of their appendix A.2, and the data sets D and D' = D + {z}."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.data import DataSplits, ImageSet, load_data, normalise
from sfumato.data.augmentation import normalisation_for
from sfumato.errors import ConfigError
from sfumato.models import create_model
from sfumato.privacy import Plan
from sfumato.training.inputs import Views

LEARNING_RATES = (0.1, 0.5, 1.0)
CLIP_NORMS = (0.1, 1.0, 10.0)
# z by name -> (digit of a test image, label); None: an image that is no digit, whose label the paper omits
CANARIES: Mapping[str, tuple[int | None, int]] = {
    "noise": (None, 0),
    "blank": (None, 0),
    "7-as-8": (7, 8),
    "6-as-7": (6, 7),
    "0-as-1": (0, 1),
}
VIEW_PADDING = 4  # random crops of images padded by 4 pixels, as the paper's views; digits are not mirrored
PAPER_BOUNDS = {  # table 9, 490,000 models a side: ε -> (lower bound, AUC, advantage)
    60_000: {1: (0.279, 0.54, 0.06), 2: (0.456, 0.57, 0.10), 4: (1.139, 0.62, 0.17), 8: (2.153, 0.72, 0.31)},
    100: {1: (0.361, 0.59, 0.13), 2: (0.837, 0.66, 0.22), 4: (2.461, 0.79, 0.43), 8: (4.327, 0.91, 0.67)},
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The size of D, and what goes with it in table 8."""

    num_examples: int
    batch_size: int
    num_steps: tuple[int, ...]
    models_at_once: int  # of one task: what a kill loses

    @property
    def delta(self) -> float:
        return 1 / self.num_examples


PROBLEMS = {
    100: Problem(num_examples=100, batch_size=64, num_steps=(50, 100), models_at_once=25),
    60_000: Problem(num_examples=60_000, batch_size=4096, num_steps=(500, 1000), models_at_once=1),
}


@dataclass(frozen=True, kw_only=True, order=True)
class Setting:
    """One row of phase I: z and the hyper-parameters. The guarantee is the same for all of them."""

    canary: str
    learning_rate: float
    clip_norm: float
    num_steps: int

    def as_dict(self) -> dict[str, str | float]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.canary},{self.learning_rate:g},{self.clip_norm:g},{self.num_steps}"

    @property
    def training(self) -> tuple[float, float, int]:
        """What models without z have in common, whatever z is."""
        return self.learning_rate, self.clip_norm, self.num_steps


def parse_setting(problem: Problem, text: str) -> Setting:
    """``"blank,0.1,1,500"``: z, rate, clip norm and updates, each one of table 8's."""
    by_text = {str(setting): setting for setting in all_settings(problem)}
    if text not in by_text:
        first = next(iter(by_text))
        raise ConfigError(
            "unknown-setting",
            f"--setting {text} is not a row of table 8 with |D| = {problem.num_examples:,}.",
            fix=f"Give z, rate, clip norm and updates, as in {first}: z {', '.join(CANARIES)}; "
            f"rate {_listed(LEARNING_RATES)}; clip norm {_listed(CLIP_NORMS)}; "
            f"updates {_listed(problem.num_steps)}.",
        )
    return by_text[text]


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def all_settings(problem: Problem) -> list[Setting]:
    """All of table 8."""
    choices = product(CANARIES, LEARNING_RATES, CLIP_NORMS, problem.num_steps)
    return [
        Setting(canary=canary, learning_rate=rate, clip_norm=clip, num_steps=steps)
        for canary, rate, clip, steps in choices
    ]


@functools.cache
def plan_for(problem: Problem, epsilon: float, num_steps: int) -> Plan:
    """The plan of nominal ε at δ = 1/|D|, with the noise of our own accountant."""
    return Plan.calibrate(
        epsilon=epsilon,
        delta=problem.delta,
        num_examples=problem.num_examples,
        batch_size=problem.batch_size,
        num_steps=num_steps,
    )


def setting_plan(problem: Problem, epsilon: float, setting: Setting) -> Plan:
    """The same with the setting's clip norm, on which the noise multiplier does not depend."""
    return replace(plan_for(problem, epsilon, setting.num_steps), clip_norm=setting.clip_norm)


@dataclass(frozen=True)
class Experiment:
    """What all models of an audit share: the examples, the five z, and the first weights."""

    examples: ImageSet  # D
    canaries: Mapping[str, ImageSet]  # one image each
    model: nn.Module
    views: Views

    def with_canary(self, name: str) -> ImageSet:
        """D' = D + {z}; z comes last."""
        z = self.canaries[name]
        return ImageSet(
            torch.cat([self.examples.images, z.images]),
            torch.cat([self.examples.labels, z.labels]),
            self.examples.classes,
            name="audit",
        )

    def rows(self) -> tuple[Tensor, Tensor]:
        """All z as inputs without random views, and their labels: what models are asked about."""
        images = torch.cat([each.images for each in self.canaries.values()])
        labels = torch.cat([each.labels for each in self.canaries.values()])
        return normalise(images, self.views.mean, self.views.std), labels


def prepare(problem: Problem, *, views: int, init_seed: int, splits: DataSplits | None = None) -> Experiment:
    """The first |D| images of MNIST's training set, the five z, and LeNet with fixed random weights."""
    splits = load_data("mnist") if splits is None else splits
    if splits.test is None:
        raise ConfigError(
            "too-few-images",
            f"{splits.train.name} has no test images.",
            why="Three of the five z are test images.",
            fix="Take the whole of MNIST.",
        )
    if len(splits.train) < problem.num_examples:
        raise ConfigError(
            "too-few-images",
            f"|D| is {problem.num_examples}, but there are {len(splits.train)} training images.",
            fix="Take --size 100, or the whole of MNIST.",
        )
    examples = splits.train.select(torch.arange(problem.num_examples))
    mean, std = normalisation_for("mnist", 1)
    with torch.random.fork_rng():
        torch.manual_seed(init_seed)
        model = create_model("lenet", num_classes=10, in_channels=1)
    return Experiment(
        examples=examples,
        canaries={name: _canary(name, splits.test) for name in CANARIES},
        model=model,
        views=Views(mean=mean, std=std, count=views, padding=VIEW_PADDING if views else 0),
    )


def _canary(name: str, test: ImageSet) -> ImageSet:
    digit, label = CANARIES[name]
    if digit is not None:
        image = test.images[test.labels == digit][:1]
    elif name == "blank":
        image = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    else:
        pixels = np.random.default_rng(0).integers(0, 256, (1, 1, 28, 28), dtype=np.uint8)
        image = torch.from_numpy(pixels)
    return ImageSet(image, torch.tensor([label]), test.classes, name="audit")
