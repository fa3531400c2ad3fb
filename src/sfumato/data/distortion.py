"""Views that imitate another scanner: how a patient stands, how a plate is cut, exposed and developed.

A model that has seen one department's images reads those of another better if each was shown to it a little
turned, moved, brighter or blurred. How much is declared; nothing is measured on the images.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv2d, grid_sample, pad

from sfumato.errors import ConfigError

NUM_DRAWS = 10  # words for one view; its grain takes one more for each pixel


@dataclass(frozen=True, kw_only=True)
class Distortion:
    """The largest change of each kind; 0 changes nothing. Draws are uniform, factors on a log scale."""

    zoom: float = 0.0  # 0.15: from 1/1.15 to 1.15 times as large
    stretch: float = 0.0  # 0.1: width against height from 1/1.1 to 1.1
    rotation: float = 0.0  # degrees to either side
    shift: float = 0.0  # shares of the side, each way
    gamma: float = 0.0  # 0.5: exponents from 1/1.5 to 1.5
    contrast: float = 0.0  # 0.3: distances from middle grey by 0.7 to 1.3
    brightness: float = 0.0  # added, of a white that is 1
    sharpness: float = 0.0  # 1: from a blur over 3 pixels to as much sharpening
    grain: float = 0.0  # the largest standard deviation of noise, of a white that is 1

    def __bool__(self) -> bool:
        return any(astuple(self))

    @property
    def moves(self) -> bool:
        """Whether pixels come to lie elsewhere."""
        return any((self.zoom, self.stretch, self.rotation, self.shift))

    def num_words(self, size: tuple[int, int]) -> int:
        """Random words that a view of an image of this height and width takes."""
        return NUM_DRAWS + (size[0] * size[1] if self.grain else 0)


def check_distortion(distortion: Distortion, *, views: int) -> None:
    """Refuse changes that no view would show."""
    if distortion and not views:
        raise ConfigError(
            "bad-augmentation",
            "images are to be distorted, but augmentation.views is 0.",
            why="Only views are distorted; at 0 the model is trained on the images as they are.",
            fix="Set augmentation.views=1, or leave the distortions out.",
        )


def distort(images: Tensor, words: Tensor, distortion: Distortion) -> Tensor:
    """Images (B, C, H, W) with pixels from 0 to 1, each changed as its own ``words`` (B, num_words) say.

    Guarantee: each row is computed from its own image and its own words: no example enters another's rows.
    """
    height, width = images.shape[-2:]
    # in (-1, 1); double so that 32 bits stay what they are
    draws = ((words[:, :NUM_DRAWS].double() + 0.5) * 2.0**-31 - 1).float().to(images.device)
    zoom, stretch, turn, right, down, gamma, contrast, brightness, sharpness, grain = draws.unbind(1)
    if distortion.moves:
        scale = _factor(zoom, distortion.zoom)
        ratio = _factor(stretch / 2, distortion.stretch)
        angle = turn * math.radians(distortion.rotation)
        offset = 2 * distortion.shift * torch.stack([right, down], dim=1)  # the side is 2 long
        images = _resample(images, 1 / (scale * ratio), ratio / scale, angle, offset)
    if distortion.sharpness:
        weight = _per_image(sharpness * distortion.sharpness)
        images = images + weight * (_blurred(images) - images)
    if distortion.gamma:
        images = images.clamp(0, 1) ** _per_image(_factor(gamma, distortion.gamma))
    if distortion.contrast or distortion.brightness:
        images = 0.5 + (images - 0.5) * _per_image(1 + contrast * distortion.contrast)
        images = images + _per_image(brightness * distortion.brightness)
    if distortion.grain:
        noise = _grain(words[:, NUM_DRAWS:], (height, width)).to(images.device)
        images = images + _per_image((grain + 1) / 2 * distortion.grain) * noise
    return images.clamp(0, 1)


def _factor(draws: Tensor, largest: float) -> Tensor:
    return torch.exp(draws * math.log1p(largest))


def _per_image(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def _resample(images: Tensor, across: Tensor, along: Tensor, angle: Tensor, offset: Tensor) -> Tensor:
    """Bilinear, mirrored beyond the border; element by element, so that no row's rounding sees others."""
    height, width = images.shape[-2:]
    x = (torch.arange(width, device=images.device) + 0.5) * (2 / width) - 1
    y = (torch.arange(height, device=images.device) + 0.5) * (2 / height) - 1
    x, y = across[:, None, None] * x[None, None, :], along[:, None, None] * y[None, :, None]
    cosine, sine = torch.cos(angle)[:, None, None], torch.sin(angle)[:, None, None]
    left, top = offset[:, 0, None, None], offset[:, 1, None, None]
    grid = torch.stack([cosine * x - sine * y + left, sine * x + cosine * y + top], dim=-1)
    return grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _blurred(images: Tensor) -> Tensor:
    """Binomial over 3 x 3 pixels, channel by channel."""
    channels = images.shape[1]
    line = torch.tensor([0.25, 0.5, 0.25], device=images.device)
    kernel = (line[:, None] * line).expand(channels, 1, 3, 3)
    return conv2d(pad(images, (1, 1, 1, 1), mode="replicate"), kernel, groups=channels)


def _grain(words: Tensor, size: tuple[int, int]) -> Tensor:
    """Nearly normal noise of standard deviation 1, the same in all channels: sums of a word's four bytes."""
    total = sum((words >> (8 * place)) & 255 for place in range(4))
    noise = (total.float() - 510) / (256 * math.sqrt(1 / 3))  # type: ignore[union-attr]
    return noise.view(len(words), 1, *size)
