"""Images for canaries: made by chance alone, labels too, so that nothing about them is anybody's."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from sfumato.data.generated import DeadLeaves
from sfumato.data.images import ImageSet, Task
from sfumato.randomness import SeededSource

CanaryImages = Literal["mislabelled", "noise", "optimised"]


def canary_images(
    key: int,
    count: int,
    *,
    kind: CanaryImages,
    shape: tuple[int, ...],
    classes: tuple[str, ...],
    task: Task = "single-label",
) -> ImageSet:
    """The ``count`` images of this key, for images of this ``shape`` (C, H, W), and their labels.

    ``mislabelled``: dead leaves, whose local statistics are near those of photographs. ``noise``: every pixel
    uniform. ``optimised``: the leaves that such canaries are made of. Labels are uniform and independent of
    the images; of several findings each is a fair coin.
    """
    source, (channels, height, width) = SeededSource(key), shape
    if task == "multi-label":
        coins = source.random_bytes(count * len(classes), purpose="canary labels", step=0) < 128
        labels = torch.from_numpy(coins).view(count, len(classes)).float()
    else:
        words = source.random_bytes(8 * count, purpose="canary labels", step=0).view(np.uint64)
        labels = torch.from_numpy((words % np.uint64(len(classes))).astype(np.int64))
    if kind == "noise":
        pixels = source.random_bytes(count * channels * height * width, purpose="canary images", step=0)
        images = torch.from_numpy(pixels).view(count, *shape)
    else:
        seed = int(source.random_bytes(8, purpose="canary images", step=0).view(np.uint64)[0] >> np.uint64(1))
        side = max(height, width)
        leaves = DeadLeaves(image_size=side, channels=channels).images(count, seed=seed)
        images = leaves[:, :, :height, :width].contiguous()
    return ImageSet(images=images, labels=labels, classes=classes, name="canaries")
