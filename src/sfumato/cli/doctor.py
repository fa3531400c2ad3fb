"""``sfumato doctor``: what would void the guarantee, before any budget is spent."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from sfumato.cli import echo_json

if TYPE_CHECKING:
    from sfumato.doctor import Finding


@click.command("doctor")
@click.option("--model", "model_name", help="A model of the zoo to probe.")
@click.option("--data", "data_name", help="A data set to examine: a folder or a known name.")
@click.option("--unit", type=click.Choice(["image", "patient"]), default="image", show_default=True)
@click.option("--patient-from", help="Regular expression that finds the patient in a file name.")
@click.option("--image-size", type=int, help="Side of the images for the model; the data's own otherwise.")
@click.option("--recipe", "recipe_name", help="Also examine a recipe's plan, normalisation and validation.")
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
    splits, mean, std, holdout = None, None, None, 0.0
    if recipe_name is not None:
        recipe = _recipe(recipe_name)
        data_name = data_name or recipe.data.name
        model_name = model_name or recipe.model.name
        unit, mean, std, holdout = recipe.privacy.unit, recipe.data.mean, recipe.data.std, recipe.data.holdout
        patient_from, image_size = (
            patient_from or recipe.data.patient_from,
            image_size or recipe.data.image_size,
        )
    if data_name is not None:
        from sfumato.data import load_data

        splits = load_data(data_name, image_size=image_size, patient_from=patient_from)
        findings += examine_data(splits, unit=unit, mean=mean, std=std, holdout=holdout)
    if recipe_name is not None and splits is not None and recipe.privacy.enabled:
        findings += _plan_findings(recipe, splits)
    if model_name is not None:
        findings += _model_findings(model_name, splits, image_size)
    _report(findings, as_json, nothing_asked=model_name is None and data_name is None)


def _recipe(name: str):
    from sfumato.recipes.recipe import load_recipe

    return load_recipe(name)


def _plan_findings(recipe, splits) -> list[Finding]:
    from sfumato.doctor import examine_plan
    from sfumato.run.planning import build_plan
    from sfumato.run.prepare import group_units

    units = group_units(recipe, splits.train)
    plan = build_plan(recipe, num_units=len(units), force=True)
    return examine_plan(plan) if plan is not None else []


def _model_findings(name: str, splits, image_size: int | None) -> list[Finding]:
    import torch

    from sfumato.doctor import Finding, check_model
    from sfumato.errors import ModelError, PrivacyError
    from sfumato.models import create_model

    shape = (
        tuple(splits.train.images.shape[1:])
        if splits is not None
        else (3, image_size or 32, image_size or 32)
    )
    num_classes = len(splits.train.classes) if splits is not None else 10
    model = create_model(name, num_classes=num_classes, in_channels=shape[0])
    try:
        return check_model(model, torch.randn(4, *shape))
    except (PrivacyError, ModelError) as error:
        return [Finding(severity="void", code=error.code, what=error.what, cure=error.fix)]


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
