"""Patch features: dictionaries of whitened patches taken from generated images.

A layer compares each patch of its input with ``num_patches`` patches of generated images, in the metric that
whitens generated patches, and keeps what exceeds a threshold, for both signs. One or two such layers, pooled
over a coarse grid and averaged with the mirrored image, are features that no private image has touched.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PatchLayer(nn.Module):
    """Two-sided thresholded cosine responses r of whitened patches: max(r - a, 0) and max(-r - a, 0).

    The whitening W, the removal of the patch's mean M and the dictionary D are linear, so that
    ⟨D, W M x⟩ and W M x are one convolution each; the patch's own contrast s enters as
    r = ⟨D, W M x⟩ / (‖W M x‖ + floor · s).
    """

    whitener: Tensor
    dictionary: Tensor
    floor: Tensor
    threshold: Tensor

    def __init__(
        self,
        in_channels: int,
        *,
        patch_size: int,
        num_patches: int,
        stride: int = 1,
        rank: int | None = None,
        contrast: float = 10 / 255,
        remove_mean: bool = True,
    ) -> None:
        super().__init__()
        size = in_channels * patch_size**2
        self.in_channels, self.patch_size, self.num_patches = in_channels, patch_size, num_patches
        self.rank = min(rank or size, size)
        self.contrast, self.remove_mean = contrast, remove_mean
        self.stride = stride
        shape = (in_channels, patch_size, patch_size)
        self.register_buffer("whitener", torch.zeros(self.rank, *shape))
        self.register_buffer("dictionary", torch.zeros(num_patches, *shape))
        self.register_buffer("floor", torch.zeros(()))
        self.register_buffer("threshold", torch.zeros(()))

    @property
    def out_channels(self) -> int:
        return 2 * self.num_patches

    @torch.no_grad()
    def fit(
        self, maps: Tensor, *, generator: torch.Generator, active: float = 0.1, ridge: float = 1e-3
    ) -> PatchLayer:
        """Whitening, dictionary and threshold from ``maps`` (N, C, H, W) of generated images."""
        count = max(min(200_000, 20 * len(maps)), 4 * self.num_patches)  # enough strong ones to choose from
        patches = random_patches(maps, self.patch_size, count=count, generator=generator)
        centred = patches - patches.mean(1, keepdim=True) if self.remove_mean else patches
        scale = (centred.square().mean(1) + self.contrast**2).sqrt()
        normal = centred / scale[:, None]
        covariance = (normal.T @ normal).double() / len(normal)
        values, vectors = torch.linalg.eigh(covariance)
        values, vectors = values.flip(0)[: self.rank], vectors.flip(1)[:, : self.rank]
        whitener = ((values + ridge * values[0]) ** -0.5 * vectors).float()  # (size, rank)
        whitened = normal @ whitener
        norms = whitened.norm(dim=1)
        median = norms.median()
        strong = torch.nonzero(norms > 0.7 * median)[:, 0]
        picked = strong[torch.randperm(len(strong), generator=generator)[: self.num_patches]]
        atoms = whitened[picked] / norms[picked, None]
        sample = whitened[:20_000]
        responses = sample @ atoms.T / (norms[:20_000, None] + 0.05 * median)
        if self.remove_mean:
            whitener = whitener - whitener.mean(0, keepdim=True)
        shape = (self.in_channels, self.patch_size, self.patch_size)
        self.whitener.copy_(whitener.T.reshape(-1, *shape))
        self.dictionary.copy_((atoms @ whitener.T).reshape(-1, *shape))
        self.floor.copy_(0.05 * median)
        self.threshold.copy_(responses.flatten()[::97].quantile(1 - active))
        return self

    def forward(self, maps: Tensor) -> Tensor:
        both = F.conv2d(maps, torch.cat([self.dictionary, self.whitener]), stride=self.stride)
        products, whitened = both.split([self.num_patches, self.rank], dim=1)
        size = self.in_channels * self.patch_size**2
        squares = self._box(maps.square()) / size
        if self.remove_mean:
            squares = (squares - (self._box(maps) / size).square()).clamp_min(0)
        scale = (squares + self.contrast**2).sqrt()
        norm = whitened.square().sum(1, keepdim=True).sqrt_()  # ten times faster than vector_norm over dim 1
        response = products / (norm + self.floor * scale)
        return torch.cat([F.relu(response - self.threshold), F.relu(-response - self.threshold)], dim=1)

    def _box(self, maps: Tensor) -> Tensor:
        """The sum over each patch."""
        return F.avg_pool2d(maps.sum(1, keepdim=True), self.patch_size, self.stride, divisor_override=1)


def random_patches(maps: Tensor, size: int, *, count: int, generator: torch.Generator) -> Tensor:
    """``count`` patches (count, C·size·size) at random places of ``maps`` (N, C, H, W)."""
    num, channels, height, width = maps.shape
    image = torch.randint(num, (count,), generator=generator)
    top = torch.randint(height - size + 1, (count,), generator=generator)
    left = torch.randint(width - size + 1, (count,), generator=generator)
    offset = torch.arange(size)
    rows = (top[:, None] + offset)[:, None, :, None]
    columns = (left[:, None] + offset)[:, None, None, :]
    channel = torch.arange(channels)[None, :, None, None]
    return maps[image[:, None, None, None], channel, rows, columns].reshape(count, -1)
