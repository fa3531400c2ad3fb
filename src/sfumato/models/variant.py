"""One row of a family's table: a name, how it is built, and where it comes from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

# What a variant's builder takes beside the options of its family.
_UNIVERSAL = ("num_classes", "in_channels")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A named member of a family: ``build(num_classes=…, in_channels=…, **settings)``.

    ``settings`` are the options that the name stands for; everything else keeps the family's default.
    """

    build: Callable[..., nn.Module]
    summary: str
    papers: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    input_size: int = 32
    num_classes: int = 10  # of the paper's main experiment: used where a size is listed

    def options(self) -> dict[str, object]:
        """Each option of the family with the value that this variant gives it."""
        parameters = inspect.signature(self.build).parameters
        defaults = {name: p.default for name, p in parameters.items() if name not in _UNIVERSAL}
        return {**defaults, **self.settings}


def with_scale_norm(variants: Mapping[str, Variant]) -> dict[str, Variant]:
    """The variants, and beside each its ``scale_`` form: the same with ScaleNorm after every addition."""
    doubled = dict(variants)
    for name, variant in variants.items():
        doubled[f"scale_{name}"] = Variant(
            build=variant.build,
            summary=f"{variant.summary}; ScaleNorm after every addition",
            papers=tuple(dict.fromkeys((*variant.papers, "scalenorm2022"))),
            settings={**variant.settings, "scale_norm": True},
            input_size=variant.input_size,
            num_classes=variant.num_classes,
        )
    return doubled
