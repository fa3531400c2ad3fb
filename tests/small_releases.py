"""Releases without a training: a small net with drawn weights, and the statement of a plan."""

from __future__ import annotations

from pathlib import Path

import torch

from sfumato.models import create_model, find_variant
from sfumato.privacy.plan import Plan
from sfumato.release.release import FORMAT, write_release

CLASSES = ("cat", "dog", "yak")


def small_release(
    folder: Path, *, name: str = "scale_resnet9", image_size: int = 12, channels: int = 3, **options: object
) -> Path:
    """A release folder with a model of the zoo that nobody trained."""
    options = options or {"width": 4, "groups": 2}
    if "image_size" in find_variant(name).options():
        options["image_size"] = image_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = create_model(name, num_classes=len(CLASSES), in_channels=channels, **options)
        # features that are fixed keep the weights that suit them: others would only amplify rounding
        if hasattr(getattr(model, "extractor", None), "fit"):
            model.extractor.fit(num_images=40)
        drawn = model.head if name.endswith("_features") else model
        for parameter in drawn.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    plan = Plan.calibrate(epsilon=3, delta=1e-3, num_examples=500, batch_size=50, num_steps=10)
    privacy = plan.statement().as_dict()
    config = {
        "format": FORMAT,
        "model": {"name": name, "options": options},
        "classes": list(CLASSES),
        "image_size": image_size,
        "channels": channels,
        "mean": [0.4, 0.5, 0.6][:channels],
        "std": [0.2, 0.25, 0.3][:channels],
        "fit": "crop",
        "data": "animals",
    }
    write_release(folder, model=model, config=config, privacy=privacy, card="# small\n")
    return folder
