"""ResNet-18, -34, -50, -101 and -152, with group norm in place of batch norm.

Papers: He et al. 2016, https://arxiv.org/abs/1512.03385. Compared with in Remerscheid et al. 2022 (18, 34)
and in Klause et al. 2022, appendix D (50, with and without ScaleNorm).

Layout: conv7x7 of stride 2 to 64 channels, norm, ReLU, 3x3 max pool of stride 2 (stem="imagenet"; with
stem="cifar" one conv3x3, norm, ReLU); four stages of 64, 128, 256, 512 channels; global mean; linear.
    basic block (18, 34):   conv3x3, norm, ReLU, conv3x3, norm; add; [ScaleNorm]; ReLU
    bottleneck (50 to 152): conv1x1, norm, ReLU, conv3x3 with the stride, norm, ReLU, conv1x1 to 4 x the
                            channels, norm; add; [ScaleNorm]; ReLU
    skip: identity, or conv1x1 with the stride and a norm where the shape changes.

Parameters for 10 classes: resnet18 11,181,642; resnet34 21,289,802; resnet50 23,528,522;
resnet101 42,520,650; resnet152 58,164,298.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor, nn

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

Block = Literal["basic", "bottleneck"]
Stem = Literal["imagenet", "cifar"]
MakeNorm = Callable[[int], nn.Module]


def _branch(
    block: Block, inputs: int, channels: int, stride: int, norm: MakeNorm, act: Callable[[], nn.Module]
) -> nn.Sequential:
    def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
        layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        return [layer, norm(outputs)]

    if block == "basic":
        return nn.Sequential(*conv(inputs, channels, 3, stride), act(), *conv(channels, channels, 3))
    return nn.Sequential(
        *conv(inputs, channels, 1),
        act(),
        *conv(channels, channels, 3, stride),
        act(),
        *conv(channels, 4 * channels, 1),
    )


class ResidualBlock(nn.Module):
    """Branch and skip, added; then ScaleNorm where the net has it; then the activation."""

    def __init__(
        self, branch: nn.Module, skip: nn.Module, scale_norm: nn.Module, activation: nn.Module
    ) -> None:
        super().__init__()
        self.branch, self.skip, self.scale_norm, self.activation = branch, skip, scale_norm, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.scale_norm(self.skip(x) + self.branch(x)))


def _stem(kind: Stem, in_channels: int, width: int, norm: MakeNorm, activation: nn.Module) -> nn.Sequential:
    if kind == "cifar":
        return nn.Sequential(nn.Conv2d(in_channels, width, 3, 1, 1, bias=False), norm(width), activation)
    conv = nn.Conv2d(in_channels, width, 7, 2, 3, bias=False)
    return nn.Sequential(conv, norm(width), activation, nn.MaxPool2d(3, 2, 1))


class ResNet(Classifier):
    """Four stages of ``depths`` blocks; ``width`` is the number of channels of the first."""

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int = 3,
        block: Block = "basic",
        depths: tuple[int, int, int, int] = (2, 2, 2, 2),
        width: int = 64,
        stem: Stem = "imagenet",
        norm: Norm = "group",
        groups: int = 32,
        activation: Activation = "relu",
        scale_norm: bool = False,
        initialisation: Initialisation = "torch",
    ) -> None:
        super().__init__()
        check_option("block", block, Block)
        check_option("stem", stem, Stem)
        make = partial(make_norm, norm, groups=groups)
        act = partial(make_activation, activation)
        expansion = 1 if block == "basic" else 4
        self.stem = _stem(stem, in_channels, width, make, act())
        self.blocks = nn.Sequential()
        inputs = width
        for stage, depth in enumerate(depths):
            channels = width * 2**stage
            outputs = channels * expansion
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                skip: nn.Module = nn.Identity()
                if stride != 1 or inputs != outputs:
                    skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), make(outputs))
                branch = _branch(block, inputs, channels, stride, make, act)
                after = make_scale_norm(scale_norm, norm, outputs, groups=groups)
                self.blocks.append(ResidualBlock(branch, skip, after, act()))
                inputs = outputs
        self.head = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        initialise(self, initialisation)

    def features(self, x: Tensor) -> Tensor:
        return self.blocks(self.stem(x)).mean(dim=(2, 3))


def _variant(depth: int, depths: tuple[int, ...], *, block: Block, papers: tuple[str, ...] = ()) -> Variant:
    return Variant(
        build=ResNet,
        summary=f"residual net of {depth} layers, GroupNorm",
        papers=papers,
        settings={"block": block, "depths": depths},
        input_size=224,
    )


VARIANTS = with_scale_norm(
    {
        "resnet18": _variant(18, (2, 2, 2, 2), block="basic", papers=("smoothnets2022",)),
        "resnet34": _variant(34, (3, 4, 6, 3), block="basic", papers=("smoothnets2022",)),
        "resnet50": _variant(50, (3, 4, 6, 3), block="bottleneck", papers=("scalenorm2022",)),
        "resnet101": _variant(101, (3, 4, 23, 3), block="bottleneck"),
        "resnet152": _variant(152, (3, 8, 36, 3), block="bottleneck"),
    }
)
