"""The settings of the network and of the weights that it begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sfumato.recipes.settings import Scalar, options_table, setting


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """[model]: the network, by its name in the zoo."""

    name: str = setting("resnet9", "one of `sfumato models list`")
    weights: str | None = setting(None, "begin with these: a run, a release or a .safetensors file of ours")
    weights_are_public: bool = setting(False, "none of the private images went into the weights")
    weights_sha256: str | None = setting(None, "of a backbone's file: it must have this checksum")
    weights_licence: str | None = setting(
        None, "of a backbone's weights, if neither library nor card says it"
    )
    trained: Literal["all", "last", "norms-and-biases", "first-and-last"] = setting(
        "all", "the layers that are trained; the others stay as they are"
    )
    options: Mapping[str, Scalar] = options_table("options of the model's family, e.g. width")
