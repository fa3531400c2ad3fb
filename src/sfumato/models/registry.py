"""Models by name: the one table of all families."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from sfumato.errors import ConfigError, did_you_mean
from sfumato.models import (
    densenet,
    efficientnet,
    efficientnet_lite,
    fixed_features,
    lenet,
    nf_resnet,
    nfnet,
    resnet,
    resnet9,
    smoothnet,
    wrn,
)
from sfumato.models.options import checked_value
from sfumato.models.variant import Variant

_FAMILIES = (
    resnet9,
    wrn,
    smoothnet,
    resnet,
    densenet,
    efficientnet,
    efficientnet_lite,
    nf_resnet,
    nfnet,
    lenet,
)
VARIANTS: dict[str, Variant] = {name: v for family in _FAMILIES for name, v in family.VARIANTS.items()}


def list_models(pattern: str = "*") -> list[str]:
    """Names of the zoo that match a shell wildcard: ``list_models("scale_*")``. Sorted."""
    return sorted(name for name in VARIANTS if fnmatchcase(name, pattern))


def find_variant(name: str) -> Variant:
    """The row of the table for this name; ``wrn_DEPTH_WIDTH`` is understood for any depth and width.

    Heads on fixed features ("patches", "scatter", …) are found too; they are no networks to list beside
    the others, and belong to the recipes fast/*.
    """
    variant = VARIANTS.get(name) or wrn.variant_of(name) or fixed_features.VARIANTS.get(name)
    if variant is None:
        raise ConfigError(
            "unknown-model",
            f"{name!r} is not a model. {did_you_mean(name, tuple(VARIANTS))}".rstrip(),
            fix="See sfumato models list.",
        )
    return variant


def create_model(name: str, *, num_classes: int, in_channels: int = 3, **options: object) -> nn.Module:
    """Build a model of the zoo with fresh weights.

    ``options`` are those of the model's family (``sfumato models show NAME`` lists them); each is checked
    against the family's signature, and a name that is not there is an error.
    """
    variant = find_variant(name)
    known = variant.options()
    for option in options:
        if option not in known:
            raise ConfigError(
                "unknown-model-option",
                f"{name} has no option {option!r}. {did_you_mean(option, tuple(known))}".rstrip(),
                fix=f"Its options are {', '.join(known)}.",
            )
    chosen = {option: checked_value(option, value, known[option]) for option, value in options.items()}
    if num_classes < 1 or in_channels < 1:
        raise ConfigError(
            "bad-model-size",
            f"{name} with num_classes={num_classes} and in_channels={in_channels} cannot be built.",
            fix="Both must be at least 1.",
        )
    return variant.build(num_classes=num_classes, in_channels=in_channels, **{**variant.settings, **chosen})
