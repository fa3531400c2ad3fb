"""EfficientNet-B0, with group norm in place of batch norm.

Paper: Tan & Le 2019, https://arxiv.org/abs/1905.11946. Compared with in Remerscheid et al. 2022.

Layout: conv3x3 of stride 2 to 32 channels; seven stages of inverted residual blocks (table below); conv1x1 to
1280; global mean; linear. Every convolution is followed by a norm, and by SiLU except at a block's end.
    block: [conv1x1 to ``expand`` x channels], depthwise conv, squeeze-and-excitation to a quarter of the
    block's input channels, conv1x1; added to the input where the shape is the same; [ScaleNorm].
No dropout and no stochastic depth. Padding is "SAME".

Parameters for 10 classes: efficientnet_b0 4,020,358.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from sfumato.layers import (
    Activation,
    Initialisation,
    Norm,
    SqueezeExcite,
    initialise,
    make_activation,
    make_norm,
    make_scale_norm,
    same_conv2d,
)
from sfumato.models.classifier import Classifier
from sfumato.models.variant import Variant, with_scale_norm

# expand, kernel, stride, channels, blocks
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
MakeNorm = Callable[[int], nn.Module]


class InvertedResidual(nn.Module):
    """Expand, filter each channel, weigh the channels, project; a skip where input and output are alike."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        expand: int,
        kernel: int,
        stride: int,
        norm: MakeNorm,
        activation: Activation,
        squeeze: bool,
        scale_norm: MakeNorm,
    ) -> None:
        super().__init__()
        middle = inputs * expand
        act = partial(make_activation, activation)
        self.branch = nn.Sequential()
        if expand > 1:
            self.branch.extend([*same_conv2d(inputs, middle, 1), norm(middle), act()])
        depthwise = same_conv2d(middle, middle, kernel, stride=stride, groups=middle)
        self.branch.extend([*depthwise, norm(middle), act()])
        if squeeze:
            self.branch.append(SqueezeExcite(middle, max(1, inputs // 4), activation=activation))
        self.branch.extend([*same_conv2d(middle, outputs, 1), norm(outputs)])
        self.adds = stride == 1 and inputs == outputs
        self.scale_norm = scale_norm(outputs) if self.adds else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale_norm(x + self.branch(x)) if self.adds else self.branch(x)


def build_trunk(
    in_channels: int,
    *,
    width: float,
    norm: MakeNorm,
    activation: Activation,
    squeeze: bool,
    scale_norm: MakeNorm,
    depth: float = 1.0,
    scaled_ends: bool = True,
) -> tuple[nn.Sequential, int]:
    """Stem, seven stages and last convolution of an EfficientNet, and the number of its output channels.

    ``depth`` multiplies the blocks of each stage. Without ``scaled_ends`` stem, last convolution and the
    depth of the first and last stage stay as they are: the rule of the Lite nets above Lite0.
    """

    def scaled(channels: int) -> int:
        # Multiples of 8 that never lose more than a tenth, as the paper scales its nets.
        near = max(8, int(channels * width + 4) // 8 * 8)
        return near + 8 if near < 0.9 * channels * width else near

    inputs, last = (scaled(32), scaled(1280)) if scaled_ends else (32, 1280)
    act = partial(make_activation, activation)
    trunk = nn.Sequential(*same_conv2d(in_channels, inputs, 3, stride=2), norm(inputs), act())
    for stage, (expand, kernel, stride, channels, blocks) in enumerate(STAGES):
        outputs = scaled(channels)
        at_end = stage in (0, len(STAGES) - 1)
        for index in range(blocks if at_end and not scaled_ends else math.ceil(depth * blocks)):
            trunk.append(
                InvertedResidual(
                    inputs,
                    outputs,
                    expand=expand,
                    kernel=kernel,
                    stride=stride if index == 0 else 1,
                    norm=norm,
                    activation=activation,
                    squeeze=squeeze,
                    scale_norm=scale_norm,
                )
            )
            inputs = outputs
    return trunk.extend([*same_conv2d(inputs, last, 1), norm(last), act()]), last


class EfficientNet(Classifier):
    """The B0 at ``width`` 1. Eight groups divide all its numbers of channels."""

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int = 3,
        width: float = 1.0,
        norm: Norm = "group",
        groups: int = 8,
        activation: Activation = "silu",
        scale_norm: bool = False,
        initialisation: Initialisation = "torch",
    ) -> None:
        super().__init__()
        self.trunk, channels = build_trunk(
            in_channels,
            width=width,
            norm=partial(make_norm, norm, groups=groups),
            activation=activation,
            squeeze=True,
            scale_norm=partial(make_scale_norm, scale_norm, norm, groups=groups),
        )
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
        nn.init.zeros_(self.head.bias)
        initialise(self, initialisation)

    def features(self, x: Tensor) -> Tensor:
        return self.trunk(x).mean(dim=(2, 3))


VARIANTS = with_scale_norm(
    {
        "efficientnet_b0": Variant(
            build=EfficientNet,
            summary="inverted residual net with squeeze-and-excitation, GroupNorm",
            papers=("smoothnets2022",),
            input_size=224,
        )
    }
)
