"""Models by name: the one table of all families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from sfumato.errors import ConfigError, did_you_mean
from sfumato.gradients.memory import free_memory
from sfumato.models import (
    backbones,
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


def list_feature_heads(pattern: str = "*") -> list[str]:
    """Names of the heads on fixed features, which a recipe with [features] trains. Sorted."""
    return sorted(name for name in fixed_features.VARIANTS if fnmatchcase(name, pattern))


def find_variant(name: str) -> Variant:
    """The row of the table for this name; ``wrn_DEPTH_WIDTH`` is understood for other sizes too.

    Heads on fixed features ("patches", "scatter", …) are found too; ``list_feature_heads`` lists them apart,
    since they are no networks to train whole, and belong to recipes with [features]. So are the networks of
    other libraries ("backbone", "backbone_features"), which are listed there.
    """
    further = {**fixed_features.VARIANTS, **backbones.VARIANTS}
    variant = VARIANTS.get(name) or wrn.variant_of(name) or further.get(name)
    if variant is None:
        known = (*VARIANTS, *further)
        raise ConfigError(
            "unknown-model",
            f"{name[:80]!r} is not a model. {did_you_mean(name[:80], known)}".rstrip(),
            fix="See sfumato models list.",
        )
    return variant


def create_model(name: str, *, num_classes: int, in_channels: int = 3, **options: object) -> nn.Module:
    """Build a model of the zoo with fresh weights.

    ``options`` are those of the model's family (``sfumato models show NAME`` lists them); each is checked
    against the family's signature, and a name that is not there is an error.
    """
    variant, arguments = _arguments(name, num_classes, in_channels, options)
    _check_memory(name, _draft(variant, arguments))
    model = variant.build(**arguments)
    if "groups" in options and arguments.get("norm", variant.options().get("norm")) == "group":
        groups = arguments["groups"]
        assert isinstance(groups, int)  # as its default is, which checked_value has seen to
        _check_groups(name, model, groups)
    return model


def weight_shapes(
    name: str, *, num_classes: int, in_channels: int = 3, **options: object
) -> dict[str, torch.Size]:
    """The shapes that the model's state would have, found without taking its memory."""
    draft = _draft(*_arguments(name, num_classes, in_channels, options))
    _check_memory(name, draft)
    assert draft is not None  # such a model fits in no memory, and was refused
    return {key: value.shape for key, value in draft.state_dict().items()}


def _arguments(
    name: str, num_classes: int, in_channels: int, options: Mapping[str, object]
) -> tuple[Variant, dict[str, object]]:
    """The variant and all that its builder is given, checked."""
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
    return variant, {"num_classes": num_classes, "in_channels": in_channels, **variant.settings, **chosen}


def _draft(variant: Variant, arguments: Mapping[str, object]) -> nn.Module | None:
    """The model without memory behind its weights; None if not even their sizes can be written down."""
    try:
        with torch.device("meta"):  # shapes only
            return variant.build(**arguments)
    except (RuntimeError, OverflowError):
        return None
    except (IndexError, ValueError, ZeroDivisionError) as error:  # a layer without channels, and the like
        raise ConfigError(
            "bad-model-option", f"these options make no network: {error}.", fix="Use larger ones."
        ) from error
    except TypeError as error:
        if "verflow" not in str(error):  # how torch says that a size is no 64-bit number
            raise
        return None


def _check_memory(name: str, draft: nn.Module | None) -> None:
    """Refuse a model that cannot fit in memory before a byte is taken."""
    needed = math.inf
    if draft is not None:
        needed = sum(value.numel() * value.element_size() for value in draft.state_dict().values())
    free = free_memory(torch.device("cpu"))
    if needed > free:
        size = f"{needed / 2**30:,.1f} GiB" if math.isfinite(needed) else "beyond all sizes"
        raise ConfigError(
            "model-too-large",
            f"{name} with these options would be {size}; {free / 2**30:,.1f} GiB are free.",
            fix="Choose a smaller width, depth or number of classes.",
        )


def _check_groups(name: str, model: nn.Module, groups: int) -> None:
    """Refuse a number of groups that was asked for and that a norm layer could not have."""
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    # more groups than channels: every channel its own, which is what was meant
    other = next((norm for norm in norms if norm.num_groups != min(groups, norm.num_channels)), None)
    if other is not None:
        common = math.gcd(*(module.num_channels for module in norms))
        raise ConfigError(
            "bad-groups",
            f"groups={groups} does not divide the {other.num_channels} channels of a norm layer of {name}.",
            why=f"That layer would silently have {other.num_groups} groups instead.",
            fix=f"Use a divisor of {common}, change the width, or leave groups out.",
        )
