"""Patch features: dictionaries of whitened patches taken from generated images.

A layer compares each patch of its input with ``num_patches`` patches of generated images, in the metric that
whitens generated patches, and keeps what exceeds a threshold, for both signs. One or two such layers, pooled
over a coarse grid and averaged with the mirrored image, are features that no private image has touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONTRAST = 10 / 255  # below it a patch counts as flat


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
        contrast: float = CONTRAST,
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
        found = fit_dictionary(
            maps,
            patch_size=self.patch_size,
            num_patches=self.num_patches,
            generator=generator,
            rank=self.rank,
            contrast=self.contrast,
            remove_mean=self.remove_mean,
            active=active,
            ridge=ridge,
        )
        whitener = found.whitener
        if self.remove_mean:
            whitener = whitener - whitener.mean(0, keepdim=True)
        shape = (self.in_channels, self.patch_size, self.patch_size)
        self.whitener.copy_(whitener.T.reshape(-1, *shape))
        self.dictionary.copy_((whitener @ found.atoms).T.reshape(-1, *shape))
        self.floor.copy_(found.floor)
        self.threshold.copy_(found.threshold)
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
        total = maps.sum(1, keepdim=True)
        if torch.compiler.is_exporting():  # ONNX knows averages alone, and would take this for one
            return F.avg_pool2d(total, self.patch_size, self.stride) * self.patch_size**2
        return F.avg_pool2d(total, self.patch_size, self.stride, divisor_override=1)


@dataclass(frozen=True, kw_only=True)
class Dictionary:
    """What patches are compared with, and how."""

    whitener: Tensor  # (size, rank): normalised patches times it have unit covariance
    atoms: Tensor  # (rank, num_patches), each of unit norm
    floor: Tensor  # added to the norm of a whitened patch, so that flat ones respond weakly
    threshold: Tensor  # that responses must exceed


def fit_dictionary(
    maps: Tensor,
    *,
    patch_size: int,
    num_patches: int,
    generator: torch.Generator,
    rank: int | None = None,
    contrast: float = CONTRAST,
    remove_mean: bool = True,
    active: float = 0.1,
    ridge: float = 1e-3,
) -> Dictionary:
    """Whiten the patches of ``maps`` (N, C, H, W), pick some that have contrast, and find the threshold."""
    count = max(min(200_000, 20 * len(maps)), 4 * num_patches)  # enough strong ones to choose from
    patches = random_patches(maps, patch_size, count=count, generator=generator)
    normal = normalised(patches, contrast=contrast, remove_mean=remove_mean)
    values, vectors = torch.linalg.eigh((normal.T @ normal).double() / len(normal))
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    whitener = ((values + ridge * values[0]) ** -0.5 * vectors).float()
    whitened = normal @ whitener
    norms = whitened.norm(dim=1)
    median = norms.median()
    strong = torch.nonzero(norms > 0.7 * median)[:, 0]
    picked = strong[torch.randperm(len(strong), generator=generator)[:num_patches]]
    atoms = whitened[picked] / norms[picked, None]
    responses = whitened[:20_000] @ atoms.T / (norms[:20_000, None] + 0.05 * median)
    threshold = responses.flatten()[:: max(97, responses.numel() // 2**23)].quantile(1 - active)
    return Dictionary(whitener=whitener, atoms=atoms.T, floor=0.05 * median, threshold=threshold)


def normalised(patches: Tensor, *, contrast: float = CONTRAST, remove_mean: bool = True) -> Tensor:
    """``patches`` (…, size) without their means, divided by their contrast."""
    centred = patches - patches.mean(-1, keepdim=True) if remove_mean else patches
    return centred / (centred.square().mean(-1, keepdim=True) + contrast**2).sqrt()


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
