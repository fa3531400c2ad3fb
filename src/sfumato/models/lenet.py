"""LeNet-5, the small net on which De et al. 2022 (appendix A) audit privacy with MNIST.

Paper: LeCun et al. 1998, Gradient-based learning applied to document recognition.

Layout: conv5x5 (pad 2) to 6 channels, activation, 2x2 average pool; conv5x5 to 16, activation, 2x2 average
pool; 400 → 120 → 84 → classes. Images of another size than 28 are pooled to the same 5x5 before the first
linear layer.

Parameters for 10 classes: 61,706 with one input channel, 62,006 with three.
"""

from __future__ import annotations

from torch import Tensor, nn

from sfumato.errors import ModelError
from sfumato.layers import Activation, make_activation
from sfumato.models.classifier import Classifier
from sfumato.models.variant import Variant

_SMALLEST = 12  # below it, the second convolution and pool leave nothing


class LeNet(Classifier):
    """Two convolutions and three linear layers, without any normalisation."""

    def __init__(self, *, num_classes: int, in_channels: int = 3, activation: Activation = "tanh") -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(in_channels, 6, 5, padding=2),
            make_activation(activation),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            make_activation(activation),
            nn.AvgPool2d(2),
            nn.AdaptiveAvgPool2d(5),
        )
        self.hidden = nn.Sequential(
            nn.Linear(16 * 5 * 5, 120),
            make_activation(activation),
            nn.Linear(120, 84),
            make_activation(activation),
        )
        self.head = nn.Linear(84, num_classes)

    def features(self, x: Tensor) -> Tensor:
        if min(x.shape[-2:]) < _SMALLEST:
            raise ModelError(
                "image-too-small",
                f"LeNet needs images of at least {_SMALLEST} pixels a side, not {tuple(x.shape[-2:])}.",
                fix="Enlarge the images (--set data.image_size=28) or take another model.",
            )
        return self.hidden(self.trunk(x).flatten(1))


VARIANTS = {
    "lenet": Variant(build=LeNet, summary="LeNet-5", papers=("de2022",), input_size=28),
}
