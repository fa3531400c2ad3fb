"""Networks of timm, torchvision and transformers with public weights, as fixed features or to be fine-tuned.

``backbone_features`` computes rows with the frozen network once and trains a linear head on them;
``backbone`` is the whole network. Both have the batch norms' statistics as constants, so that no example sees
another. Weights come from a local file (``sfumato.run.backbones``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from sfumato.errors import ConfigError, ModelError
from sfumato.features.backbone import BackboneFeatures
from sfumato.models.classifier import Classifier
from sfumato.models.efficientnet_lite import Preprocessing
from sfumato.models.fixed_features import FeatureClassifier
from sfumato.models.libraries import build_trunk, describe, description_of, load_weights, split_name
from sfumato.models.private_ready import make_private_ready
from sfumato.models.variant import Variant

FEATURES, WHOLE = "backbone_features", "backbone"


class BackboneClassifier(Classifier):
    """A network of another library under a new head: images resized to ``input_size``, grey ones tripled."""

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int = 3,
        network: str = "",
        recorded: str = "",
        input_size: int = 0,
    ) -> None:
        super().__init__()
        _check_channels(in_channels)
        description = description_of(recorded) if recorded else describe(network)
        self.input_size = input_size or description.input_size
        self.preprocessing = Preprocessing(
            mean=description.mean, std=description.std, input_size=self.input_size, crop=1.0
        )
        trunk, width = build_trunk(network, description)
        self.network = private_trunk(trunk)
        self.head = nn.Linear(width, num_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def features(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.input_size:
            size = (self.input_size, self.input_size)
            x = interpolate(x, size=size, mode="bicubic", align_corners=False, antialias=True)
        return self.network.features(x.expand(-1, 3, -1, -1))  # type: ignore[operator]


def backbone_features(
    *,
    num_classes: int,
    in_channels: int = 3,
    network: str = "",
    recorded: str = "",
    input_size: int = 0,
    mirror: bool = True,
    square_root: bool = True,
    low_precision: bool = False,
) -> FeatureClassifier:
    """A frozen network of another library under a linear head."""
    _check_channels(in_channels)
    description = description_of(recorded) if recorded else describe(network)
    trunk, width = build_trunk(network, description)
    extractor = BackboneFeatures(
        private_trunk(trunk),
        num_features=width,
        input_size=input_size or description.input_size,
        mean=description.mean,
        std=description.std,
        mirror=mirror,
        square_root=square_root,
        low_precision=low_precision,
    )
    extractor.described |= {"network": network, "recorded": description.recorded()}
    return FeatureClassifier(extractor, num_classes=num_classes)


def private_trunk(trunk: nn.Module) -> nn.Module:
    """The trunk with the batch norms' statistics as constants: it computes what it did in evaluation mode."""
    return make_private_ready(trunk, batch_norm="frozen")[0]


@torch.no_grad()
def load_trunk(model: nn.Module, weights: Mapping[str, Tensor], *, network: str, recorded: str) -> None:
    """Put a published file of weights into a model of this family, in place.

    Guarantee: every parameter and buffer of the trunk comes from the file; what the file has beside is its
    last layer and nothing else. ModelError otherwise.
    """
    trunk, _ = build_trunk(network, description_of(recorded) if recorded else describe(network))
    trunk, wrong = load_weights(trunk, weights)
    if wrong:
        raise ModelError(
            "weights-do-not-fit",
            f"the weights are not those of {network[:80]}: {'; '.join(wrong[:3])}"
            + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""),
            why="A layer that the file does not have would keep random weights.",
            fix="Give the file that belongs to this name, or the name that belongs to this file.",
        )
    place = model.get_submodule("extractor.networks.0" if isinstance(model, FeatureClassifier) else "network")
    place.load_state_dict(copy.deepcopy(private_trunk(trunk).state_dict()))


def _check_channels(in_channels: int) -> None:
    if in_channels not in (1, 3):
        raise ConfigError(
            "bad-model-size",
            f"a backbone takes images of 1 or 3 channels, not {in_channels}.",
            fix="Set data.channels to 1 or 3.",
        )


def is_backbone(name: str) -> bool:
    """Whether a model of this name is a network of another library."""
    return name in VARIANTS


def check_network(network: object) -> str:
    """The option ``network`` of a model of this family: a library and a name."""
    text = network if isinstance(network, str) else ""
    split_name(text)
    return text


VARIANTS = {
    FEATURES: Variant(
        build=backbone_features,
        summary="a network of timm, torchvision or transformers, frozen; linear head",
        input_size=224,
    ),
    WHOLE: Variant(
        build=BackboneClassifier,
        summary="a network of timm, torchvision or transformers, to be fine-tuned",
        input_size=224,
    ),
}
