"""Wavelet scattering of second order (Bruna & Mallat 2013), as convolutions in space.

S0 = x ⋆ φ, S1 = |x ⋆ ψ| ⋆ φ, S2 = ||x ⋆ ψ| ⋆ ψ'| ⋆ φ for Morlet wavelets ψ at ``num_scales`` octaves and
``num_angles`` orientations, where ψ' is coarser than ψ. With 2 scales and 8 angles, 81 maps per channel at a
quarter of the resolution: the ScatterNet features of Tramèr & Boneh 2021.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Scattering(nn.Module):
    """Images (B, C, H, W) → (B, C · num_maps, H / 2^J, W / 2^J) for J = ``num_scales``."""

    lowpass: Tensor

    def __init__(self, *, num_scales: int = 2, num_angles: int = 8) -> None:
        super().__init__()
        self.num_scales, self.num_angles = num_scales, num_angles
        for scale in range(num_scales):
            self.register_buffer(f"wavelets_{scale}", morlets(scale, num_angles))
        self.register_buffer("lowpass", gaussian_window(0.8 * 2**num_scales))

    @property
    def num_maps(self) -> int:
        scales, angles = self.num_scales, self.num_angles
        return 1 + scales * angles + angles**2 * scales * (scales - 1) // 2

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        maps = images.reshape(-1, 1, height, width)
        outputs = [self._average(maps, 0)]
        second = []
        for scale in range(self.num_scales):
            first = self._modulus(maps, scale, stride=2**scale)
            outputs.append(self._average(first, scale))
            for coarser in range(scale + 1, self.num_scales):
                flat = first.reshape(-1, 1, *first.shape[2:])
                # the wavelet of the coarser octave on maps already thinned by 2^scale
                deeper = self._modulus(flat, coarser - scale, stride=2 ** (coarser - scale))
                deeper = self._average(deeper, coarser)
                second.append(
                    deeper.reshape(maps.shape[0], -1, *deeper.shape[2:])
                )  # len() would fix it in a trace
        joined = torch.cat(outputs + second, dim=1)
        return joined.reshape(batch, channels * self.num_maps, *joined.shape[2:])

    def _modulus(self, maps: Tensor, scale: int, *, stride: int) -> Tensor:
        """|maps ⋆ ψ| for all angles, at every ``stride``-th place."""
        wavelets = getattr(self, f"wavelets_{scale}")
        radius = wavelets.shape[-1] // 2
        both = F.conv2d(_padded(maps, radius), wavelets, stride=stride)
        real, imaginary = both.chunk(2, dim=1)
        return (real.square() + imaginary.square() + 1e-12).sqrt()

    def _average(self, maps: Tensor, scale: int) -> Tensor:
        """Maps ⋆ φ, thinned to the coarsest resolution; ``maps`` are already thinned by 2^scale."""
        stride = 2 ** (self.num_scales - scale)
        window = self.lowpass if scale == 0 else gaussian_window(0.8 * stride).to(maps)
        flat = maps.reshape(-1, 1, *maps.shape[2:])
        radius = len(window) // 2
        padded = _padded(flat, radius)
        rows = F.conv2d(padded, window.view(1, 1, -1, 1), stride=(stride, 1))
        result = F.conv2d(rows, window.view(1, 1, 1, -1), stride=(1, stride))
        return result.reshape(*maps.shape[:2], *result.shape[2:])


def morlets(scale: int, num_angles: int) -> Tensor:
    """Morlet wavelets of one octave, real parts then imaginary parts: (2 · angles, 1, size, size).

    Envelope of deviation 0.8 · 2^scale along the wave and twice that across (at 8 angles), frequency
    3π/4 / 2^scale, mean zero.
    """
    deviation, frequency, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4.0 / num_angles
    radius = math.ceil(3 * deviation / min(1.0, slant))
    axis = torch.arange(-radius, radius + 1, dtype=torch.float64)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    real, imaginary = [], []
    for number in range(num_angles):
        angle = math.pi * number / num_angles
        along = x * math.cos(angle) + y * math.sin(angle)
        across = y * math.cos(angle) - x * math.sin(angle)
        envelope = torch.exp(-(along.square() + (slant * across).square()) / (2 * deviation**2))
        cosine, sine = envelope * torch.cos(frequency * along), envelope * torch.sin(frequency * along)
        cosine = cosine - envelope * (cosine.sum() / envelope.sum())  # no response to a constant
        norm = 2 * math.pi * deviation**2 / slant
        real.append(cosine / norm)
        imaginary.append(sine / norm)
    return torch.stack(real + imaginary)[:, None].float()


def gaussian_window(deviation: float) -> Tensor:
    """A one-dimensional Gaussian of sum 1."""
    radius = math.ceil(3 * deviation)
    axis = torch.arange(-radius, radius + 1, dtype=torch.float64)
    window = torch.exp(-axis.square() / (2 * deviation**2))
    return (window / window.sum()).float()


def _padded(maps: Tensor, radius: int) -> Tensor:
    """Mirrored borders; maps smaller than the radius are padded in several rounds."""
    while radius > 0:
        step = min(radius, maps.shape[-1] - 1, maps.shape[-2] - 1)
        maps = F.pad(maps, (step, step, step, step), mode="reflect")
        radius -= step
    return maps
