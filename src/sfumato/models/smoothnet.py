"""SmoothNet, and the family in which its components were studied.

Paper: Remerscheid et al. 2022, SmoothNets: optimizing CNN architecture design for differentially private
deep learning, https://arxiv.org/abs/2205.04095.

Layout: block = conv3x3 without bias, 3x3 max pool of stride 1, GroupNorm(8), SELU; its output is
concatenated to its input.
    stage 0: 5 blocks of 64 channels (3 → 67 → … → 323); conv1x1 to half the channels, 2x2 average pool;
    stage 1: 5 blocks of 128 channels (161 → … → 801); of the last only its own 128 channels go on;
    2x2 average pool, adaptive average pool to 4x4, linear 2048 → 256, SELU, 128, SELU, classes.
All weights Xavier uniform with the gain of SELU.

Parameters for 10 classes: 3,391,853.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.layers import (
    Activation,
    Initialisation,
    Norm,
    initialise,
    make_activation,
    make_norm,
    make_scale_norm,
)
from sfumato.models.classifier import Classifier
from sfumato.models.options import check_option
from sfumato.models.variant import Variant, with_scale_norm

Block = Callable[[int, int], nn.Module]
Connection = Literal["dense", "residual", "none"]
Pooling = Literal["max", "average", "none"]


class ResidualBlock(nn.Module):
    """A block beside a skip, added; the skip is a 1x1 convolution where the channels differ."""

    def __init__(self, block: nn.Module, skip: nn.Module, scale_norm: nn.Module) -> None:
        super().__init__()
        self.block, self.skip, self.scale_norm = block, skip, scale_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.scale_norm(self.skip(x) + self.block(x))


class DenseStage(nn.Module):
    """Blocks that each see the stage's input and the outputs of all blocks before."""

    def __init__(self, blocks: list[nn.Module], *, keep_all: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.keep_all = keep_all

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = torch.cat([x, block(x)], dim=1)
        last = self.blocks[-1](x)
        return torch.cat([x, last], dim=1) if self.keep_all else last


def _block(
    inputs: int, outputs: int, *, pooling: Pooling, norm: Norm, groups: int, activation: Activation
) -> nn.Module:
    pools: dict[Pooling, list[nn.Module]] = {
        "max": [nn.MaxPool2d(3, 1, 1)],
        "average": [nn.AvgPool2d(3, 1, 1)],
        "none": [],
    }
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        *pools[pooling],
        make_norm(norm, outputs, groups=groups),
        make_activation(activation),
    )


def _chain(
    block: Block, channels: list[int], *, residual: bool, scale_norm: Callable[[int], nn.Module]
) -> nn.Module:
    """Blocks one after the other through these numbers of channels, each with a skip if ``residual``."""
    stage = nn.Sequential()
    for inputs, outputs in pairwise(channels):
        layer = block(inputs, outputs)
        if residual:
            same = inputs == outputs
            skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, bias=False)
            layer = ResidualBlock(layer, skip, scale_norm(outputs))
        stage.append(layer)
    return stage


class SmoothNet(Classifier):
    """``depth`` blocks in each of the two stages, of ``width`` and 2 x ``width`` channels."""

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int = 3,
        depth: int = 5,
        width: int = 64,
        connection: Connection = "dense",
        norm: Norm = "group",
        groups: int = 8,
        pooling: Pooling = "max",
        activation: Activation = "selu",
        scale_norm: bool = False,
        initialisation: Initialisation = "xavier_selu",
    ) -> None:
        super().__init__()
        _check(connection=connection, pooling=pooling, scale_norm=scale_norm)
        block = partial(_block, pooling=pooling, norm=norm, groups=groups, activation=activation)
        dense = connection == "dense"

        def stage(inputs: int, growth: int, *, keep_all: bool) -> nn.Module:
            if dense:
                blocks = [block(inputs + index * growth, growth) for index in range(depth)]
                return DenseStage(blocks, keep_all=keep_all)
            norms = partial(make_scale_norm, scale_norm, norm, groups=groups)
            channels = [inputs] + depth * [growth]
            return _chain(block, channels, residual=connection == "residual", scale_norm=norms)

        channels = in_channels + depth * width if dense else width
        half = max(1, channels // 2)
        self.trunk = nn.Sequential(
            stage(in_channels, width, keep_all=True),
            nn.Conv2d(channels, half, 1, bias=False),
            nn.AvgPool2d(2),
            stage(half, 2 * width, keep_all=False),
            nn.AvgPool2d(2),
            nn.AdaptiveAvgPool2d(4),
        )
        self.hidden = nn.Sequential(
            nn.Linear(16 * 2 * width, 256),
            make_activation(activation),
            nn.Linear(256, 128),
            make_activation(activation),
        )
        self.head = nn.Linear(128, num_classes)
        initialise(self, initialisation)

    def features(self, x: Tensor) -> Tensor:
        return self.hidden(self.trunk(x).flatten(1))


def _check(*, connection: str, pooling: str, scale_norm: bool) -> None:
    check_option("connection", connection, Connection)
    check_option("pooling", pooling, Pooling)
    if scale_norm and connection != "residual":
        raise ConfigError(
            "no-addition",
            f"ScaleNorm has no place in a SmoothNet with connection={connection!r}.",
            why="It stands after a residual addition, and this net has none.",
            fix='Use connection="residual".',
        )


_PAPERS = ("smoothnets2022",)
VARIANTS = {
    "smoothnet": Variant(
        build=SmoothNet, summary="wide and shallow dense net, SELU, max pools", papers=_PAPERS
    ),
    **with_scale_norm(
        {
            "smoothnet_residual": Variant(
                build=SmoothNet,
                summary="SmoothNet with residual in place of dense connections",
                papers=_PAPERS,
                settings={"connection": "residual"},
            )
        }
    ),
}
