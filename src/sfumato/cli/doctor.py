"""``sfumato doctor``: what would void the guarantee, before any budget is spent."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from sfumato.cli import Window, echo_json, split_names
from sfumato.release.escaping import one_line

if TYPE_CHECKING:
    from sfumato.data import DataSplits
    from sfumato.doctor import Finding
    from sfumato.recipes.recipe import DataSettings, Recipe


@click.command("doctor")
@click.option("--model", "model_name", help="A model of the zoo to probe.")
@click.option("--data", "data_name", help="A data set to examine: a folder or a known name.")
@click.option("--unit", type=click.Choice(["image", "patient"]), default="image", show_default=True)
@click.option(
    "--patient-from", metavar="REGEX", help="Finds the patient in each file's path; dicom: in its header."
)
@click.option(
    "--window", type=Window(), help="Grey values to show, for all images; else each DICOM file's own."
)
@click.option("--findings", metavar="A,B", help="Any number per image: the manifest's findings, in order.")
@click.option(
    "--image-size",
    type=int,
    help="Pixels per side; by default 64 for a folder, a known set's own, 32 without data.",
)
@click.option("--recipe", "recipe_name", help="Examine a recipe: plan, data, and the model that it builds.")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="Change any setting.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model_name: str | None,
    data_name: str | None,
    unit: str,
    patient_from: str | None,
    findings: str | None,
    window: tuple[float, float] | None,
    image_size: int | None,
    recipe_name: str | None,
    assignments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Find what would void or weaken the guarantee. Exits with 1 if something voids it."""
    from sfumato.doctor import examine_data, examine_surroundings

    found: list[Finding] = list(examine_surroundings())
    recipe = _recipe(
        recipe_name,
        {
            "data.name": data_name,
            "data.image_size": image_size,
            "data.patient_from": patient_from,
            "data.findings": split_names(findings),
            "data.window": window,
            "model.name": model_name,
            "privacy.unit": unit if recipe_name is None else None,
        },
        assignments,
    )
    splits, settings = None, recipe.data
    if settings.name is not None:
        splits = _load(settings, quiet=as_json)
        found += examine_data(
            splits,
            unit=recipe.privacy.unit,
            mean=settings.mean,
            std=settings.std,
            holdout=settings.holdout,
        )
    if recipe_name is not None or model_name is not None:
        planned = recipe_name is not None and splits is not None
        found += _run_findings(recipe if planned else _one_step(recipe), splits, planned=planned)
    nothing_asked = recipe_name is None and model_name is None and settings.name is None
    _report(found, splits, as_json, nothing_asked=nothing_asked)


def _load(settings: DataSettings, *, quiet: bool) -> DataSplits:
    """The data, with a line on how far listing and reading them is."""
    from sfumato.cli.progress import make_progress
    from sfumato.run.progress import listing_counter, reading_counter
    from sfumato.run.resolve import load_splits

    progress = make_progress(quiet=quiet)
    try:
        return load_splits(
            settings, on_progress=reading_counter(progress), on_listing=listing_counter(progress)
        )
    finally:
        progress.close()


def _recipe(name: str | None, flags: dict[str, object], assignments: tuple[str, ...]) -> Recipe:
    """The recipe, or the defaults, then flags that were given, then ``--set``."""
    from sfumato.recipes.recipe import Recipe, load_recipe, parse_assignment, with_settings

    recipe = Recipe() if name is None else load_recipe(name)
    given = {key: value for key, value in flags.items() if value is not None}
    return with_settings(recipe, given | dict(parse_assignment(text) for text in assignments))


def _one_step(recipe: Recipe) -> Recipe:
    """The recipe with a budget that suits any data: without data there is no plan, but a network."""
    from sfumato.recipes.recipe import with_settings

    absent = ("privacy.epsilon", "privacy.delta", "training.num_epochs", "training.batch_size")
    given = {"privacy.noise_multiplier": 1.0, "training.num_steps": 1, "schedule.name": "constant"}
    given |= {"training.early_stopping": 0}
    return with_settings(recipe, {**dict.fromkeys(absent), **given})


def _run_findings(recipe: Recipe, splits: DataSplits | None, *, planned: bool) -> list[Finding]:
    """The run is resolved and its network built as for training: options, channels, first weights, trained
    parts. ``planned``: its plan is examined too."""
    from sfumato.doctor import Finding, check_forward, examine_plan, examine_precision
    from sfumato.errors import ModelError, PrivacyError
    from sfumato.models.fixed_features import FeatureClassifier
    from sfumato.randomness import SecureSource
    from sfumato.run import prepare as preparation
    from sfumato.run.first_network import build_network
    from sfumato.run.resolve import resolve

    splits = splits or _blank_images(recipe)
    device, train = preparation.choose_device(recipe.performance.device), splits.train
    findings: list[Finding] = []
    try:
        resolved, checkpoint = resolve(recipe, splits, force=True)
        if planned and resolved.plan is not None:
            findings += examine_plan(resolved.plan)
        network = build_network(resolved.recipe, train, SecureSource(), checkpoint=checkpoint, device=device)
        in_passes = recipe.privacy.enabled and not isinstance(network, FeatureClassifier)
        if in_passes and recipe.performance.precision == "bfloat16":
            findings += examine_precision(device)
        check_forward(network, tuple(train.images.shape[1:]), num_classes=len(train.classes))
        max_rows = recipe.performance.microbatch_size or preparation.fitting_rows(network, train, device)
        return findings + preparation.examine_network(network, train, max_rows=max_rows)
    except (PrivacyError, ModelError) as error:
        return [*findings, Finding(severity="void", code=error.code, what=error.what, cure=error.fix)]


def _blank_images(recipe: Recipe) -> DataSplits:
    """Images for a recipe that names no data: its channels, size and classes, or ten of these."""
    import torch

    from sfumato.data import DataSplits, ImageSet

    size, channels = recipe.data.image_size or 32, recipe.data.channels or 3
    classes = recipe.data.classes or tuple(map(str, range(10)))
    labels = torch.arange(len(classes))
    images = torch.zeros(len(classes), channels, size, size, dtype=torch.uint8)
    return DataSplits(train=ImageSet(images, labels, classes, labels, "blank"), val=None, test=None)


def _report(
    findings: list[Finding], splits: DataSplits | None, as_json: bool, *, nothing_asked: bool
) -> None:
    from sfumato.doctor.summary import as_lines, summarise

    summary = None if splits is None else summarise(splits)
    notes = () if splits is None else splits.notes
    void = any(finding.severity == "void" for finding in findings)
    if as_json:
        shown = [finding.as_dict() for finding in findings]
        echo_json({"sound": not void, "findings": shown, "notes": list(notes), "summary": summary})
    else:
        for line in [] if summary is None else [*as_lines(summary), ""]:
            click.echo(one_line(line))
        for finding in sorted(findings, key=lambda one: ("void", "weak", "note").index(one.severity)):
            click.echo(
                f"{finding.severity:<5} {finding.code}{finding.mark}: {finding.what}\n      {finding.cure}"
            )
        for note in notes:
            click.echo(f"note  {note}")
        if nothing_asked:
            click.echo("Give --data, --model or --recipe to examine more than the surroundings.")
        elif not findings:
            click.echo("Nothing found that would void or weaken the guarantee.")
    if void:
        sys.exit(1)
