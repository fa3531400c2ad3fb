"""``sfumato doctor``: what would void the guarantee, before any budget is spent."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from sfumato.cli import echo_json

if TYPE_CHECKING:
    from sfumato.data import DataSplits
    from sfumato.doctor import Finding
    from sfumato.recipes.recipe import Recipe


@click.command("doctor")
@click.option("--model", "model_name", help="A model of the zoo to probe.")
@click.option("--data", "data_name", help="A data set to examine: a folder or a known name.")
@click.option("--unit", type=click.Choice(["image", "patient"]), default="image", show_default=True)
@click.option("--patient-from", help="Regular expression that finds the patient in a file name.")
@click.option("--image-size", type=int, help="Side of the images for the model; the data's own otherwise.")
@click.option("--recipe", "recipe_name", help="Examine a recipe: plan, data, and the model that it builds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model_name: str | None,
    data_name: str | None,
    unit: str,
    patient_from: str | None,
    image_size: int | None,
    recipe_name: str | None,
    as_json: bool,
) -> None:
    """Find what would void or weaken the guarantee. Exits with 1 if something voids it."""
    from sfumato.doctor import examine_data, examine_surroundings

    findings: list[Finding] = list(examine_surroundings())
    recipe = _recipe(
        recipe_name,
        {
            "data.name": data_name,
            "data.image_size": image_size,
            "data.patient_from": patient_from,
            "model.name": model_name,
            "privacy.unit": unit if recipe_name is None else None,
        },
    )
    splits, settings = None, recipe.data
    if settings.name is not None:
        from sfumato.run.prepare import load_splits

        splits = load_splits(settings)
        findings += examine_data(
            splits,
            unit=recipe.privacy.unit,
            mean=settings.mean,
            std=settings.std,
            holdout=settings.holdout,
        )
    if recipe_name is not None and splits is not None and recipe.privacy.enabled:
        findings += _plan_findings(recipe, splits)
    if recipe_name is not None or model_name is not None:
        findings += _model_findings(recipe, splits)
    _report(findings, as_json, nothing_asked=(recipe_name, model_name, data_name) == (None, None, None))


def _recipe(name: str | None, changes: dict[str, object]) -> Recipe:
    """The recipe, or the defaults, with what the command line says."""
    from sfumato.recipes.recipe import Recipe, load_recipe, with_settings

    recipe = Recipe() if name is None else load_recipe(name)
    return with_settings(recipe, {key: value for key, value in changes.items() if value is not None})


def _plan_findings(recipe: Recipe, splits: DataSplits) -> list[Finding]:
    from sfumato.doctor import examine_plan
    from sfumato.run.planning import build_plan
    from sfumato.run.prepare import group_units

    units = group_units(recipe, splits.train)
    plan = build_plan(recipe, num_units=len(units), force=True)
    return examine_plan(plan) if plan is not None else []


def _model_findings(recipe: Recipe, splits: DataSplits | None) -> list[Finding]:
    """The network is built as a run builds it: options, channels, first weights, trained parts."""
    from sfumato.doctor import Finding, check_forward
    from sfumato.errors import ModelError, PrivacyError
    from sfumato.randomness import SecureSource
    from sfumato.run import prepare as preparation

    splits = splits or _blank_images(recipe)
    device = preparation.choose_device(recipe.performance.device)
    num_units = len(preparation.group_units(recipe, splits.train))
    try:
        recipe, checkpoint, _ = preparation.settle_beginning(
            recipe, splits, num_units=num_units, pretrained=None, own_model=False
        )
        network = preparation.first_network(
            recipe, splits.train, SecureSource(), checkpoint=checkpoint, device=device
        )
        shape, num_classes = tuple(splits.train.images.shape[1:]), len(splits.train.classes)
        check_forward(network, shape, num_classes=num_classes)
        max_rows = recipe.performance.microbatch_size or preparation.fitting_rows(
            network, splits.train, device
        )
        return preparation.examine_network(network, splits.train, max_rows=max_rows)
    except (PrivacyError, ModelError) as error:
        return [Finding(severity="void", code=error.code, what=error.what, cure=error.fix)]


def _blank_images(recipe: Recipe) -> DataSplits:
    """Stands in where no data are named: the recipe's channels and size, ten classes."""
    import torch

    from sfumato.data import DataSplits, ImageSet

    size, channels = recipe.data.image_size or 32, recipe.data.channels or 3
    labels, classes = torch.arange(10), tuple(map(str, range(10)))
    images = torch.zeros(10, channels, size, size, dtype=torch.uint8)
    return DataSplits(train=ImageSet(images, labels, classes, labels, "blank"), val=None, test=None)


def _report(findings: list[Finding], as_json: bool, *, nothing_asked: bool) -> None:
    void = any(finding.severity == "void" for finding in findings)
    if as_json:
        echo_json({"sound": not void, "findings": [finding.as_dict() for finding in findings]})
    else:
        for finding in sorted(findings, key=lambda one: ("void", "weak", "note").index(one.severity)):
            click.echo(f"{finding.severity:<5} {finding.code}: {finding.what}\n      {finding.cure}")
        if nothing_asked:
            click.echo("Give --data, --model or --recipe to examine more than the surroundings.")
        elif not findings:
            click.echo("Nothing found that would void or weaken the guarantee.")
    if void:
        sys.exit(1)
