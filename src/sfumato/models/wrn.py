"""Wide residual networks with group norm and weight standardisation.

Paper: De et al. 2022, Unlocking high-accuracy differentially private image classification through scale,
https://arxiv.org/abs/2204.13650, appendix C.1; the family is Zagoruyko & Komodakis 2016.

Layout: WS-conv3x3 to 16 channels; three stages of 16k, 32k, 64k channels at strides 1, 2, 2 with
(depth - 4) / 6 blocks each; ReLU, norm, global mean, linear.
    branch: ReLU, GroupNorm(16), WS-conv3x3, twice (the activation before the norm);
    skip:   identity; in the first block of a stage ReLU, its own GroupNorm, WS-conv1x1 with the stride.
"SAME" padding: at stride 2 no zero before and one after.

Parameters for 10 classes: wrn_16_4 2,753,818 (2,752,506 with skip="bare", the count in Klause et al.),
wrn_40_4 8,961,306, wrn_28_10 36,500,378.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Literal

from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.layers import (
    Activation,
    Norm,
    WSConv2d,
    fan_in_normal_,
    initialise,
    make_activation,
    make_norm,
    same_conv2d,
)
from sfumato.layers import make_scale_norm as scale
from sfumato.models.classifier import Classifier
from sfumato.models.options import check_option
from sfumato.models.variant import Variant, with_scale_norm

MAX_DEPTH, MAX_WIDTH = 400, 200  # ten times the published ones; names also come out of strangers' files
Order = Literal["act-norm", "norm-act"]
Skip = Literal["full", "bare"]


def _pre(channels: int, *, norm: Norm, groups: int, activation: Activation, order: Order) -> list[nn.Module]:
    """What stands before a convolution: activation and norm, in the given order."""
    normalise, activate = make_norm(norm, channels, groups=groups), make_activation(activation)
    return [activate, normalise] if order == "act-norm" else [normalise, activate]


def _conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1, standardised: bool) -> list[nn.Module]:
    """A convolution with a bias, padded "SAME"; without standardisation it has no gain."""
    if standardised:
        return [WSConv2d(inputs, outputs, kernel, stride=stride)]
    layers = same_conv2d(inputs, outputs, kernel, stride=stride, bias=True)
    initialise(nn.Sequential(*layers), "fan_in_normal")
    return layers


class WideBlock(nn.Module):
    """Two convolutions beside a skip, added; then ScaleNorm where the net has it."""

    def __init__(self, branch: nn.Module, skip: nn.Module, scale_norm: nn.Module) -> None:
        super().__init__()
        self.branch, self.skip, self.scale_norm = branch, skip, scale_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.scale_norm(self.skip(x) + self.branch(x))


class WideResNet(Classifier):
    """``depth`` weighted layers, 16, 32, 64 times ``width`` channels.

    ``order`` is that of the branches and of the last norm, ``skip_order`` that of the skips. Sander et al.
    2023 (TAN, https://arxiv.org/abs/2210.03403) take act-norm in the branches with norm-act on the skips; an
    independent reproduction (Bao & Bindschaedler 2024) found it the better by 2.4 points at ε = 8, and by
    0.3 with 16 views. ``skip="bare"`` is a plain 1x1 convolution without norm, gain and bias.
    ``norm="none"`` without ``weight_standardisation`` is the baseline of De et al.'s table 2.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int = 3,
        depth: int = 16,
        width: int = 4,
        norm: Norm = "group",
        groups: int = 16,
        activation: Activation = "relu",
        order: Order = "act-norm",
        skip_order: Order = "act-norm",
        skip: Skip = "full",
        scale_norm: bool = False,
        weight_standardisation: bool = True,
    ) -> None:
        super().__init__()
        check_option("order", order, Order)
        check_option("skip_order", skip_order, Order)
        check_option("skip", skip, Skip)
        _check_skip(skip, skip_order)
        check_size(depth, width)

        conv = partial(_conv, standardised=weight_standardisation)
        pre = partial(_pre, norm=norm, groups=groups, activation=activation)

        def block(inputs: int, outputs: int, stride: int, *, first: bool) -> WideBlock:
            branch = nn.Sequential(
                *pre(inputs, order=order),
                *conv(inputs, outputs, 3, stride=stride),
                *pre(outputs, order=order),
                *conv(outputs, outputs, 3),
            )
            shortcut: nn.Module = nn.Identity()
            if first and skip == "bare":
                shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
                fan_in_normal_(shortcut.weight)
            elif first:
                shortcut = nn.Sequential(
                    *pre(inputs, order=skip_order), *conv(inputs, outputs, 1, stride=stride)
                )
            return WideBlock(branch, shortcut, scale(scale_norm, norm, outputs, groups=groups))

        blocks, channels = [], 16
        for stage, stride in enumerate((1, 2, 2)):
            outputs = 16 * width * 2**stage
            for index in range((depth - 4) // 6):
                first = index == 0
                blocks.append(block(channels, outputs, stride if first else 1, first=first))
                channels = outputs
        (self.stem,) = conv(in_channels, 16, 3)
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(*pre(channels, order=order))
        self.head = nn.Linear(channels, num_classes)
        fan_in_normal_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def features(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.stem(x))).mean(dim=(2, 3))


def _check_skip(skip: Skip, skip_order: Order) -> None:
    if skip == "bare" and skip_order == "norm-act":
        raise ConfigError(
            "bad-model-option",
            'skip_order="norm-act" with skip="bare": such a skip has neither norm nor activation.',
            fix='Leave out one of the two; skip="full" has both.',
        )


def check_size(depth: int, width: int) -> None:
    """Refuse a depth or width that does not exist, or that is too large to be built in seconds."""
    if not 10 <= depth <= MAX_DEPTH or (depth - 4) % 6 or not 1 <= width <= MAX_WIDTH:
        raise ConfigError(
            "bad-wrn-size",
            f"A Wide-ResNet of depth {depth} and width {width} does not exist.",
            why=f"Three stages of equal blocks of two convolutions make depth 6n + 4, up to {MAX_DEPTH}.",
            fix=f"Take depth 10, 16, 22, 28, 34, 40 … and width from 1 to {MAX_WIDTH}.",
        )


def _variant(depth: int, width: int) -> Variant:
    return Variant(
        build=WideResNet,
        summary=f"wide residual net, {depth} layers, width {width}, weight standardisation, GroupNorm",
        papers=("de2022",),
        settings={"depth": depth, "width": width},
    )


VARIANTS = with_scale_norm({f"wrn_{d}_{w}": _variant(d, w) for d, w in ((16, 4), (40, 4), (28, 10))})


def variant_of(name: str) -> Variant | None:
    """The variant that ``wrn_DEPTH_WIDTH`` or ``scale_wrn_DEPTH_WIDTH`` names, if it is such a name."""
    match = re.fullmatch(r"(?:scale_)?(wrn_([0-9]{1,9})_([0-9]{1,9}))", name)
    if match is None:
        return None
    depth, width = int(match[2]), int(match[3])
    check_size(depth, width)
    return with_scale_norm({match[1]: _variant(depth, width)})[name]
