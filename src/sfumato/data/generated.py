"""Dead leaves: images made by chance alone, to fit features and to pre-train on without anybody's data.

Soft-edged ellipses, rectangles and triangles fall over one another. Their sizes follow the power law that
makes such images scale-invariant, as photographs are (Lee, Mumford & Huang 2001); shading inside each leaf
and 1/f texture over all of them bring the local statistics near those of photographs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_IMAGES_AT_ONCE = 128  # the working set of one batch at 32 px stays in the second-level cache


@dataclass(frozen=True, kw_only=True)
class DeadLeaves:
    """The law from which images are drawn. Lengths are in pixels, colours from 0 to 1."""

    image_size: int = 32
    channels: int = 3
    num_leaves: int | None = None  # None: 60 at 32 px, in proportion to the side elsewhere
    smallest_radius: float = 1.5
    largest_radius: float | None = None  # None: half the side
    luminance: float = 0.28
    chroma: float = 0.10
    shade: float = 0.12
    texture: float = 0.10
    texture_exponent: float = 1.2
    softness: tuple[float, float] = (0.5, 2.0)

    def images(self, num_images: int, *, seed: int = 0) -> Tensor:
        """uint8 images (num_images, channels, size, size); equal seeds give equal images."""
        generator = torch.Generator().manual_seed(seed)
        batches = [
            self._draw(min(_IMAGES_AT_ONCE, num_images - start), generator)
            for start in range(0, num_images, _IMAGES_AT_ONCE)
        ]
        shape = (0, self.channels, self.image_size, self.image_size)
        return torch.cat(batches) if batches else torch.empty(shape, dtype=torch.uint8)

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        size, channels = self.image_size, self.channels
        base = (
            0.45 + 0.2 * _normal((count, 1), generator) + self.chroma * _normal((count, channels), generator)
        )
        canvas = base[:, :, None, None].expand(count, channels, size, size).clone()
        axis = torch.arange(size, dtype=torch.float32) + 0.5
        for _ in range(self.num_leaves or round(60 * size / 32)):
            cover, shade = self._leaf(count, axis, generator)
            colour = base + self.luminance * _normal((count, 1), generator)
            colour = colour + self.chroma * _normal((count, channels), generator)
            leaf = colour[:, :, None, None] + shade[:, None]
            canvas = torch.lerp(canvas, leaf, cover[:, None])
        canvas = canvas + self._texture(count, generator)
        return canvas.clamp_(0, 1).mul_(255).round_().to(torch.uint8)

    def _leaf(self, count: int, axis: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """How much one leaf per image covers each pixel (0 to 1), and its shading there."""
        largest = self.largest_radius or self.image_size / 2
        draws = torch.rand(count, 9, generator=generator)[..., None, None].unbind(1)
        small, large = self.smallest_radius**-2, largest**-2
        radius = (small - draws[0] * (small - large)) ** -0.5  # density ∝ r^-3 by inversion
        dx = axis[None, None, :] - draws[1] * self.image_size
        dy = axis[None, :, None] - draws[2] * self.image_size
        angle = 2 * math.pi * draws[3]
        along = dx * angle.cos() + dy * angle.sin()
        across = dy * angle.cos() - dx * angle.sin()
        width = radius * (0.35 + 0.65 * draws[4])
        ellipse = ((along / radius).square() + (across / width).square()).sqrt().sub(1) * width
        rectangle = torch.maximum(along.abs() - radius, across.abs() - width)
        # an isosceles triangle: one base edge and two slanted ones
        slope = width / (3 * radius)
        slant = (across.abs() - slope * (2 * radius - along)) / (1 + slope.square()).sqrt()
        triangle = torch.maximum(-along - radius, slant)
        kind = draws[5]
        outside = torch.where(kind < 0.5, ellipse, torch.where(kind < 0.75, rectangle, triangle))
        softness = self.softness[0] + (self.softness[1] - self.softness[0]) * draws[6].square()
        cover = (0.5 - outside / (2 * softness)).clamp(0, 1)
        direction = 2 * math.pi * draws[7]
        ramp = (along * direction.cos() + across * direction.sin()) / radius
        return cover, self.shade * (2 * draws[8] - 1) * ramp.clamp(-1.5, 1.5)

    def _texture(self, count: int, generator: torch.Generator) -> Tensor:
        """Noise of amplitude 1/f^exponent, mostly the same in all channels, of random strength."""
        size, channels = self.image_size, self.channels
        frequency = (
            torch.fft.fftfreq(size)[:, None].square() + torch.fft.rfftfreq(size)[None].square()
        ).sqrt()
        frequency[0, 0] = math.inf  # no constant part: the base colour has it
        white = _normal((count, channels + 1, size, size), generator)
        noise = torch.fft.irfft2(torch.fft.rfft2(white) * frequency**-self.texture_exponent, s=(size, size))
        noise = noise / noise.std(dim=(1, 2, 3), keepdim=True).clamp_min(1e-6)
        strength = self.texture * torch.rand(count, 1, 1, 1, generator=generator).square() * 2
        return strength * (noise[:, :1] + 0.3 * noise[:, 1:])


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def dead_leaves(num_images: int, *, image_size: int = 32, channels: int = 3, seed: int = 0) -> Tensor:
    """``num_images`` dead-leaves images with the usual settings, uint8 (N, channels, size, size)."""
    return DeadLeaves(image_size=image_size, channels=channels).images(num_images, seed=seed)
