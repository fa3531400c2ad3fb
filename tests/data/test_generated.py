"""Dead leaves: repeatable, of any shape, with the statistics that make them stand in for photographs."""

from __future__ import annotations

import pytest
import torch

from sfumato.data import generated
from sfumato.data.generated import DeadLeaves, dead_leaves, fitting_images, other_views


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
    axis = torch.arange(32.0) + 0.5
    leaves = [law._leaves(500, torch.Generator().manual_seed(s)) for s in (0, 1)]
    cover = torch.cat([each.drawn(axis[None, None, :], axis[None, :, None])[0] for each in leaves])
    area = cover.sum((1, 2))
    assert (area < 30).float().mean() > 0.6
    assert 0.0 < (area > 300).float().mean() < 0.05


def test_leaves_drawn_in_windows_are_those_drawn_on_the_whole_image(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = torch.arange(len(generated.KINDS))
    law = DeadLeaves(image_size=48, channels=2, num_leaves=150)
    in_windows = law.images(40, seed=5), law.images_of(kinds, seed=5)
    monkeypatch.setattr(generated, "_WHOLE", 48)
    assert all(map(torch.equal, in_windows, (law.images(40, seed=5), law.images_of(kinds, seed=5))))
    monkeypatch.setattr(generated, "_WHOLE", 32)
    monkeypatch.setattr(generated.Leaves, "reach", lambda self: 0.8 * self.radius.flatten())
    assert not torch.equal(law.images(40, seed=5), in_windows[0])  # too narrow windows would be noticed


def test_of_large_images_to_fit_on_a_quarter_is_drawn_and_turned() -> None:
    drawn: list[int] = []
    large = fitting_images(
        9, image_size=66, channels=1, seed=0, on_progress=lambda done, total: drawn.append(total)
    )
    assert large.shape == (9, 1, 66, 66)
    assert drawn == [3]
    assert torch.equal(large[3], large[0].transpose(-1, -2))
    assert len({image.numpy().tobytes() for image in large}) == 9
    small = fitting_images(5, image_size=32, channels=3, seed=2)
    assert torch.equal(small, dead_leaves(5, seed=2))  # what was measured at 32 px stays as it is


def test_other_views_are_of_the_same_images_in_the_same_order():
    images = dead_leaves(40, seed=3)
    views = other_views(images, seed=3)
    assert views.dtype == torch.uint8
    assert views.shape == images.shape
    assert torch.equal(views, other_views(images, seed=3))
    assert not torch.equal(views, other_views(images, seed=4))

    def distances(first, second):
        rows = [
            (part.float() - part.float().mean((1, 2, 3), keepdim=True)).flatten(1) for part in (first, second)
        ]
        return torch.cdist(torch.nn.functional.normalize(rows[0]), torch.nn.functional.normalize(rows[1]))

    nearest = distances(views, images).argmin(1)
    assert (nearest == torch.arange(40)).float().mean() > 0.8
    assert distances(views, images).diag().min() > 0.01  # none is the image itself
    assert other_views(dead_leaves(3, channels=1, image_size=28), seed=0).shape == (3, 1, 28, 28)


def test_a_view_is_made_of_its_own_image_alone():
    images = dead_leaves(9, seed=1)
    whole = other_views(images, seed=0)
    changed = images.clone()
    changed[1:] = 0
    assert torch.equal(other_views(changed, seed=0)[0], whole[0])
