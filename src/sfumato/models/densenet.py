"""DenseNet-121, with group norm in place of batch norm.

Paper: Huang et al. 2017, https://arxiv.org/abs/1608.06993. Compared with in Remerscheid et al. 2022.

Layout: conv7x7 of stride 2 to 64 channels, norm, ReLU, 3x3 max pool of stride 2 (stem="imagenet"; with
stem="cifar" one conv3x3); four stages of 6, 12, 24, 16 layers; between them norm, ReLU, conv1x1 to half the
channels, 2x2 average pool; norm, ReLU, global mean, linear.
    layer: norm, ReLU, conv1x1 to 128, norm, ReLU, conv3x3 to 32 channels, concatenated to its input.
It concatenates and never adds, so ScaleNorm has no place in it.

Parameters for 10 classes: densenet121 6,964,106.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from sfumato.layers import Activation, Initialisation, Norm, initialise, make_activation, make_norm
from sfumato.models.classifier import Classifier
from sfumato.models.options import check_option
from sfumato.models.variant import Variant

Stem = Literal["imagenet", "cifar"]


class DenseLayer(nn.Sequential):
    """The layer's output, concatenated to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], dim=1)


class DenseNet(Classifier):
    """Stages of ``depths`` layers that each add ``growth`` channels."""

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int = 3,
        depths: tuple[int, ...] = (6, 12, 24, 16),
        growth: int = 32,
        stem: Stem = "imagenet",
        norm: Norm = "group",
        groups: int = 32,
        activation: Activation = "relu",
        initialisation: Initialisation = "torch",
    ) -> None:
        super().__init__()
        check_option("stem", stem, Stem)
        make = partial(make_norm, norm, groups=groups)
        act = partial(make_activation, activation)

        def pre(channels: int) -> list[nn.Module]:
            return [make(channels), act()]

        channels, hidden = 2 * growth, 4 * growth
        if stem == "cifar":
            self.stem = nn.Sequential(nn.Conv2d(in_channels, channels, 3, 1, 1, bias=False))
        else:
            conv = nn.Conv2d(in_channels, channels, 7, 2, 3, bias=False)
            self.stem = nn.Sequential(conv, *pre(channels), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.Sequential()
        for stage, depth in enumerate(depths):
            if stage > 0:
                narrow = nn.Conv2d(channels, channels // 2, 1, bias=False)
                self.stages.append(nn.Sequential(*pre(channels), narrow, nn.AvgPool2d(2)))
                channels //= 2
            for _ in range(depth):
                squeeze = nn.Conv2d(channels, hidden, 1, bias=False)
                grow = nn.Conv2d(hidden, growth, 3, padding=1, bias=False)
                self.stages.append(DenseLayer(*pre(channels), squeeze, *pre(hidden), grow))
                channels += growth
        self.last = nn.Sequential(*pre(channels))
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(self.head.bias)
        initialise(self, initialisation)

    def features(self, x: Tensor) -> Tensor:
        return self.last(self.stages(self.stem(x))).mean(dim=(2, 3))


VARIANTS = {
    "densenet121": Variant(
        build=DenseNet,
        summary="densely connected net of 121 layers, GroupNorm",
        papers=("smoothnets2022",),
        input_size=224,
    )
}
