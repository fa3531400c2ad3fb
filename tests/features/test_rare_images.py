"""Images made for fixed features lie where ordinary ones do not, and nothing about them is drawn."""

from __future__ import annotations

import torch

from sfumato.data.generated import dead_leaves
from sfumato.features.patch_features import PatchFeatures
from sfumato.features.rare_images import rare_images


def last_half(features: PatchFeatures, images: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        rows = features(images.float() / 255)
    return rows[:, ranks[len(ranks) // 2 :]].square().sum(1)


def test_rare_images_move_to_where_ordinary_ones_vary_least() -> None:
    features = PatchFeatures(num_layers=1, num_patches=8, num_directions=40, grid=2).fit(num_images=80)
    images = dead_leaves(60, seed=4)
    before = images.clone()
    made = rare_images(features, images)
    assert made.shape == images.shape
    assert made.dtype == torch.uint8
    assert torch.equal(images, before)  # the caller's are left alone
    with torch.no_grad():
        ranks = features(images.float() / 255).var(0).argsort(descending=True)
    ordinary, rare = (last_half(features, each, ranks) for each in (images, made))
    assert rare.mean() > 1.3 * ordinary.mean()
    assert (rare > ordinary).float().mean() > 0.8
    assert torch.equal(rare_images(features, images), made)  # nothing is drawn
    assert not torch.equal(rare_images(features, images.flip(0)), made)
