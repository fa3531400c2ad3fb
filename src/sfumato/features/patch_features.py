"""From patch layers to rows: soft pooling over a coarse grid, mirror average, public whitening.

Everything is fitted on generated images: the features of `fast/patches` know nothing of any real image.
"""

from __future__ import annotations

import math
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfumato.data.generated import OnProgress, fitting_images, turns_of
from sfumato.errors import ConfigError, ModelError
from sfumato.features.patches import PatchLayer
from sfumato.features.pieces import in_pieces
from sfumato.features.whitening import Whitening

_ROWS_AT_ONCE = 4  # the responses of 4 images stay in a core's cache, and their memory is reused
_FITTING_ROWS = 3000  # images whose maps the second layer is fitted on


class SoftPooling(nn.Module):
    """Averages under Gaussian windows centred on a ``grid`` x ``grid`` lattice.

    Hard regions lose whatever crosses their edges; overlapping windows are the average over small shifts of
    the image, at no cost. ``spread`` is the window's deviation in lattice spacings.
    """

    window: Tensor

    def __init__(self, size: int, *, grid: int, spread: float) -> None:
        super().__init__()
        if not 0 < spread < math.inf:
            raise ConfigError("bad-model-option", f"spread={spread} is no width.", fix="Its default is 0.5.")
        place = torch.arange(size) + 0.5
        centre = (torch.arange(grid) + 0.5) * size / grid
        window = torch.exp(-0.5 * ((place[:, None] - centre) / (spread * size / grid)).square())
        window = window / window.sum(0)
        both = torch.einsum("yi,xj->yxij", window, window).reshape(size**2, grid**2)
        self.register_buffer("window", both, persistent=False)

    def forward(self, maps: Tensor) -> Tensor:
        return (maps.flatten(2) @ self.window).flatten(1)


class SecondLayer(nn.Module):
    """Patches of first-layer responses, pooled 3 x 3 by 2 and reduced to ``reduced`` channels."""

    reduction: Tensor
    offset: Tensor

    def __init__(
        self, in_channels: int, *, first_patches: int, num_patches: int, stride: int, reduced: int
    ) -> None:
        super().__init__()
        self.first = PatchLayer(in_channels, patch_size=5, num_patches=first_patches, stride=stride)
        self.register_buffer("reduction", torch.zeros(reduced, self.first.out_channels, 1, 1))
        self.register_buffer("offset", torch.zeros(reduced))
        self.second = PatchLayer(
            reduced, patch_size=3, num_patches=num_patches, rank=256, contrast=0.2, remove_mean=False
        )

    @torch.no_grad()
    def fit(self, images: Tensor, *, generator: torch.Generator) -> SecondLayer:
        self.first.fit(images, generator=generator)
        maps = in_pieces(self._pooled, images[:_FITTING_ROWS], rows=_ROWS_AT_ONCE)
        rows = maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1])
        mean = rows.mean(0)
        values, vectors = torch.linalg.eigh((rows - mean).T @ (rows - mean) / len(rows))
        count = len(self.offset)
        scale = values[-count:].mean().sqrt()
        leading = vectors.flip(1)[:, :count] / scale  # mean variance 1, so that one contrast fits all data
        self.reduction.copy_(leading.T[:, :, None, None])
        self.offset.copy_(-mean @ leading)
        self.second.fit(F.conv2d(maps, self.reduction, self.offset), generator=generator)
        return self

    def forward(self, images: Tensor) -> Tensor:
        return self.second(F.conv2d(self._pooled(images), self.reduction, self.offset))

    def _pooled(self, images: Tensor) -> Tensor:
        return F.avg_pool2d(self.first(images), 3, 2)


class PatchFeatures(nn.Module):
    """Images (B, C, H, W) from 0 to 1 → rows of unit norm; one or two layers, each whitened on its own.

    Larger images are read with a stride, so that 32 and 128 pixels cost the same.
    """

    def __init__(
        self,
        *,
        image_size: int = 32,
        in_channels: int = 3,
        num_layers: int = 2,
        num_patches: int = 256,
        second_patches: int = 512,
        num_directions: int = 2500,
        grid: int = 3,
        spread: float = 0.5,
        mirror: bool = True,
    ) -> None:
        super().__init__()
        self.image_size, self.in_channels, self.mirror = image_size, in_channels, mirror
        self.described = {"patches": 1, "size": image_size, "grid": grid, "spread": spread}
        self.described |= {} if mirror else {"mirror": False}
        self.described |= turns_of(image_size)
        if num_layers not in (1, 2):
            raise ConfigError(
                "bad-model-option", f"num_layers={num_layers}: there are one or two.", fix="Use 1 or 2."
            )
        smallest = 6 if num_layers == 1 else 13  # a patch; a patch of pooled patches
        if image_size < smallest:
            raise ModelError(
                "image-too-small",
                f"patches of {num_layers} layers need images of {smallest} pixels a side, not {image_size}.",
                fix=f"Enlarge the images: --set data.image_size={max(32, smallest)}",
            )
        stride = max(1, image_size // 32)
        self.layers = nn.ModuleList(
            [PatchLayer(in_channels, patch_size=6, num_patches=num_patches, stride=stride)]
        )
        sizes = [(image_size - 6) // stride + 1]
        if num_layers == 2:
            layer = SecondLayer(
                in_channels, first_patches=128, num_patches=second_patches, stride=stride, reduced=64
            )
            self.layers.append(layer)
            sizes.append((((image_size - 5) // stride + 1) - 3) // 2 + 1 - 2)
        channels = [2 * num_patches, 2 * second_patches]
        self.poolings = nn.ModuleList(SoftPooling(size, grid=grid, spread=spread) for size in sizes)
        self.whitenings = nn.ModuleList(
            Whitening(channels[number] * grid**2, num_directions) for number in range(num_layers)
        )

    @property
    def num_features(self) -> int:
        return sum(whitening.num_directions for whitening in self._whitenings())

    def _whitenings(self) -> list[Whitening]:
        return [cast(Whitening, each) for each in self.whitenings]

    @torch.no_grad()
    def fit(
        self, *, num_images: int = 12_000, seed: int = 0, on_progress: OnProgress | None = None
    ) -> PatchFeatures:
        """Fit layers and whitening on dead leaves; equal seeds give equal features."""
        images = fitting_images(
            num_images,
            image_size=self.image_size,
            channels=self.in_channels,
            seed=seed,
            on_progress=on_progress,
        )
        generator = torch.Generator().manual_seed(seed)
        pixels = images.float() / 255
        for layer in self.layers:
            cast(PatchLayer | SecondLayer, layer).fit(pixels, generator=generator)
        from sfumato.features.cache import compute_features

        rows = torch.from_numpy(compute_features(_Raw(self), images))
        widths = [whitening.num_features for whitening in self._whitenings()]
        for whitening, block in zip(self._whitenings(), rows.split(widths, dim=1), strict=True):
            whitening.fit(block)
        return self

    def pooled(self, images: Tensor) -> list[Tensor]:
        """Each layer's pooled responses, averaged with the mirrored image's if asked; not whitened."""
        return [
            in_pieces(partial(self._one, layer=layer, pool=pool), images, rows=_ROWS_AT_ONCE)
            for layer, pool in zip(self.layers, self.poolings, strict=True)
        ]

    def _one(self, images: Tensor, layer: nn.Module, pool: nn.Module) -> Tensor:
        responses = pool(layer(images))
        return (responses + pool(layer(images.flip(-1)))).mul_(0.5) if self.mirror else responses

    def forward(self, images: Tensor) -> Tensor:
        blocks = zip(self.whitenings, self.pooled(images), strict=True)
        return torch.cat([whiten(block) for whiten, block in blocks], dim=1) / len(self.layers) ** 0.5


class _Raw(nn.Module):
    """The pooled responses side by side: what the whitening is fitted on."""

    def __init__(self, features: PatchFeatures) -> None:
        super().__init__()
        self.features = features

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat(self.features.pooled(images), dim=1)
