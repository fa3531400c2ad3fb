"""The options of ``sfumato train`` for backbones of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from sfumato.errors import ConfigError

_META = "sfumato.backbone"
_FEATURES, _FINETUNE = "fast/pretrained", "finetune/efficientnet-lite0"  # recipes with settings for each


def _keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    ctx.meta.setdefault(_META, {})[parameter.name] = value
    return value


def backbone_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; ``backbone_settings`` reads them, so that the command needs no arguments for them."""
    options = [
        click.option(
            "--backbone",
            metavar="LIBRARY:NAME",
            expose_value=False,
            callback=_keep,
            help="timm:NAME, torchvision:NAME or hf:NAME, instead of a model of the zoo.",
        ),
        click.option(
            "--backbone-weights",
            metavar="FILE",
            expose_value=False,
            callback=_keep,
            help="Its weights: a .safetensors file.",
        ),
        click.option(
            "--backbone-provenance",
            type=click.Choice(["public", "unknown"]),
            expose_value=False,
            callback=_keep,
            help="Were any of your images in its training data? public: none were.",
        ),
        click.option(
            "--backbone-sha256",
            metavar="HEX",
            expose_value=False,
            callback=_keep,
            help="Checksum of the file; a .pth is opened only with it.",
        ),
        click.option(
            "--backbone-licence",
            metavar="TEXT",
            expose_value=False,
            callback=_keep,
            help="Licence of the weights, for the release.",
        ),
        click.option(
            "--finetune",
            is_flag=True,
            expose_value=False,
            callback=_keep,
            help="Train its norms and biases too, not only a head on fixed features.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def backbone_settings(recipe_name: str | None) -> tuple[str | None, dict[str, Any], tuple[str, ...]]:
    """Recipe, flags and assignments that the options stand for."""
    from pathlib import Path

    given = click.get_current_context().meta.get(_META, {})
    network, weights, answer = (given.get(f"backbone{end}") for end in ("", "_weights", "_provenance"))
    if network is None:
        lost = [name for name, value in given.items() if value]
        if lost:
            raise ConfigError(
                "bad-backbone",
                f"--{lost[0].replace('_', '-')} is given, but no --backbone.",
                fix="Name the network: --backbone timm:NAME, torchvision:NAME or hf:NAME.",
            )
        return recipe_name, {}, ()
    if weights is None:
        raise ConfigError(
            "no-backbone-weights",
            f"--backbone {network} has no weights.",
            why="Nothing is downloaded, and random features are of no use.",
            fix="Give the file: --backbone-weights FILE.safetensors",
        )
    if answer is None:
        raise ConfigError(
            "no-provenance",
            f"--backbone {network}: were any of your images in its training data?",
            why="Weights remember the images they were trained on, and ε does not cover that.",
            fix="Answer it: --backbone-provenance public if none were, else unknown.",
        )
    path = Path(weights).expanduser()
    flags = {
        "model.name": "backbone" if given["finetune"] else "backbone_features",
        "model.weights": str(path.resolve() if path.exists() else path),
        "model.weights_are_public": answer == "public",
        "model.weights_sha256": given["backbone_sha256"],
        "model.weights_licence": given["backbone_licence"],
    }
    recipe_name = recipe_name or (_FINETUNE if given["finetune"] else _FEATURES)
    kept = {key: value for key, value in flags.items() if value is not None}
    return recipe_name, kept, (f'model.options.network="{network}"',)
