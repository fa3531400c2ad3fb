"""Frozen features of public backbones: the image resized as they expect, seen by one network or by several.

Their square root is taken, so that a few strong features do not drown the others when rows get unit norm.

Nothing of the private data enters a backbone, so its features of one image depend on that image alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfumato.errors import ModelError
from sfumato.features.pieces import in_pieces
from sfumato.features.precision import working_dtype
from sfumato.layers import FrozenBatchNorm

_ROWS_AT_ONCE = 8


class Backbone(Protocol):
    """A network whose rows before its last layer can be asked for."""

    def features(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) → (B, d)."""
        ...


class BackboneFeatures(nn.Module):
    """Images (B, C, H, W) from 0 to 1 → rows of unit norm: the networks' pooled features side by side.

    ``networks`` is any module with ``features(images) -> (B, d)``, on images minus ``mean`` over ``std``, or
    several of them: what one network misses, another may see. Each has the same weight; ``num_features`` is
    the sum over all. ``low_precision``: in bfloat16 on processors that multiply it faster, in float32 on
    others.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        networks: nn.Module | Sequence[nn.Module],
        *,
        num_features: int,
        input_size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        mirror: bool = True,
        square_root: bool = True,
        low_precision: bool = False,
    ) -> None:
        super().__init__()
        networks = [networks] if isinstance(networks, nn.Module) else networks
        for network in networks:
            if not hasattr(network, "features"):
                raise ModelError(
                    "no-features",
                    f"{type(network).__name__} has no method `features(images)`.",
                    why="Frozen features are what the network computes before its last layer.",
                    fix="Give it one that returns (batch, features), or take a model of the zoo.",
                )
        self.networks = nn.ModuleList(networks).eval().requires_grad_(False)
        self.num_features, self.input_size = num_features, input_size
        self.mirror, self.square_root, self.low_precision = mirror, square_root, low_precision
        self.described: dict[str, object] = {"backbone": 3, "size": input_size, "mirror": mirror}
        self.described |= {
            "square_root": square_root,
            "low_precision": low_precision,
            "mean": mean,
            "std": std,
        }
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return in_pieces(self._rows, images, rows=_ROWS_AT_ONCE)

    def _rows(self, images: Tensor) -> Tensor:
        size = (self.input_size, self.input_size)
        resized = F.interpolate(images, size=size, mode="bicubic", align_corners=False, antialias=True)
        resized = resized.clamp(0, 1).expand(-1, self.mean.shape[1], -1, -1)  # grey images as colour ones
        inputs = ((resized - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        seen = [self._seen_by(cast(Backbone, network), inputs) for network in self.networks]
        rows = [F.normalize(each, dim=1) for each in seen]
        return torch.cat(rows, dim=1) / len(rows) ** 0.5

    def _seen_by(self, network: Backbone, inputs: Tensor) -> Tensor:
        low = working_dtype(inputs.device, low_precision=self.low_precision) == torch.bfloat16
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=low):
            rows = network.features(inputs).float()
            if self.mirror:
                rows = rows + network.features(inputs.flip(-1)).float()
        return rows.sign() * rows.abs().sqrt() if self.square_root else rows


@torch.no_grad()
def folded(network: nn.Sequential) -> nn.Sequential:
    """A copy in which each frozen batch norm is part of the convolution before it: equal outputs, faster."""
    layers: list[nn.Module] = []
    for layer in copy.deepcopy(network):
        branch = getattr(layer, "branch", None)
        if isinstance(branch, nn.Sequential):
            layer.branch = folded(branch)
        if isinstance(layer, FrozenBatchNorm) and layers and isinstance(layers[-1], nn.Conv2d):
            convolution = layers[-1]
            gain = layer.weight / (layer.running_var + layer.eps).sqrt()
            bias = torch.zeros_like(layer.bias) if convolution.bias is None else convolution.bias
            convolution.weight.mul_(gain.view(-1, 1, 1, 1))
            convolution.bias = nn.Parameter((bias - layer.running_mean) * gain + layer.bias)
            continue
        layers.append(layer)
    return nn.Sequential(*layers)
