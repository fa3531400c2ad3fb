"""Runs that take a second: small separable images, a small net, and observers that watch or interrupt."""

from __future__ import annotations

import torch
from torch import nn

from sfumato.data import DataSplits, ImageSet
from sfumato.recipes.recipe import Recipe, with_settings

CLASSES = ("dark", "middle", "bright")


def small_set(count: int, *, seed: int, patients: int | None = None, name: str = "shades") -> ImageSet:
    """Grey 8 x 8 images whose brightness tells the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % len(CLASSES)
    noise = torch.randint(0, 60, (count, 1, 8, 8), generator=generator)
    images = (labels.view(-1, 1, 1, 1) * 80 + noise).clamp(0, 255).to(torch.uint8)
    owners = None if patients is None else torch.arange(count) % patients
    return ImageSet(images, labels, CLASSES, owners, name)


def small_splits(*, train: int = 96, test: int = 30, val: int = 0, patients: int | None = None) -> DataSplits:
    return DataSplits(
        train=small_set(train, seed=1, patients=patients),
        val=small_set(val, seed=3) if val else None,
        test=small_set(test, seed=2) if test else None,
    )


class SmallNet(nn.Module):
    """Convolution, norm and linear layer for 8 x 8 images."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 16, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.convolution(x)))
        return self.head(torch.nn.functional.avg_pool2d(x, 2).flatten(1))


def small_recipe(**changes: object) -> Recipe:
    """Eight steps on a net of the zoo; ``small_recipe(training__seed=7)`` changes a setting."""
    settings = {
        "data.name": "shades",
        "model.name": "scale_resnet9",
        "model.options": {"width": 4, "groups": 2},
        "privacy.epsilon": 8.0,
        "privacy.delta": 1e-3,
        "training.batch_size": 32,
        "training.num_steps": 8,
        "training.learning_rate": 1.0,
        "training.ema_decay": 0.9,
        "performance.save_every_seconds": 0.0,
    }
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    return with_settings(Recipe(), settings)


class Watcher:
    """Remembers what a run reports, and can break it off after a step."""

    def __init__(self, *, crash_after: int | None = None, error: type[BaseException] = RuntimeError) -> None:
        self.crash_after, self.error = crash_after, error
        self.records, self.epsilons, self.notes, self.start_step = [], [], [], None
        self.computations = []

    def started(self, prepared, start_step):
        self.start_step = start_step

    def stepped(self, record, epsilon):
        self.records.append(record)
        self.epsilons.append(epsilon)
        if record.step == self.crash_after:
            raise self.error("as if killed")

    def scored(self, step, scored, scores):
        self.notes.append((step, scored.split, scores.accuracy))

    def noted(self, text):
        self.notes.append(text)

    def computed(self, what, done, total):
        self.computations.append((what, done, total))
