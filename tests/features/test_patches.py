"""Patch features, whitening and scattering: against slow references, and against what would leak."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize, unfold

from sfumato.data.generated import dead_leaves
from sfumato.features.patch_features import PatchFeatures, SoftPooling
from sfumato.features.patches import PatchLayer, random_patches
from sfumato.features.scattering import Scattering, morlets
from sfumato.features.whitening import Whitening


@pytest.fixture(scope="module")
def leaves():
    return dead_leaves(150, seed=5)


def small_features(**changes) -> PatchFeatures:
    settings = {"num_patches": 16, "second_patches": 16, "num_directions": 60, **changes}
    return PatchFeatures(**settings)


def test_a_layer_is_the_cosine_of_whitened_patches_with_its_dictionary(leaves):
    pixels = leaves.float() / 255
    layer = PatchLayer(3, patch_size=6, num_patches=20).fit(
        pixels, generator=torch.Generator().manual_seed(0)
    )
    fast = layer(pixels[:2])
    patches = unfold(pixels[:2], 6).transpose(1, 2)  # (2, 729, 108)
    centred = patches - patches.mean(2, keepdim=True)
    normal = centred / (centred.square().mean(2, keepdim=True) + (10 / 255) ** 2).sqrt()
    whitened = normal @ layer.whitener.flatten(1).T
    products = normal @ layer.dictionary.flatten(1).T
    response = products / (whitened.norm(dim=2, keepdim=True) + layer.floor)
    wanted = torch.cat([response - layer.threshold, -response - layer.threshold], 2).clamp_min(0)
    assert torch.allclose(fast, wanted.transpose(1, 2).reshape(fast.shape), atol=1e-4)
    assert not torch.allclose(fast, wanted.flip(2).transpose(1, 2).reshape(fast.shape), atol=1e-2)


def test_whitened_generated_patches_have_no_preferred_direction(leaves):
    pixels = leaves.float() / 255
    layer = PatchLayer(3, patch_size=4, num_patches=8).fit(pixels, generator=torch.Generator().manual_seed(0))
    patches = random_patches(pixels, 4, count=20_000, generator=torch.Generator().manual_seed(1))
    centred = patches - patches.mean(1, keepdim=True)
    normal = centred / (centred.square().mean(1, keepdim=True) + (10 / 255) ** 2).sqrt()
    leading = (normal @ layer.whitener.flatten(1).T)[:, :8]
    assert torch.allclose(leading.T @ leading / len(leading), torch.eye(8), atol=0.12)
    raw = normal.T @ normal / len(normal)
    assert raw.diagonal().std() + raw.abs().max() > 0.2  # before: far from the identity


def test_about_a_tenth_of_the_responses_of_generated_images_is_active(leaves):
    pixels = leaves.float() / 255
    layer = PatchLayer(3, patch_size=6, num_patches=32).fit(
        pixels, generator=torch.Generator().manual_seed(0)
    )
    share = (layer(pixels[:50])[:, :32] > 0).float().mean().item()
    assert 0.05 < share < 0.2


def test_soft_windows_have_sum_one_and_move_less_under_a_shift_than_hard_regions():
    pooling = SoftPooling(27, grid=3, spread=0.5)
    assert torch.allclose(pooling.window.sum(0), torch.ones(9), atol=1e-5)
    maps = torch.zeros(1, 1, 27, 27)
    maps[0, 0, 8, 8] = 1
    moved = maps.roll((1, 1), (2, 3))  # over the edge of the hard regions
    hard = torch.nn.functional.avg_pool2d
    soft_change = (pooling(maps) - pooling(moved)).norm() / pooling(maps).norm()
    hard_change = (hard(maps, 9) - hard(moved, 9)).norm() / hard(maps, 9).norm()
    assert soft_change < 0.5 < hard_change


@pytest.mark.parametrize(("size", "channels", "layers"), [(32, 3, 2), (28, 1, 1), (64, 1, 2)])
def test_features_are_unit_rows_equal_for_mirrored_images_and_repeatable(size, channels, layers):
    def build(seed):
        features = small_features(image_size=size, in_channels=channels, num_layers=layers)
        return features.fit(num_images=100, seed=seed)

    features, images = build(0), dead_leaves(6, image_size=size, channels=channels, seed=9).float() / 255
    rows = features(images)
    assert rows.shape == (6, features.num_features)
    assert torch.allclose(rows.norm(dim=1), torch.ones(6), atol=1e-5)
    assert torch.allclose(rows, features(images.flip(-1)), atol=1e-4)
    assert not torch.allclose(rows, features(images.flip(-2)), atol=1e-2)
    assert torch.allclose(rows, build(0)(images), atol=1e-5)
    assert not torch.allclose(rows, build(1)(images), atol=1e-2)


def test_a_row_depends_on_its_own_image_alone():
    features = small_features(num_layers=2).fit(num_images=100)
    images = dead_leaves(9, seed=2).float() / 255
    changed = images.clone()
    changed[1:] = changed[1:].flip(0) * 0.5
    assert torch.equal(features(images)[0], features(changed)[0])
    assert not torch.allclose(features(images)[1], features(changed)[1], atol=1e-2)


def test_weights_alone_rebuild_the_features():
    features = small_features(num_layers=2).fit(num_images=100)
    copy = small_features(num_layers=2)
    images = dead_leaves(3, seed=2).float() / 255
    assert not torch.allclose(copy(images), features(images), atol=1e-3)
    copy.load_state_dict(features.state_dict())
    assert torch.equal(copy(images), features(images))


def test_whitening_gives_unit_covariance_on_what_it_was_fitted_on():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5000, 30, generator=generator) @ torch.randn(30, 30, generator=generator)
    whitening = Whitening(30, 10).fit(rows, ridge=0.0)
    whitened = rows @ whitening.projection + whitening.offset
    assert torch.allclose(whitened.T @ whitened / 5000, torch.eye(10), atol=0.02)
    assert torch.allclose(whitening(rows), normalize(whitened, dim=1), atol=1e-5)
    assert not torch.allclose(rows[:, :10].T @ rows[:, :10] / 5000, torch.eye(10), atol=1.0)


def test_scattering_of_a_constant_is_the_constant_and_nothing_else():
    maps = Scattering()(torch.full((1, 1, 32, 32), 0.7))
    assert maps.shape == (1, 81, 8, 8)
    assert torch.allclose(maps[:, 0], torch.full((1, 8, 8), 0.7), atol=1e-4)
    assert maps[:, 1:].abs().max() < 1e-3
    assert Scattering()(torch.rand(1, 1, 32, 32))[:, 1:].abs().max() > 1e-2


def test_scattering_is_that_of_full_convolutions_by_fourier_transform():
    """Away from the border the strided convolutions in space are the products of spectra."""
    image = torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    wavelets = morlets(0, 8)
    size = wavelets.shape[-1]
    padded = torch.zeros(8, 64, 64, dtype=torch.complex64)
    padded[:, :size, :size] = torch.complex(wavelets[:8, 0], wavelets[8:, 0])
    padded = padded.roll((-(size // 2), -(size // 2)), (1, 2))
    # correlation with ψ is the product with the conjugate spectrum
    spectrum = torch.fft.fft2(image[0, 0].to(torch.complex64))
    wanted = torch.fft.ifft2(spectrum * torch.fft.fft2(padded.conj()).conj()).abs()
    found = Scattering()._modulus(image, 0, stride=1)[0]
    inside = slice(size, 64 - size)
    assert torch.allclose(found[:, inside, inside], wanted[:, inside, inside], atol=1e-4)


def test_an_oriented_wave_answers_at_its_own_angle():
    place = torch.arange(32.0)
    wave = torch.cos(0.75 * math.pi * place)[None, :].expand(32, 32)[None, None]
    maps = Scattering()(wave)[0, 1:9].mean((1, 2))  # first order, finest scale
    assert maps.argmax() == 0
    turned = Scattering()(wave.transpose(2, 3))[0, 1:9].mean((1, 2))
    assert turned.argmax() == 4
