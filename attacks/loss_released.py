"""Training losses are published beside the model, and tell who was in the data.

Safeguard: losses, norms and the share clipped go to ``state/sensitive.jsonl``; ``metrics.jsonl`` and
``release/`` have nothing that was computed from private images without noise.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch
from membership import report

from sfumato.data import DataSplits, ImageSet
from sfumato.recipes.recipe import Recipe, with_settings
from sfumato.run.session import train

SETTINGS = {
    "data.name": "shades",
    "model.name": "scale_resnet9",
    "model.options": {"width": 4, "groups": 2},
    "privacy.epsilon": 1.0,
    "privacy.delta": 1e-3,
    "privacy.sampling": "full",
    "training.num_steps": 2,
    "training.seed": 3,  # so that the attacker's rehearsal and the victim's run differ in the target alone
}


def data(*, member: bool) -> DataSplits:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (60, 1, 8, 8), generator=generator).to(torch.uint8)
    if not member:
        images[0] = 255 - images[0]  # somebody else's image
    return DataSplits(train=ImageSet(images, torch.arange(60) % 3, ("a", "b", "c"), None, "shades"))


def lines(folder: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def attack(published: str) -> tuple[bool, str]:
    """Compare the first published line with rehearsals of both cases."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ["SFUMATO_LEDGER"] = str(place / "ledger.sqlite")
        recipe = with_settings(Recipe(), SETTINGS)
        seen = {}
        for name, member in (("victim", True), ("with", True), ("without", False)):
            train(recipe, out=place / name, data=data(member=member))
            first = lines(place / name, published)[0]
            seen[name] = {key: value for key, value in first.items() if not key.endswith("per_second")}
    decided = seen["victim"] == seen["with"] != seen["without"]
    keys = sorted(seen["victim"])
    return (
        decided,
        f"{published} has {', '.join(keys)}; the two cases {'differ' if decided else 'look the same'}",
    )


def without_safeguard() -> tuple[bool, str]:
    return attack("state/sensitive.jsonl")


def with_safeguard() -> tuple[bool, str]:
    return attack("metrics.jsonl")


if __name__ == "__main__":
    report("Loss values released", without_safeguard, with_safeguard)
