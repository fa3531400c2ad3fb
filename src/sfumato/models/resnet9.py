"""ResNet-9 and ScaleResNet-9.

Paper: Klause et al. 2022, Differentially private training of residual networks with scale normalisation,
https://arxiv.org/abs/2203.00324, appendix C (and B for the BatchNorm form, for ordinary training).

Layout, with block = conv3x3 without bias, norm, Mish, and an optional 2x2 max pool:
    3 → 64; 64 → 128, pool; residual 128 → 128 → 128, add, [ScaleNorm];
    128 → 256, pool; 256 → 256, pool; residual 256 → 256 → 256, add, [ScaleNorm];
    adaptive max pool to 2x2, 1024 numbers, linear.

Parameters for 10 classes: 2,447,946; with ScaleNorm 2,448,714.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from sfumato.layers import Activation, Initialisation, Norm, initialise, make_activation, make_norm
from sfumato.layers import make_scale_norm as scale
from sfumato.models.classifier import Classifier
from sfumato.models.options import check_option
from sfumato.models.variant import Variant, with_scale_norm

Order = Literal["norm-act", "act-norm"]


class ResNet9(Classifier):
    """Nine weighted layers. ``width`` is the number of channels of the first.

    ``order`` of norm and activation after each convolution: "norm-act" as in the authors' public code
    (the default: it produced their figures), "act-norm" as in the text of their appendix C.
    ``patch`` above 1 puts so many pixels per side into the channels first: 2 needs a quarter of the time.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int = 3,
        width: int = 64,
        norm: Norm = "group",
        groups: int = 32,
        activation: Activation = "mish",
        order: Order = "norm-act",
        scale_norm: bool = False,
        patch: int = 1,
        initialisation: Initialisation = "torch",
    ) -> None:
        super().__init__()
        check_option("order", order, Order)

        def block(inputs: int, outputs: int, *, pool: bool = False) -> nn.Sequential:
            normalise, activate = make_norm(norm, outputs, groups=groups), make_activation(activation)
            layers = [normalise, activate] if order == "norm-act" else [activate, normalise]
            pooling = [nn.MaxPool2d(2)] if pool else []
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), *layers, *pooling)

        double, quadruple = 2 * width, 4 * width
        self.rearrange = nn.PixelUnshuffle(patch) if patch > 1 else nn.Identity()
        self.stem = nn.Sequential(block(in_channels * patch**2, width), block(width, double, pool=True))
        self.residual1 = nn.Sequential(block(double, double), block(double, double))
        self.scale_norm1 = scale(scale_norm, norm, double, groups=groups)
        self.middle = nn.Sequential(
            block(double, quadruple, pool=True), block(quadruple, quadruple, pool=True)
        )
        self.residual2 = nn.Sequential(block(quadruple, quadruple), block(quadruple, quadruple))
        self.scale_norm2 = scale(scale_norm, norm, quadruple, groups=groups)
        self.pool = nn.AdaptiveMaxPool2d(2)
        self.head = nn.Linear(4 * quadruple, num_classes)
        initialise(self, initialisation)

    def features(self, x: Tensor) -> Tensor:
        x = self.stem(self.rearrange(x))
        x = self.scale_norm1(x + self.residual1(x))
        x = self.middle(x)
        x = self.scale_norm2(x + self.residual2(x))
        return self.pool(x).flatten(1)


VARIANTS = with_scale_norm(
    {
        "resnet9": Variant(
            build=ResNet9, summary="shallow residual net, GroupNorm, Mish", papers=("scalenorm2022",)
        )
    }
)
