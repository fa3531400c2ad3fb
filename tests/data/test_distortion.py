"""Views as of another scanner: each from its own image and draws, and as large a change as was declared."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sfumato.data.distortion import NUM_DRAWS, Distortion, check_distortion, distort
from sfumato.errors import ConfigError
from sfumato.recipes.recipe import DISTORTIONS, AugmentationSettings

EVERYTHING = Distortion(
    zoom=0.2,
    stretch=0.1,
    rotation=12.0,
    shift=0.1,
    gamma=0.5,
    contrast=0.3,
    brightness=0.1,
    sharpness=1.0,
    grain=0.05,
)
HIGHEST, MIDDLE = 2**32 - 1, 2**31
NAMES = [
    "zoom",
    "stretch",
    "rotation",
    "right",
    "down",
    "gamma",
    "contrast",
    "brightness",
    "sharpness",
    "grain",
]


def images_of(count, *, channels=1, size=12, seed=0):
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


def words_of(count, distortion, *, size=12, seed=0):
    shape = (count, distortion.num_words((size, size)))
    return torch.randint(2**32, shape, generator=torch.Generator().manual_seed(seed))


def drawn(count=1, **extreme):
    """Words of no change, but for those named."""
    words = torch.full((count, NUM_DRAWS), MIDDLE)
    for name, value in extreme.items():
        words[:, NAMES.index(name)] = value
    return words


def to_the_left(images):
    """By 3 pixels; what comes in from the right is mirrored."""
    return torch.cat([images[..., 3:], images[..., -3:].flip(-1)], -1)


def downwards(images):
    return torch.cat([images[..., :3, :].flip(-2), images[..., :-3, :]], -2)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_row_is_made_of_its_own_image_and_words(channels):
    images, words = images_of(5, channels=channels), words_of(5, EVERYTHING)
    together = distort(images, words, EVERYTHING)
    others = images_of(5, channels=channels, seed=1)
    others[2] = images[2]
    other_words = words_of(5, EVERYTHING, seed=1)
    other_words[2] = words[2]
    changed = distort(others, other_words, EVERYTHING)
    assert torch.equal(together[2], changed[2])
    assert torch.equal(together[2:3], distort(images[2:3], words[2:3], EVERYTHING))
    assert not torch.allclose(together[1], changed[1])  # control: the others did change


@pytest.mark.parametrize("kind", DISTORTIONS)
def test_each_kind_changes_images_and_none_leaves_them(kind):
    images = images_of(4)
    alone = dataclasses.replace(Distortion(), **{kind: getattr(EVERYTHING, kind)})
    assert not torch.allclose(distort(images, words_of(4, alone), alone), images, atol=1e-3)
    assert torch.equal(distort(images, words_of(4, Distortion()), Distortion()), images)


@pytest.mark.parametrize(
    ("distortion", "words", "expected"),
    [
        (Distortion(rotation=90.0), drawn(rotation=HIGHEST), lambda x: torch.rot90(x, 1, (2, 3))),
        (Distortion(shift=0.25), drawn(right=HIGHEST), to_the_left),
        (Distortion(shift=0.25), drawn(down=0), downwards),
        (Distortion(gamma=0.5), drawn(gamma=HIGHEST), lambda x: x**1.5),
        (Distortion(gamma=0.5), drawn(gamma=0), lambda x: x ** (1 / 1.5)),
        (Distortion(contrast=0.4), drawn(contrast=0), lambda x: 0.5 + (x - 0.5) * 0.6),
        (Distortion(brightness=0.2), drawn(brightness=HIGHEST), lambda x: (x + 0.2).clamp(max=1)),
    ],
)  # fmt: skip
def test_the_largest_change_is_the_declared_one(distortion, words, expected):
    images = images_of(1)
    assert torch.allclose(distort(images, words, distortion), expected(images), atol=1e-4)
    assert not torch.allclose(images, expected(images), atol=1e-2)  # control: that is a change


def test_zoom_and_stretch_have_the_declared_size():
    """A bar in the middle, measured at half its height."""
    images = torch.zeros(1, 1, 128, 128)
    images[..., 32:96, 32:96] = 1
    for distortion, words, width, height in [
        (Distortion(zoom=0.25), drawn(zoom=HIGHEST), 80, 80),
        (Distortion(zoom=0.25), drawn(zoom=0), 51.2, 51.2),
        (Distortion(stretch=0.21), drawn(stretch=HIGHEST), 64 * 1.1, 64 / 1.1),
    ]:
        found = distort(images, words, distortion)
        assert found[0, 0, 64].sum().item() == pytest.approx(width, abs=1)
        assert found[0, 0, :, 64].sum().item() == pytest.approx(height, abs=1)


def test_grain_is_as_strong_as_declared_and_the_same_in_all_channels():
    distortion = Distortion(grain=0.1)
    words = words_of(1, distortion, size=64)
    words[:, NAMES.index("grain")] = HIGHEST
    noise = distort(torch.full((1, 3, 64, 64), 0.5), words, distortion) - 0.5
    assert noise.std().item() == pytest.approx(0.1, rel=0.05)
    assert abs(noise.mean().item()) < 4 * 0.1 / math.sqrt(64 * 64)
    assert torch.equal(noise[:, 0], noise[:, 2])


def test_settings_and_distortions_have_the_same_names_and_change_nothing_by_default():
    assert tuple(item.name for item in dataclasses.fields(Distortion)) == DISTORTIONS
    assert not any(getattr(AugmentationSettings(), name) for name in DISTORTIONS)


def test_distortions_that_no_view_shows_are_refused():
    check_distortion(EVERYTHING, views=1)
    check_distortion(Distortion(), views=0)
    with pytest.raises(ConfigError) as caught:
        check_distortion(EVERYTHING, views=0)
    assert caught.value.code == "bad-augmentation"
