"""Models of the zoo whose features are fixed: only a linear head on them is trained.

They take images from 0 to 1, or rows of features computed before, since a run computes them only once.
"""

from __future__ import annotations

from torch import Tensor, nn, zeros
from torch.nn import functional as F

from sfumato.features.combined import CombinedFeatures
from sfumato.features.patch_features import PatchFeatures
from sfumato.features.scatter_features import ScatterFeatures
from sfumato.models.classifier import Classifier
from sfumato.models.variant import Variant


class FeatureClassifier(Classifier):
    """Frozen features, minus a centre, at unit norm, under a linear head.

    ``centre`` is zero until a run releases the private mean into it, as an event of its own.
    """

    def __init__(self, extractor: nn.Module, *, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.extractor = extractor.requires_grad_(False)
        self.register_buffer("centre", zeros(num_features))
        self.head = nn.Linear(num_features, num_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def features(self, x: Tensor) -> Tensor:
        rows = self.extractor(x) if x.ndim == 4 else x
        return F.normalize(rows - self.centre, dim=1)


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
    )
    return FeatureClassifier(extractor, num_features=extractor.num_features, num_classes=num_classes)


def scatter(
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: int = 32,
    num_directions: int = 2500,
    grid: int = 4,
    spread: float = 0.5,
) -> FeatureClassifier:
    """Wavelet scattering, whitened on generated images by ``extractor.fit()``."""
    extractor = ScatterFeatures(
        image_size=image_size,
        in_channels=in_channels,
        num_directions=num_directions,
        grid=grid,
        spread=spread,
    )
    return FeatureClassifier(extractor, num_features=extractor.num_features, num_classes=num_classes)


def patches_scatter(
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: int = 32,
    num_patches: int = 256,
    num_directions: int = 2500,
) -> FeatureClassifier:
    """One layer of patch features beside wavelet scattering, to be fitted by ``extractor.fit()``."""
    shape = {"image_size": image_size, "in_channels": in_channels, "num_directions": num_directions}
    extractor = CombinedFeatures(
        [PatchFeatures(num_layers=1, num_patches=num_patches, **shape), ScatterFeatures(**shape)]
    )
    return FeatureClassifier(extractor, num_features=extractor.num_features, num_classes=num_classes)


def lite0_features(
    *,
    num_classes: int,
    in_channels: int = 3,
    input_size: int = 224,
    mirror: bool = True,
    square_root: bool = True,
    low_precision: bool = False,
    pretrained: bool = True,
) -> FeatureClassifier:
    """EfficientNet-Lite0's features under a head; ``pretrained`` false only to load a release into it."""
    from sfumato.features.backbone import lite0_backbone  # here: the backbone is itself a model of the zoo

    extractor = lite0_backbone(
        input_size=input_size,
        mirror=mirror,
        square_root=square_root,
        low_precision=low_precision,
        pretrained=pretrained,
    )
    return FeatureClassifier(extractor, num_features=extractor.num_features, num_classes=num_classes)


VARIANTS = {
    "patches": Variant(
        build=patches, summary="patch features fitted on generated images, frozen; linear head"
    ),
    "scatter": Variant(
        build=scatter, summary="wavelet scattering whitened on generated images, frozen; linear head"
    ),
    "patches_scatter": Variant(
        build=patches_scatter,
        summary="patch features beside wavelet scattering, frozen; linear head",
    ),
    "efficientnet_lite0_features": Variant(
        build=lite0_features, summary="EfficientNet-Lite0 of ImageNet, frozen; linear head", input_size=224
    ),
}
