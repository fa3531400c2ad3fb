"""From scattering maps to rows: opponent colours, square root, soft pooling, mirror average, whitening.

Tramèr & Boneh 2021 normalise the maps in groups. The square root does more for a whitened head: strong
edges no longer drown weak texture (docs/features.md has the figures). ``ScatterMaps`` keeps the maps whole,
for the small convolutional net that they put on top; ``GroupedScatterMaps`` are theirs.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfumato.data.generated import OnProgress, fitting_images, turns_of
from sfumato.errors import ModelError
from sfumato.features.cache import compute_features
from sfumato.features.patch_features import SoftPooling
from sfumato.features.pieces import in_pieces
from sfumato.features.scattering import Scattering
from sfumato.features.whitening import Whitening, fit_whitening

_ROWS_AT_ONCE = 4
_GROUPS = 27  # of maps that are normalised together; 81 maps per channel
# Brightness, red against blue, and green against both: orthonormal, so that colour and shape are told apart
_OPPONENT = ((0.57735, 0.57735, 0.57735), (0.70711, 0.0, -0.70711), (0.40825, -0.81650, 0.40825))


class ScatterFeatures(nn.Module):
    """Images (B, C, H, W) from 0 to 1 → rows of unit norm; larger images are averaged down to 32-63 px.

    ``aligned``: whitened by what other views of generated images change, too.
    """

    def __init__(
        self,
        *,
        image_size: int = 32,
        in_channels: int = 3,
        num_directions: int = 2500,
        grid: int = 4,
        spread: float = 0.5,
        mirror: bool = True,
        group_norm: bool = False,
        aligned: bool = False,
    ) -> None:
        super().__init__()
        self.image_size, self.in_channels = image_size, in_channels
        self.mirror, self.group_norm = mirror, group_norm
        self.described = {"scatter": 2, "size": image_size, "grid": grid, "spread": spread}
        self.described |= {} if mirror else {"mirror": False}
        self.described |= {"group_norm": True} if group_norm else {}
        self.described |= turns_of(image_size)
        self.aligned = aligned
        self.described |= {"aligned": True} if aligned else {}
        self.shrink, side = _reduction(image_size)
        self.scattering = Scattering()
        self.pooling = SoftPooling(side, grid=grid, spread=spread)
        self.whitening = Whitening(in_channels * self.scattering.num_maps * grid**2, num_directions)

    @property
    def num_features(self) -> int:
        return self.whitening.num_directions

    @torch.no_grad()
    def fit(
        self, *, num_images: int = 12_000, seed: int = 0, on_progress: OnProgress | None = None
    ) -> ScatterFeatures:
        """Fit the whitening on dead leaves; equal seeds give equal features."""
        images = fitting_images(
            num_images,
            image_size=self.image_size,
            channels=self.in_channels,
            seed=seed,
            on_progress=on_progress,
        )
        fit_whitening(self.whitening, _Pooled(self), images, seed=seed, aligned=self.aligned)
        return self

    def pooled(self, images: Tensor) -> Tensor:
        """Maps, pooled, and averaged with the mirrored image's if ``mirror`` says so; not yet whitened."""
        if not self.mirror:
            return in_pieces(self._one, images, rows=_ROWS_AT_ONCE)
        return (
            in_pieces(lambda piece: self._one(piece) + self._one(piece.flip(-1)), images, rows=_ROWS_AT_ONCE)
            / 2
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.whitening(self.pooled(images))

    def _one(self, images: Tensor) -> Tensor:
        if self.group_norm:
            return self.pooling(_group_normalised(_opponent_maps(self.scattering, images, self.shrink)))
        return self.pooling(_root_maps(self.scattering, images, self.shrink))


class ScatterMaps(nn.Module):
    """Images (B, C, H, W) from 0 to 1 → scattering maps (``num_maps``, side, side), flattened to unit norm.

    Maps are whitened against one another, alike at all places, by their covariance on generated images: the
    net's first layer then learns in all directions at once.
    """

    def __init__(self, *, image_size: int = 32, in_channels: int = 3, num_maps: int = 64) -> None:
        super().__init__()
        self.image_size, self.in_channels = image_size, in_channels
        self.described = {"scatter_maps": 2, "size": image_size}
        self.described |= turns_of(image_size)
        self.shrink, side = _reduction(image_size)
        self.scattering = Scattering()
        self.whitening = Whitening(in_channels * self.scattering.num_maps, num_maps)
        self.shape = (self.whitening.num_directions, side, side)

    @property
    def num_features(self) -> int:
        return math.prod(self.shape)

    @torch.no_grad()
    def fit(
        self, *, num_images: int = 2_000, seed: int = 0, on_progress: OnProgress | None = None
    ) -> ScatterMaps:
        """Fit the whitening on dead leaves, every place of every image a row; equal seeds, equal features."""
        leaves = fitting_images(
            num_images,
            image_size=self.image_size,
            channels=self.in_channels,
            seed=seed,
            on_progress=on_progress,
        )
        places = compute_features(_Places(self), leaves).reshape(-1, self.whitening.num_features)
        self.whitening.fit(torch.from_numpy(places), ridge=0.01)
        return self

    def places(self, images: Tensor) -> Tensor:
        """All maps, not yet whitened, as (B, side, side, C * 81)."""
        maps = in_pieces(partial(_root_maps, self.scattering, shrink=self.shrink), images, rows=_ROWS_AT_ONCE)
        return maps.movedim(1, -1)

    def forward(self, images: Tensor) -> Tensor:
        places = self.places(images)
        white = self.whitening.project(places.flatten(0, -2)).unflatten(0, places.shape[:-1])
        return F.normalize(white.movedim(-1, 1).flatten(1), dim=1)


class GroupedScatterMaps(nn.Module):
    """Tramèr & Boneh's own way: all maps of red, green and blue, normalised in groups, then to unit norm."""

    def __init__(self, *, image_size: int = 32, in_channels: int = 3) -> None:
        super().__init__()
        self.described = {"grouped_scatter_maps": 1, "size": image_size}
        self.shrink, side = _reduction(image_size)
        self.scattering = Scattering()
        self.shape = (in_channels * self.scattering.num_maps, side, side)

    @property
    def num_features(self) -> int:
        return math.prod(self.shape)

    def forward(self, images: Tensor) -> Tensor:
        if self.shrink > 1:
            images = F.avg_pool2d(images, self.shrink)
        maps = in_pieces(lambda piece: _group_normalised(self.scattering(piece)), images, rows=_ROWS_AT_ONCE)
        return F.normalize(maps.flatten(1), dim=1)


def _opponent_maps(scattering: Scattering, images: Tensor, shrink: int) -> Tensor:
    """Maps (B, C * 81, side, side) of brightness and colours, or of a grey image."""
    if shrink > 1:
        images = F.avg_pool2d(images, shrink)
    if images.shape[1] == 3:
        images = torch.einsum("dc,bchw->bdhw", images.new_tensor(_OPPONENT), images)
    return scattering(images)


def _root_maps(scattering: Scattering, images: Tensor, shrink: int) -> Tensor:
    """The same with the square root of all moduli; averages of colours have a sign, and stay."""
    maps = _opponent_maps(scattering, images, shrink).unflatten(1, (images.shape[1], -1))
    return torch.cat([maps[:, :, :1], maps[:, :, 1:].sqrt()], dim=2).flatten(1, 2)


def _group_normalised(maps: Tensor) -> Tensor:
    # the usual eps of 1e-5 is as large as the variance of second-order maps, and would silence them
    return F.group_norm(maps, _GROUPS, eps=1e-8)


def _reduction(image_size: int) -> tuple[int, int]:
    """How far images are averaged down before scattering, and the side of the maps."""
    if image_size < 4:
        raise ModelError(
            "image-too-small",
            f"scattering needs images of 4 pixels a side, not {image_size}.",
            fix="Enlarge the images: --set data.image_size=32",
        )
    shrink = max(1, image_size // 32)
    return shrink, -(-(image_size // shrink) // 4)


class _Places(nn.Module):
    """What the whitening of maps is fitted on: for each image, one place after the other."""

    def __init__(self, features: ScatterMaps) -> None:
        super().__init__()
        self.features = features

    def forward(self, images: Tensor) -> Tensor:
        return self.features.places(images).flatten(1)


class _Pooled(nn.Module):
    """What the whitening of rows is fitted on."""

    def __init__(self, features: ScatterFeatures) -> None:
        super().__init__()
        self.features = features

    def forward(self, images: Tensor) -> Tensor:
        return self.features.pooled(images)
