"""Dead leaves: repeatable, of any shape, with the statistics that make them stand in for photographs."""

from __future__ import annotations

import pytest
import torch

from sfumato.data.generated import DeadLeaves, dead_leaves


def spectral_slope(images: torch.Tensor) -> float:
    """Exponent a of the mean power spectrum 1/f^a over the middle frequencies."""
    grey = images.float().mean(1)
    power = torch.fft.fft2(grey - grey.mean((1, 2), keepdim=True)).abs().square().mean(0)
    size = grey.shape[-1]
    frequency = torch.fft.fftfreq(size)
    radius = (frequency[:, None].square() + frequency[None].square()).sqrt()
    middle = (radius > 1.5 / size) & (radius < 0.35)
    x, y = radius[middle].log(), power[middle].log()
    return -(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3), (64, 2)])
def test_images_have_any_size_and_channels_and_use_the_whole_range(size, channels):
    images = dead_leaves(20, image_size=size, channels=channels, seed=1)
    assert images.shape == (20, channels, size, size)
    assert images.dtype == torch.uint8
    assert images.float().std() > 30


def test_equal_seeds_give_equal_images_and_others_do_not():
    assert torch.equal(dead_leaves(5, seed=3), dead_leaves(5, seed=3))
    assert not torch.equal(dead_leaves(5, seed=3), dead_leaves(5, seed=4))
    assert dead_leaves(0).shape == (0, 3, 32, 32)


def test_the_power_spectrum_falls_as_that_of_photographs():
    assert 1.4 < spectral_slope(dead_leaves(200, seed=0)) < 3.0
    noise = torch.randint(256, (200, 3, 32, 32), dtype=torch.uint8)
    assert spectral_slope(noise) < 0.3


def test_small_leaves_are_many_and_large_ones_few():
    law = DeadLeaves(num_leaves=1, texture=0.0, shade=0.0, softness=(0.5, 0.5))
    cover = torch.cat(
        [law._leaf(500, torch.arange(32.0) + 0.5, torch.Generator().manual_seed(s))[0] for s in (0, 1)]
    )
    area = cover.sum((1, 2))
    assert (area < 30).float().mean() > 0.6
    assert 0.0 < (area > 300).float().mean() < 0.05
