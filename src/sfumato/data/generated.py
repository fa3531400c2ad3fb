"""Dead leaves: images made by chance alone, to fit features and to pre-train on without real data.

Soft-edged ellipses, rectangles and triangles fall over one another. Their sizes follow the power law that
makes such images scale-invariant, as photographs are (Lee, Mumford & Huang 2001); shading inside each leaf
and 1/f texture over all of them bring the local statistics near those of photographs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import product

import torch
from torch import Tensor

from sfumato.data.distortion import NUM_DRAWS, Distortion, distort

SHAPES = {"ellipses": 0.25, "rectangles": 0.6, "triangles": 0.9}  # each in its part of 0 to 1
SIZES = ("small", "mixed", "large")
DIRECTIONS = {"any": math.nan, "level": 0.0, "upright": math.pi / 2, "diagonal": math.pi / 4}
TEXTURES = {"smooth": 1.7, "rough": 0.5}  # exponents
KINDS = tuple("-".join(words) for words in product(SHAPES, SIZES, DIRECTIONS, TEXTURES))
_JITTER = 0.2  # radians by which leaves of one direction differ

_IMAGES_AT_ONCE = 128  # the working set of one batch at 32 px stays in the second-level cache
_SMALLEST_WINDOW = 16  # pixels: most leaves are a few pixels wide, and only their surroundings are computed
_WHOLE = 32  # up to this side every leaf is drawn on the whole image: nothing would be saved
_ALL_DRAWN = 64  # pixels: up to this side every image to fit on is drawn
_VIEW = Distortion(zoom=0.16, rotation=10.0, shift=0.09, contrast=0.3, brightness=0.12)
_TINT = 0.15  # of a colour's logarithm
_VIEWS_AT_ONCE = 512
OnProgress = Callable[[int, int], None]  # images done, images in all


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """How each image of a batch is to be drawn: one value per image, shaped (count, 1, 1)."""

    shape: Tensor
    smallest: Tensor
    largest: Tensor
    direction: Tensor  # nan: any
    texture_exponent: Tensor

    @classmethod
    def of(cls, labels: Tensor, *, image_size: int) -> Kinds:
        """The kinds that ``labels``, numbers into ``KINDS``, name."""
        edge = max(2.0, image_size / 8)
        radii = {"small": (1.5, edge), "mixed": (1.5, image_size / 2), "large": (edge, image_size / 2)}
        rows = []
        for label in labels.tolist():
            shape, size, direction, texture = KINDS[label].split("-")
            rows.append((SHAPES[shape], *radii[size], DIRECTIONS[direction], TEXTURES[texture]))
        return cls(**dict(zip(_FIELDS, torch.tensor(rows).T[..., None, None], strict=True)))

    def at(self, places: Tensor) -> Kinds:
        """The kinds of the images at ``places``."""
        return Kinds(**{field.name: getattr(self, field.name)[places] for field in fields(self)})


_FIELDS = ("shape", "smallest", "largest", "direction", "texture_exponent")


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

    def images(self, num_images: int, *, seed: int = 0, on_progress: OnProgress | None = None) -> Tensor:
        """uint8 images (num_images, channels, size, size); equal seeds give equal images."""
        generator = torch.Generator().manual_seed(seed)
        images = torch.empty(num_images, self.channels, self.image_size, self.image_size, dtype=torch.uint8)
        for start in range(0, num_images, _IMAGES_AT_ONCE):
            count = min(_IMAGES_AT_ONCE, num_images - start)
            images[start : start + count] = self._draw(count, generator)
            if on_progress is not None:
                on_progress(start + count, num_images)
        return images

    def images_of(self, labels: Tensor, *, seed: int = 0, on_progress: OnProgress | None = None) -> Tensor:
        """One image of each kind that ``labels`` names (see ``KINDS``): what a net can learn to tell."""
        generator = torch.Generator().manual_seed(seed)
        shape = (len(labels), self.channels, self.image_size, self.image_size)
        images = torch.empty(shape, dtype=torch.uint8)
        for start in range(0, len(labels), _IMAGES_AT_ONCE):
            part = labels[start : start + _IMAGES_AT_ONCE]
            kinds = Kinds.of(part, image_size=self.image_size)
            images[start : start + len(part)] = self._draw(len(part), generator, kinds)
            if on_progress is not None:
                on_progress(start + len(part), len(labels))
        return images

    def _draw(self, count: int, generator: torch.Generator, kinds: Kinds | None = None) -> Tensor:
        size, channels = self.image_size, self.channels
        base = (
            0.45 + 0.2 * _normal((count, 1), generator) + self.chroma * _normal((count, channels), generator)
        )
        whole = size <= _WHOLE
        shape = (count, channels, size, size) if whole else (count, size, size, channels)
        canvas = (base[:, :, None, None] if whole else base[:, None, None, :]).expand(shape).clone()
        axis = torch.arange(size, dtype=torch.float32) + 0.5
        for _ in range(self.num_leaves or round(60 * size / 32)):
            leaves = self._leaves(count, generator, kinds)
            colour = base + self.luminance * _normal((count, 1), generator)
            colour = colour + self.chroma * _normal((count, channels), generator)
            if whole:
                cover, shade = leaves.drawn(axis[None, None, :], axis[None, :, None])
                leaf = colour[:, :, None, None] + shade[:, None]
                canvas = torch.lerp(canvas, leaf, cover[:, None])
            else:
                _draw_in_windows(canvas, leaves, colour)
        canvas = canvas if whole else canvas.movedim(3, 1)
        canvas = canvas + self._texture(count, generator, kinds)
        return canvas.clamp_(0, 1).mul_(255).round_().to(torch.uint8)

    def _leaves(self, count: int, generator: torch.Generator, kinds: Kinds | None = None) -> Leaves:
        """One leaf per image."""
        largest = self.largest_radius or self.image_size / 2
        draws = torch.rand(count, 9, generator=generator)[..., None, None].unbind(1)
        small: float | Tensor = self.smallest_radius**-2
        large: float | Tensor = largest**-2
        if kinds is not None:
            small, large = kinds.smallest**-2, kinds.largest**-2
        radius = (small - draws[0] * (small - large)) ** -0.5  # density ∝ r^-3 by inversion
        angle = 2 * math.pi * draws[3]
        if kinds is not None:
            angle = _directed(angle, kinds.direction)
        return Leaves(
            radius=radius,
            width=radius * (0.35 + 0.65 * draws[4]),
            left=draws[1] * self.image_size,
            top=draws[2] * self.image_size,
            angle=angle,
            shape=draws[5] if kinds is None else kinds.shape,
            softness=self.softness[0] + (self.softness[1] - self.softness[0]) * draws[6].square(),
            direction=2 * math.pi * draws[7],
            shade=self.shade * (2 * draws[8] - 1),
        )

    def _texture(self, count: int, generator: torch.Generator, kinds: Kinds | None = None) -> Tensor:
        """Noise of amplitude 1/f^exponent, mostly the same in all channels, of random strength."""
        size, channels = self.image_size, self.channels
        frequency = (
            torch.fft.fftfreq(size)[:, None].square() + torch.fft.rfftfreq(size)[None].square()
        ).sqrt()
        frequency[0, 0] = math.inf  # no constant part: the base colour has it
        white = _normal((count, channels + 1, size, size), generator)
        exponent = self.texture_exponent if kinds is None else kinds.texture_exponent[:, None]
        noise = torch.fft.irfft2(torch.fft.rfft2(white) * frequency**-exponent, s=(size, size))
        noise = noise / noise.std(dim=(1, 2, 3), keepdim=True).clamp_min(1e-6)
        strength = self.texture * torch.rand(count, 1, 1, 1, generator=generator).square() * 2
        if kinds is not None:  # never so faint that nobody could tell which one it is
            strength = (strength + self.texture) / 3
        return strength * (noise[:, :1] + 0.3 * noise[:, 1:])


@dataclass(frozen=True, kw_only=True)
class Leaves:
    """One leaf per image, its values shaped (count, 1, 1)."""

    radius: Tensor
    width: Tensor
    left: Tensor
    top: Tensor
    angle: Tensor
    shape: Tensor
    softness: Tensor
    direction: Tensor
    shade: Tensor

    def at(self, places: Tensor) -> Leaves:
        """The leaves of the images at ``places``."""
        return Leaves(**{field.name: getattr(self, field.name)[places] for field in fields(self)})

    def drawn(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """How much each leaf covers the pixels at ``x`` and ``y`` (0 to 1), and its shading there."""
        radius, width, angle = self.radius, self.width, self.angle
        dx = x - self.left
        dy = y - self.top
        along = dx * angle.cos() + dy * angle.sin()
        across = dy * angle.cos() - dx * angle.sin()
        ellipse = ((along / radius).square() + (across / width).square()).sqrt().sub(1) * width
        rectangle = torch.maximum(along.abs() - radius, across.abs() - width)
        # an isosceles triangle: one base edge and two slanted ones
        slope = width / (3 * radius)
        slant = (across.abs() - slope * (2 * radius - along)) / (1 + slope.square()).sqrt()
        triangle = torch.maximum(-along - radius, slant)
        outside = torch.where(self.shape < 0.5, ellipse, torch.where(self.shape < 0.75, rectangle, triangle))
        cover = (0.5 - outside / (2 * self.softness)).clamp(0, 1)
        ramp = (along * self.direction.cos() + across * self.direction.sin()) / radius
        return cover, self.shade * ramp.clamp(-1.5, 1.5)

    def reach(self) -> Tensor:
        """How far from its centre a leaf covers anything at most, soft edge included (count,)."""
        radius, width, soft = self.radius, self.width, self.softness
        slope = width / (3 * radius)
        edge = soft * (1 + slope.square()).sqrt()
        base = torch.hypot(radius + soft, slope * (3 * radius + soft) + edge)
        tip = 2 * radius + edge / slope
        ellipse = radius * (1 + soft / width)
        rectangle = torch.hypot(radius + soft, width + soft)
        triangle = torch.maximum(base, tip)
        reach = torch.where(self.shape < 0.5, ellipse, torch.where(self.shape < 0.75, rectangle, triangle))
        return reach.flatten()


def _draw_in_windows(canvas: Tensor, leaves: Leaves, colour: Tensor) -> None:
    """Lay one leaf on each image of ``canvas`` (N, H, W, C), in place, where it may cover anything.

    Leaves are sorted by the side of the window that holds them: powers of two, up to the whole image.
    """
    size = canvas.shape[1]
    pixels = canvas.view(-1, canvas.shape[-1])
    sides = 2 ** (2 * leaves.reach() + 2).log2().ceil().clamp_min(math.log2(_SMALLEST_WINDOW))
    sides = sides.clamp_max(size).long()
    for side in sides.unique().tolist():
        places = torch.nonzero(sides == side)[:, 0]
        some = leaves.at(places)
        corners = [(centre.flatten() - side / 2).round().long() for centre in (some.left, some.top)]
        left, top = (corner.clamp(0, size - side)[:, None] for corner in corners)
        columns, rows = left + torch.arange(side), top + torch.arange(side)
        cover, shade = some.drawn(columns[:, None, :] + 0.5, rows[:, :, None] + 0.5)
        leaf = colour[places][:, None, None, :] + shade[..., None]
        window = (places[:, None, None] * size + rows[:, :, None]) * size + columns[:, None, :]
        pixels[window] = torch.lerp(pixels[window], leaf, cover[..., None])


def _directed(angle: Tensor, direction: Tensor) -> Tensor:
    """A uniform ``angle`` turned into one near ``direction``, or near its mirror image: mirrored images keep
    their kind. Where the direction is nan the angle stays as it is."""
    turn = angle / (2 * math.pi)
    side = torch.where(turn < 0.5, 1.0, -1.0)
    near = side * direction + _JITTER * (4 * turn % 2 - 1)
    return torch.where(direction.isnan(), angle, near)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def dead_leaves(
    num_images: int,
    *,
    image_size: int = 32,
    channels: int = 3,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Tensor:
    """``num_images`` dead-leaves images with the usual settings, uint8 (N, channels, size, size)."""
    leaves = DeadLeaves(image_size=image_size, channels=channels)
    return leaves.images(num_images, seed=seed, on_progress=on_progress)


def fitting_images(
    num_images: int, *, image_size: int, channels: int, seed: int, on_progress: OnProgress | None = None
) -> Tensor:
    """Dead leaves to fit features on; of large images a quarter is drawn, and each is turned four ways.

    No direction is special to the leaves, so that a turned image is as likely as the first; what the turns
    share costs the fit little, while drawing would cost with the square of the side.
    """
    turned = bool(turns_of(image_size))
    drawn = dead_leaves(
        math.ceil(num_images / 4) if turned else num_images,
        image_size=image_size,
        channels=channels,
        seed=seed,
        on_progress=on_progress,
    )
    if not turned:
        return drawn
    upright = drawn.transpose(-1, -2)  # mirrored in a diagonal: features average over left and right anyway
    return torch.cat([drawn, upright, drawn.flip(-2), upright.flip(-2)])[:num_images]


def other_views(images: Tensor, *, seed: int) -> Tensor:
    """Each of the uint8 ``images`` seen once more: moved, turned, nearer or farther, in another light.

    Equal seeds give equal views; a seed that images were drawn with is as good as any other.
    """
    generator = torch.Generator().manual_seed(2**40 + seed)  # no stream that images are drawn from
    views = torch.empty_like(images)
    for start in range(0, len(images), _VIEWS_AT_ONCE):
        part = images[start : start + _VIEWS_AT_ONCE].float() / 255
        words = torch.randint(2**32, (len(part), NUM_DRAWS), generator=generator)
        tint = 2 * torch.rand(len(part), part.shape[1], 1, 1, generator=generator) - 1
        seen = distort(part, words, _VIEW) * torch.exp(_TINT * tint)
        views[start : start + len(part)] = seen.clamp_(0, 1).mul_(255).round_().to(torch.uint8)
    return views


def turns_of(image_size: int) -> dict[str, int]:
    """What ``fitting_images`` does to images of this side, for the description of features fitted on them."""
    return {"turns": 4} if image_size > _ALL_DRAWN else {}
