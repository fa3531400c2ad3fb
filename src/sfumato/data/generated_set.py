"""The data set ``generated``: dead leaves labelled by how they were drawn, to pre-train on without any data.

A network that can tell the shape, size, direction and texture of the leaves has learnt what edges, corners,
scales and textures are. The images are drawn once for each size, and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from sfumato.data.cache import kept_images
from sfumato.data.fingerprint import image_ids
from sfumato.data.generated import KINDS, DeadLeaves
from sfumato.data.images import DataSplits, ImageSet
from sfumato.files import cache_home

NUM_TRAIN, NUM_TEST = 700 * len(KINDS), 100 * len(KINDS)
_VERSION = 1  # change it whenever other images are drawn
_TEST_SEED = 1_000_003


def load_generated(
    *,
    image_size: int = 32,
    channels: int = 3,
    num_train: int = NUM_TRAIN,
    num_test: int = NUM_TEST,
    on_progress: Callable[[int, int], None] | None = None,
) -> DataSplits:
    """Train and test images of this size, from the cache if they were drawn before."""

    def part(count: int, seed: int) -> ImageSet:
        labels = torch.arange(count) % len(KINDS)
        entry = entry_of(count, image_size=image_size, channels=channels, seed=seed)
        shape = (count, channels, image_size, image_size)

        def drawn() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            leaves = DeadLeaves(image_size=image_size, channels=channels)
            images = leaves.images_of(labels, seed=seed, on_progress=on_progress)
            yield images.numpy(), image_ids(images).numpy()

        images, ids = kept_images(entry, shape, drawn)
        return ImageSet(images, labels, KINDS, name="generated", content_ids=torch.from_numpy(ids))

    return DataSplits(train=part(num_train, 0), test=part(num_test, _TEST_SEED))


def entry_of(count: int, *, image_size: int, channels: int, seed: int) -> Path:
    """Where the images lie once they are drawn."""
    return cache_home("decoded") / f"generated-{_VERSION}-{count}-{image_size}-{channels}-{seed}"
