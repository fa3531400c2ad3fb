"""``sfumato models``: the zoo as a table, and one model layer by layer."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sfumato.models import ModelSummary


@click.group(name="models")
def command() -> None:
    """List the model zoo, or show one model layer by layer."""


@command.command(name="list")
@click.argument("pattern", default="*")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def list_command(pattern: str, as_json: bool) -> None:
    """Name, parameters, multiply-adds, input size and papers of the models that match PATTERN ("scale_*")."""
    from sfumato.cli import echo_json
    from sfumato.models import list_feature_heads, list_models

    networks = [_row(name) for name in list_models(pattern)]
    heads = [_row(name) for name in list_feature_heads(pattern)]
    if as_json:
        echo_json([*networks, *heads])
        return
    if networks:
        table = [["model", "parameters", "multiply-adds", "input", "classes", "papers"]]
        for row in networks:
            sizes = [f"{row['num_parameters']:,}", _short(row["multiply_adds"]), str(row["input_size"])]
            table.append([row["name"], *sizes, str(row["num_classes"]), ", ".join(row["papers"])])
        _echo_table(table, right=(1, 2, 3, 4))
    if heads:
        click.echo(("\n" if networks else "") + "Heads on fixed features, for the recipes fast/*:")
        _echo_table([[row["name"], row["summary"]] for row in heads], right=())
    if not networks and not heads:
        click.echo(f"No model matches {pattern!r}; sfumato models list shows all.", err=True)


def _row(name: str) -> dict[str, Any]:
    """What is listed of a model; the size of a head on features depends on its options, and is left out."""
    from sfumato.models import find_variant
    from sfumato.models.sizes import SIZES

    variant = find_variant(name)
    parameters, multiply_adds = SIZES.get(name, (None, None))
    return {
        "name": name,
        "num_parameters": parameters,
        "multiply_adds": multiply_adds,
        "input_size": variant.input_size,
        "num_classes": variant.num_classes,
        "papers": list(variant.papers),
        "summary": variant.summary,
        "fixed_features": name not in SIZES,
    }


@command.command(name="show")
@click.argument("name")
@click.option("--num-classes", type=click.IntRange(min=1), help="Number of classes; the paper's by default.")
@click.option("--channels", type=click.IntRange(min=1), default=3, show_default=True, help="Of the image.")
@click.option("--image-size", type=click.IntRange(min=1), help="Side of the image; the paper's by default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def show_command(
    name: str, num_classes: int | None, channels: int, image_size: int | None, as_json: bool
) -> None:
    """Paper, layout, options and a table of the layers of the model NAME."""
    import inspect
    import sys

    from sfumato.cli import echo_json
    from sfumato.models import find_variant

    variant = find_variant(name)
    size = image_size or variant.input_size
    classes = num_classes or variant.num_classes
    summary = _summary(name, num_classes=classes, shape=(channels, size, size))
    if as_json:
        about = {"name": name, "summary": variant.summary, "papers": variant.papers, "num_classes": classes}
        echo_json({**about, "options": variant.options(), **asdict(summary)})
        return
    family = sys.modules[variant.build.__module__]
    click.echo(f"{name}: {variant.summary}\n\n{inspect.getdoc(family)}\n")
    click.echo("Options: " + ", ".join(f"{key}={value!r}" for key, value in variant.options().items()))
    click.echo(f"Input {channels} x {size} x {size}, {classes} classes\n")
    table = [["layer", "kind", "output", "parameters", "multiply-adds"]]
    for layer in summary.layers:
        counts = [f"{layer.num_parameters:,}" if layer.num_parameters else "", _short(layer.multiply_adds)]
        table.append([layer.name, layer.kind, " x ".join(map(str, layer.output_shape)), *counts])
    table.append(["total", "", "", f"{summary.num_parameters:,}", _short(summary.multiply_adds)])
    _echo_table(table, right=(3, 4))


def _summary(name: str, *, num_classes: int, shape: tuple[int, int, int]) -> ModelSummary:
    """Counted on the meta device where that can be: no weights are drawn and nothing is computed."""
    import torch

    from sfumato.doctor import check_forward
    from sfumato.models import create_model, summarise

    try:
        with torch.device("meta"):
            return summarise(create_model(name, num_classes=num_classes, in_channels=shape[0]), shape)
    except RuntimeError:  # frozen features use operations that only a real device has
        model = create_model(name, num_classes=num_classes, in_channels=shape[0])
        check_forward(model, shape)
        return summarise(model, shape)


def _short(count: int) -> str:
    """1.23 G, 45.6 M, 789 k: three figures are enough to compare."""
    for unit, factor in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return str(count) if count else ""


def _echo_table(rows: list[list[str]], *, right: tuple[int, ...]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())
