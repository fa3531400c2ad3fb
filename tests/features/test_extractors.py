"""Scatter and backbone features: unit rows, mirror-free, each from its own image; folding is exact."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.data.generated import dead_leaves
from sfumato.errors import ConfigError, ModelError
from sfumato.features.backbone import BackboneFeatures, folded
from sfumato.features.combined import CombinedFeatures
from sfumato.features.patch_features import PatchFeatures
from sfumato.features.scatter_features import GroupedScatterMaps, ScatterFeatures, ScatterMaps
from sfumato.models import create_model
from sfumato.models.fixed_features import lite_backbone


def scatter() -> nn.Module:
    return ScatterFeatures(num_directions=30, grid=2).fit(num_images=60)


def backbone() -> nn.Module:
    torch.manual_seed(0)
    return lite_backbone(input_size=64, pretrained=False)


def combined() -> nn.Module:
    small = {"num_directions": 20, "grid": 2}
    parts = [PatchFeatures(num_layers=1, num_patches=6, **small), ScatterFeatures(**small)]
    return CombinedFeatures(parts).fit(num_images=40)


@pytest.mark.parametrize("build", [scatter, backbone, combined])
def test_rows_have_unit_norm_ignore_mirroring_and_come_from_their_own_image(build):
    features, images = build(), dead_leaves(6, seed=4).float() / 255
    with torch.no_grad():
        rows = features(images)
        assert rows.shape == (6, features.num_features)
        assert torch.allclose(rows.norm(dim=1), torch.ones(6), atol=1e-5)
        assert torch.allclose(rows, features(images.flip(-1)), atol=1e-4)
        changed = images.clone()
        changed[1:] = changed[1:].flip(0) * 0.3
        again = features(changed)
    assert torch.allclose(rows[0], again[0], atol=1e-5)
    assert not torch.allclose(rows[1], again[1], atol=1e-4)


def test_without_the_mirror_average_left_and_right_are_told_apart():
    images = dead_leaves(3, seed=4).float() / 255
    for build in (partial(PatchFeatures, num_layers=1, num_patches=6), ScatterFeatures):
        features = build(num_directions=20, grid=2, mirror=False).fit(num_images=40)
        assert not torch.allclose(features(images), features(images.flip(-1)), atol=1e-2)
    assert ScatterFeatures().described != ScatterFeatures(mirror=False).described  # another cache entry


def test_maps_are_normalised_in_groups_of_their_own_image():
    maps = GroupedScatterMaps(image_size=28, in_channels=1)
    images = torch.rand(2, 1, 28, 28)
    rows = maps(images)
    assert rows.shape == (2, 81 * 7 * 7)
    assert maps.num_features == 81 * 7 * 7
    groups = rows.reshape(2, 27, -1)
    assert groups.mean(2).abs().max() < 1e-5
    assert torch.allclose(groups.std(2), groups.std(2).mean(), rtol=0.05)
    assert torch.allclose(maps(images[:1])[0], rows[0], atol=1e-6)
    grouped = ScatterFeatures(num_directions=30, grid=2, group_norm=True).fit(num_images=60)
    colour = torch.rand(2, 3, 32, 32)
    assert not torch.allclose(grouped(colour), scatter()(colour), atol=1e-2)
    assert torch.allclose(scatter()(colour), scatter()(colour), atol=1e-5)


def test_maps_are_whitened_alike_at_all_places():
    maps = ScatterMaps(image_size=32, num_maps=20).fit(num_images=150, seed=0)
    images = dead_leaves(100, seed=1).float() / 255
    rows, places = maps(images), maps.places(images)
    assert rows.shape == (100, 20 * 8 * 8)
    assert torch.allclose(maps(images[:2]), rows[:2], atol=1e-5)  # no image enters another's row

    white = maps.whitening.project(places.reshape(100 * 64, 243)).reshape(100, 64, 20)
    one_map_after_the_other = white.transpose(1, 2).flatten(1)
    assert torch.allclose(rows, F.normalize(one_map_after_the_other, dim=1), atol=1e-5)
    assert not torch.allclose(rows, F.normalize(white.flatten(1), dim=1), atol=1e-2)

    white, raw = white.flatten(0, 1), places.reshape(100 * 64, 243)
    assert (torch.corrcoef(white.T) - torch.eye(20)).abs().max() < 0.3
    assert white.std(0).max() < 3 * white.std(0).min()
    assert (torch.corrcoef(raw.T) - torch.eye(243)).abs().max() > 0.8
    assert raw.std(0).max() > 3 * raw.std(0).min()
    assert ScatterMaps(image_size=28, in_channels=1, num_maps=100).shape == (81, 7, 7)


def test_colours_of_equal_brightness_are_told_apart():
    features, grey = (
        scatter(),
        dead_leaves(4, seed=5).float().mean(1, keepdim=True).div(255).expand(-1, 3, -1, -1),
    )
    tinted = grey.clone()
    tinted[:, 0, ::2], tinted[:, 2, ::2] = grey[:, 0, ::2] * 0.5, grey[:, 2, ::2] * 1.5  # the sum stays
    assert torch.allclose(tinted.sum(1), grey.sum(1), atol=1e-5)
    assert not torch.allclose(features(tinted), features(grey), atol=1e-2)
    swapped = grey.flip(1)  # red and blue of a grey image are alike
    assert torch.allclose(features(swapped), features(grey), atol=1e-5)


def test_folding_the_batch_norms_changes_nothing():
    torch.manual_seed(1)
    trunk = create_model("efficientnet_lite0", num_classes=2, width=0.25).trunk.eval()
    for name, value in trunk.named_buffers():
        if name.endswith("running_var"):
            value.uniform_(0.5, 2.0)
        elif name.endswith("running_mean"):
            value.normal_()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before, after = trunk(images), folded(trunk)(images)
        assert torch.allclose(before, after, atol=1e-4)
        [value for name, value in trunk.named_buffers() if name.endswith("running_mean")][-1].add_(1.0)
        assert not torch.allclose(trunk(images), after, atol=1e-4)


def test_a_network_without_features_is_refused():
    with pytest.raises(ModelError, match="no-features"):
        BackboneFeatures(nn.Linear(3, 3), num_features=3, input_size=8, mean=(0.5,), std=(0.5,))


def test_several_networks_stand_side_by_side_with_the_same_weight():
    given = {"input_size": 8, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    images = torch.rand(2, 3, 8, 8)
    one = BackboneFeatures(Spread(), num_features=3, **given)
    two = BackboneFeatures([Spread(), Louder()], num_features=6, **given)
    assert torch.allclose(two(images)[:, :3], one(images) / 2**0.5, atol=1e-6)
    assert torch.allclose(two(images).norm(dim=1), torch.ones(2), atol=1e-6)
    assert torch.allclose(two(images)[:, 3:].norm(dim=1), torch.full((2,), 0.5**0.5), atol=1e-6)


@pytest.mark.parametrize("networks", ["", "lite9", "efficientnet_lite0"])
def test_networks_that_do_not_exist_are_refused(networks):
    with pytest.raises(ConfigError, match="bad-model-option"):
        create_model("efficientnet_lite_features", num_classes=2, networks=networks, pretrained=False)


class Spread(nn.Module):
    """Three numbers of very different size from each image."""

    def features(self, images):
        return images.mean(dim=(1, 2, 3))[:, None] * torch.tensor([1.0, -16.0, 100.0])


def test_the_square_root_keeps_signs_and_lets_small_features_count():
    images = torch.ones(2, 3, 8, 8)
    given = {"num_features": 3, "input_size": 8, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    rooted = BackboneFeatures(Spread(), **given)(images)[0]
    plain = BackboneFeatures(Spread(), square_root=False, **given)(images)[0]
    assert torch.allclose(rooted / rooted[0], torch.tensor([1.0, -4.0, 10.0]), atol=1e-4)
    assert torch.allclose(plain / plain[0], torch.tensor([1.0, -16.0, 100.0]), atol=1e-3)


class Louder(Spread):
    def features(self, images):
        return 1000 * super().features(images).flip(1)
