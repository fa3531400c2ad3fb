"""NFNet-F0 to F3: normalizer-free nets with grouped convolutions and squeeze-and-excitation.

Paper: Brock et al. 2021, High-performance large-scale image recognition without normalization,
https://arxiv.org/abs/2102.06171. De et al. 2022 fine-tune the F3 on ImageNet and Places-365, without dropout
and stochastic depth.

Layout: stem of four WS-conv3x3 (16, 32, 64, 128 channels; strides 2, 1, 1, 2) with activations between;
four stages of 256, 512, 1536, 1536 channels with 1, 2, 6, 3 blocks, times n + 1 for Fn; WS-conv1x1 to 3072,
activation, global mean, linear.
    block: h = act(x) · β; WS-conv1x1 to half, act, WS-conv3x3 in groups of 128 with the stride, act, another,
    act, WS-conv1x1, 2 · squeeze-and-excitation; then skip + α · skip_init · branch.
    Skip: x, or WS-conv1x1 of h, averaged 2x2 first where there is a stride.

Parameters for 1000 classes: F0 71.5 M, F1 132.6 M, F2 193.8 M, F3 254.9 M.
"""

from __future__ import annotations

from math import sqrt

from torch import Tensor, nn

from sfumato.layers import (
    NfActivation,
    Norm,
    Scale,
    ScaledActivation,
    SqueezeExcite,
    WSConv2d,
    make_scale_norm,
)
from sfumato.models.classifier import Classifier
from sfumato.models.variant import Variant, with_scale_norm


class NfnetBlock(nn.Module):
    """The bottleneck of an NFNet: two grouped convolutions in the middle, and squeeze-and-excitation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        stride: int,
        alpha: float,
        beta: float,
        group_size: int,
        activation: NfActivation,
        skip_init: float,
        scale_norm: nn.Module,
    ) -> None:
        super().__init__()
        groups = max(1, outputs // 2 // group_size)
        middle = groups * min(group_size, outputs // 2)
        self.activation = ScaledActivation(activation, scale=beta)
        self.branch = nn.Sequential(
            WSConv2d(inputs, middle, 1),
            ScaledActivation(activation),
            WSConv2d(middle, middle, 3, stride=stride, groups=groups),
            ScaledActivation(activation),
            WSConv2d(middle, middle, 3, groups=groups),
            ScaledActivation(activation),
            WSConv2d(middle, outputs, 1),
            SqueezeExcite(outputs, outputs // 2, factor=2.0),
            Scale(skip_init, constant=alpha),
        )
        self.projection: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            # In odd sizes the last window averages the pixels that are there, as "SAME" padding does.
            pools = [nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False)] if stride > 1 else []
            self.projection = nn.Sequential(*pools, WSConv2d(inputs, outputs, 1))
        self.scale_norm = scale_norm

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(x)
        skip = x if self.projection is None else self.projection(h)
        return self.scale_norm(skip + self.branch(h))


def _stem(in_channels: int, outputs: int, activation: NfActivation) -> nn.Sequential:
    eighth, quarter, half = outputs // 8, outputs // 4, outputs // 2
    return nn.Sequential(
        WSConv2d(in_channels, eighth, 3, stride=2),
        ScaledActivation(activation),
        WSConv2d(eighth, quarter, 3),
        ScaledActivation(activation),
        WSConv2d(quarter, half, 3),
        ScaledActivation(activation),
        WSConv2d(half, outputs, 3, stride=2),
    )


class NfNet(Classifier):
    """Four stages of ``widths`` channels and ``depths`` blocks."""

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int = 3,
        depths: tuple[int, int, int, int] = (1, 2, 6, 3),
        widths: tuple[int, int, int, int] = (256, 512, 1536, 1536),
        group_size: int = 128,
        alpha: float = 0.2,
        activation: NfActivation = "gelu",
        skip_init: float = 1.0,
        scale_norm: bool = False,
        norm: Norm = "group",
        groups: int = 32,
    ) -> None:
        super().__init__()
        inputs, deviation = widths[0] // 2, 1.0
        self.stem = _stem(in_channels, inputs, activation)
        self.blocks = nn.Sequential()
        for stage, (outputs, depth) in enumerate(zip(widths, depths, strict=True)):
            for index in range(depth):
                self.blocks.append(
                    NfnetBlock(
                        inputs,
                        outputs,
                        stride=2 if stage > 0 and index == 0 else 1,
                        alpha=alpha,
                        beta=1 / deviation,
                        group_size=group_size,
                        activation=activation,
                        skip_init=skip_init,
                        scale_norm=make_scale_norm(scale_norm, norm, outputs, groups=groups),
                    )
                )
                before = 1.0 if index == 0 else deviation
                deviation = 1.0 if scale_norm else sqrt(before**2 + alpha**2)
                inputs = outputs
        self.last = nn.Sequential(WSConv2d(inputs, 2 * inputs, 1), ScaledActivation(activation))
        self.head = nn.Linear(2 * inputs, num_classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def features(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.stem(x))).mean(dim=(2, 3))


_TRAINED_AT = (192, 224, 256, 320)
VARIANTS = with_scale_norm(
    {
        f"nfnet_f{index}": Variant(
            build=NfNet,
            summary=f"normalizer-free net F{index}, squeeze-and-excitation",
            papers=("de2022",),
            settings={"depths": tuple((index + 1) * depth for depth in (1, 2, 6, 3))},
            input_size=size,
            num_classes=1000,
        )
        for index, size in enumerate(_TRAINED_AT)
    }
)
