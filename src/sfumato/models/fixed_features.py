"""Models of the zoo whose features are fixed: only a head on them is trained, linear or a small net.

They take images from 0 to 1, or rows of features computed before, since a run computes them only once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

from torch import Tensor, channels_last, nn, zeros
from torch.nn import functional as F

from sfumato.errors import ConfigError
from sfumato.features.backbone import BackboneFeatures, folded
from sfumato.features.combined import CombinedFeatures
from sfumato.features.patch_bank import WidePatchFeatures
from sfumato.features.patch_features import PatchFeatures
from sfumato.features.scatter_features import GroupedScatterMaps, ScatterFeatures, ScatterMaps
from sfumato.models import efficientnet_lite
from sfumato.models.classifier import Classifier
from sfumato.models.variant import Variant

Extractor = (
    PatchFeatures | ScatterFeatures | CombinedFeatures | ScatterMaps | GroupedScatterMaps | BackboneFeatures
)


class FixedFeatures(Classifier):
    """Rows of frozen features, minus a centre, at unit norm; what is trained on them is the subclass's.

    ``centre`` is zero until a run releases the private mean into it, as an event of its own.
    """

    centre: Tensor
    extractor: Extractor

    def __init__(self, extractor: Extractor) -> None:
        super().__init__()
        self.extractor = extractor.requires_grad_(False)
        self.register_buffer("centre", zeros(extractor.num_features))

    def rows(self, x: Tensor) -> Tensor:
        rows = self.extractor(x) if x.ndim == 4 else x
        return F.normalize(rows - self.centre, dim=1)


class FeatureClassifier(FixedFeatures):
    """Fixed features under a linear head, which begins at zero.

    Clipping sees rows of ``row_norm`` beside the bias's constant 1. At norm 1 the bias takes half of each
    unit's squared gradient, though it has next to nothing to learn; at norm 3 a tenth.
    """

    def __init__(self, extractor: Extractor, *, num_classes: int, row_norm: float = 1.0) -> None:
        super().__init__(extractor)
        if not 0 < row_norm < math.inf:
            raise ConfigError("bad-model-option", f"row_norm={row_norm} is no norm.", fix="Use 1 or 3.")
        self.row_norm = row_norm
        self.head = nn.Linear(extractor.num_features, num_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def features(self, x: Tensor) -> Tensor:
        return self.row_norm * self.rows(x)


class ScatterNet(FixedFeatures):
    """Fixed scattering maps under the small net of Tramèr & Boneh 2021.

    Trained at 32 px: 84,106 parameters; 187,210 with all 243 maps of colour images, as theirs.

    conv3x3 to ``width`` → tanh → max pool 2 → conv3x3 → tanh → linear.
    """

    def __init__(self, extractor: ScatterMaps | GroupedScatterMaps, *, num_classes: int, width: int) -> None:
        super().__init__(extractor)
        self.shape = extractor.shape  # of an image's maps
        channels, side, _ = extractor.shape
        self.scale = extractor.num_features**0.5  # back to maps of variance 1
        self.net = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Conv2d(width, width, 3, padding=1),
            nn.Tanh(),
        )
        self.head = nn.Linear(width * math.ceil(side / 2) ** 2, num_classes)

    def features(self, x: Tensor) -> Tensor:
        maps = self.scale * self.rows(x).unflatten(1, self.shape)
        return self.net(maps).flatten(1)


def patches(
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: int = 32,
    num_layers: int = 2,
    num_patches: int = 256,
    second_patches: int = 512,
    num_directions: int = 2500,
    grid: int = 3,
    spread: float = 0.5,
    mirror: bool = True,
    row_norm: float = 1.0,
) -> FeatureClassifier:
    """Patch features, to be fitted on generated images by ``extractor.fit()``."""
    extractor = PatchFeatures(
        image_size=image_size,
        in_channels=in_channels,
        num_layers=num_layers,
        num_patches=num_patches,
        second_patches=second_patches,
        num_directions=num_directions,
        grid=grid,
        spread=spread,
        mirror=mirror,
    )
    return FeatureClassifier(extractor, num_classes=num_classes, row_norm=row_norm)


def scatter(
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: int = 32,
    num_directions: int = 2500,
    grid: int = 4,
    spread: float = 0.5,
    mirror: bool = True,
    group_norm: bool = False,
    row_norm: float = 1.0,
) -> FeatureClassifier:
    """Wavelet scattering, whitened on generated images by ``extractor.fit()``."""
    extractor = ScatterFeatures(
        image_size=image_size,
        in_channels=in_channels,
        num_directions=num_directions,
        grid=grid,
        spread=spread,
        mirror=mirror,
        group_norm=group_norm,
    )
    return FeatureClassifier(extractor, num_classes=num_classes, row_norm=row_norm)


def scatter_cnn(
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: int = 32,
    width: int = 64,
    num_maps: int = 64,
    group_norm: bool = False,
) -> ScatterNet:
    """Wavelet scattering under a small net: ``num_maps`` whitened maps, to be fitted, or all in groups."""
    extractor = (
        GroupedScatterMaps(image_size=image_size, in_channels=in_channels)
        if group_norm
        else ScatterMaps(image_size=image_size, in_channels=in_channels, num_maps=num_maps)
    )
    return ScatterNet(extractor, num_classes=num_classes, width=width)


class _Shared(TypedDict):
    """What two kinds of features have in common."""

    image_size: int
    in_channels: int
    num_directions: int
    mirror: bool


def patches_scatter(
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: int = 32,
    num_patches: int = 256,
    num_directions: int = 2500,
    mirror: bool = True,
    row_norm: float = 1.0,
) -> FeatureClassifier:
    """One layer of patch features beside wavelet scattering, to be fitted by ``extractor.fit()``."""
    shared = _Shared(
        image_size=image_size, in_channels=in_channels, num_directions=num_directions, mirror=mirror
    )
    extractor = CombinedFeatures(
        [PatchFeatures(num_layers=1, num_patches=num_patches, **shared), ScatterFeatures(**shared)]
    )
    return FeatureClassifier(extractor, num_classes=num_classes, row_norm=row_norm)


def wide(
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: int = 32,
    num_patches: int = 1024,
    coarse_patches: int = 0,
    num_directions: int = 2500,
    patch_directions: int = 0,
    mirror: bool = True,
    low_precision: bool = True,
    aligned: bool = False,
    row_norm: float = 3.0,
) -> FeatureClassifier:
    """Wide banks of patches of the image and of its half, beside wavelet scattering.

    ``patch_directions`` of the banks' rows are kept; 0: as many as of scattering, ``num_directions``.
    ``aligned``: rows are whitened by what other views of generated images change, too.
    """
    shared = _Shared(
        image_size=image_size, in_channels=in_channels, num_directions=num_directions, mirror=mirror
    )
    of_banks: _Shared = {**shared, "num_directions": patch_directions or num_directions}
    banks = [
        WidePatchFeatures(
            num_patches=count, shrink=shrink, low_precision=low_precision, aligned=aligned, **of_banks
        )
        for count, shrink in ((num_patches, 1), (coarse_patches, 2))
        if count
    ]
    extractor = CombinedFeatures([*banks, ScatterFeatures(aligned=aligned, **shared)])
    return FeatureClassifier(extractor, num_classes=num_classes, row_norm=row_norm)


def lite_features(
    *,
    num_classes: int,
    in_channels: int = 3,
    networks: str = "lite0",
    input_size: int = 224,
    mirror: bool = True,
    square_root: bool = True,
    low_precision: bool = False,
    pretrained: bool = True,
    row_norm: float = 1.0,
) -> FeatureClassifier:
    """EfficientNet-Lites under a head: ``networks`` names one or several, such as "lite0 lite2".

    ``pretrained`` is false only to load a release into it.
    """
    names = [f"efficientnet_{name}" for name in networks.split()]
    if not names or len(names) > len(set(names)) or not set(names) <= set(efficientnet_lite.VARIANTS):
        raise ConfigError(
            "bad-model-option",
            f"networks={networks!r} does not name public networks.",
            fix="Name some of lite0, lite1 and lite2, each once, with spaces between them.",
        )
    extractor = lite_backbone(
        names,
        input_size=input_size,
        mirror=mirror,
        square_root=square_root,
        low_precision=low_precision,
        pretrained=pretrained,
    )
    return FeatureClassifier(extractor, num_classes=num_classes, row_norm=row_norm)


def lite_backbone(
    names: Sequence[str] = ("efficientnet_lite0",),
    *,
    input_size: int = 224,
    mirror: bool = True,
    square_root: bool = True,
    low_precision: bool = False,
    pretrained: bool = True,
) -> BackboneFeatures:
    """EfficientNet-Lites with their public ImageNet weights, batch norms folded into the convolutions."""
    networks, num_features = [], 0
    for name in names:
        network = efficientnet_lite.VARIANTS[name].build(num_classes=1, pretrained=pretrained)
        assert isinstance(network, efficientnet_lite.EfficientNetLite)
        network.trunk = folded(network.trunk)
        expected, num_features = network.preprocessing, num_features + network.head.in_features
        network.add_module("head", nn.Identity())  # its place is taken by the private head
        networks.append(network.to(memory_format=channels_last))  # type: ignore[call-overload]
    return BackboneFeatures(
        networks,
        num_features=num_features,
        input_size=input_size,
        mean=expected.mean,
        std=expected.std,
        mirror=mirror,
        square_root=square_root,
        low_precision=low_precision,
    )


VARIANTS = {
    "patches": Variant(
        build=patches, summary="patch features fitted on generated images, frozen; linear head"
    ),
    "scatter": Variant(
        build=scatter, summary="wavelet scattering whitened on generated images, frozen; linear head"
    ),
    "scatter_cnn": Variant(
        build=scatter_cnn,
        summary="wavelet scattering whitened on generated images, frozen; a net of three layers",
    ),
    "patches_scatter": Variant(
        build=patches_scatter,
        summary="patch features beside wavelet scattering, frozen; linear head",
    ),
    "wide_patches_scatter": Variant(
        build=wide,
        summary="wide banks of patches beside wavelet scattering, frozen; linear head",
    ),
    "efficientnet_lite0_features": Variant(
        build=lite_features, summary="EfficientNet-Lite0 of ImageNet, frozen; linear head", input_size=224
    ),
    "efficientnet_lite_features": Variant(
        build=lite_features,
        summary="EfficientNet-Lite0, 1 and 2 of ImageNet side by side, frozen; linear head",
        settings={"networks": "lite0 lite1 lite2", "mirror": False},
        input_size=224,
    ),
}
