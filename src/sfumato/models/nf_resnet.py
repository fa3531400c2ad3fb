"""Normalizer-free residual networks.

Paper: Brock et al. 2021, Characterizing signal propagation to close the performance gap in unnormalized
ResNets, https://arxiv.org/abs/2101.08692. Trained from scratch and fine-tuned on ImageNet and Places-365 in
De et al. 2022, without dropout and stochastic depth and with SkipInit 1.0.

Layout: WS-conv7x7 of stride 2 to 64 channels, 3x3 max pool of stride 2; four stages of 256, 512, 1024, 2048
channels; activation, global mean, linear.
    block: h = act(x) · β; WS-conv1x1 to a quarter, act, WS-conv3x3 with the stride, act, WS-conv1x1; then
    skip + α · skip_init · branch. Skip: x, or WS-conv1x1 of h with the stride where the shape changes.
    1/β is the deviation expected of x: 1 at the start of a stage, √(β⁻² + α²) after each block.
The activation is scaled to keep the variance of a normal input (by 1.713 for ReLU).
With ScaleNorm the deviation is 1 after every block, so β is 1 throughout.

Parameters for 1000 classes: nf_resnet50 25,557,048; nf_resnet101 44.5 M; nf_resnet152 60.2 M;
nf_resnet200 64.7 M.
"""

from __future__ import annotations

from math import sqrt

from torch import Tensor, nn

from sfumato.layers import NfActivation, Norm, Scale, ScaledActivation, WSConv2d, make_scale_norm
from sfumato.models.classifier import Classifier
from sfumato.models.variant import Variant, with_scale_norm


class NfBlock(nn.Module):
    """Bottleneck whose branch starts from an input scaled to unit deviation; ``beta`` does the scaling."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        stride: int,
        alpha: float,
        beta: float,
        activation: NfActivation,
        skip_init: float,
        scale_norm: nn.Module,
    ) -> None:
        super().__init__()
        middle = outputs // 4
        self.activation = ScaledActivation(activation, scale=beta)
        self.branch = nn.Sequential(
            WSConv2d(inputs, middle, 1),
            ScaledActivation(activation),
            WSConv2d(middle, middle, 3, stride=stride),
            ScaledActivation(activation),
            WSConv2d(middle, outputs, 1),
            Scale(skip_init, constant=alpha),
        )
        same = stride == 1 and inputs == outputs
        self.projection = None if same else WSConv2d(inputs, outputs, 1, stride=stride)
        self.scale_norm = scale_norm

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(x)
        skip = x if self.projection is None else self.projection(h)
        return self.scale_norm(skip + self.branch(h))


class NfResNet(Classifier):
    """Four stages of ``depths`` bottleneck blocks; ``width`` is the number of channels of the stem."""

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int = 3,
        depths: tuple[int, int, int, int] = (3, 4, 6, 3),
        width: int = 64,
        alpha: float = 0.2,
        activation: NfActivation = "relu",
        skip_init: float = 1.0,
        scale_norm: bool = False,
        norm: Norm = "group",
        groups: int = 32,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(WSConv2d(in_channels, width, 7, stride=2), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential()
        inputs, deviation = width, 1.0
        for stage, depth in enumerate(depths):
            outputs = 4 * width * 2**stage
            for index in range(depth):
                self.blocks.append(
                    NfBlock(
                        inputs,
                        outputs,
                        stride=2 if stage > 0 and index == 0 else 1,
                        alpha=alpha,
                        beta=1 / deviation,
                        activation=activation,
                        skip_init=skip_init,
                        scale_norm=make_scale_norm(scale_norm, norm, outputs, groups=groups),
                    )
                )
                before = 1.0 if index == 0 else deviation
                deviation = 1.0 if scale_norm else sqrt(before**2 + alpha**2)
                inputs = outputs
        self.last = ScaledActivation(activation)
        self.head = nn.Linear(inputs, num_classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def features(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.stem(x))).mean(dim=(2, 3))


_DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
VARIANTS = with_scale_norm(
    {
        f"nf_resnet{depth}": Variant(
            build=NfResNet,
            summary=f"normalizer-free residual net of {depth} layers, weight standardisation",
            papers=("de2022",),
            settings={"depths": depths},
            input_size=224,
            num_classes=1000,
        )
        for depth, depths in _DEPTHS.items()
    }
)
