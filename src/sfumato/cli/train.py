"""``sfumato train``: from images to a private model with its guarantee."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sfumato.cli import Window, echo_json, split_names
from sfumato.cli.backbone import backbone_options, backbone_settings
from sfumato.cli.dry_run import check_planned, hardware_options, show_plan
from sfumato.cli.metric_logs import log_options, mirrored
from sfumato.cli.ranks import helped_first_rank
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.recipes.recipe import Recipe
    from sfumato.run.publish import RunResult

NOTHING_SPENT = (
    "Stopped before the first step: nothing was spent, and there is no run to resume. Give the same command "
    "again; features that were computed are kept."
)


@click.command("train")
@click.argument("data", required=False)
@click.option("--recipe", "recipe_name", help="A shipped recipe or a FILE.toml; else sfumato advise chooses.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), help="Your time, for that choice.")
@click.option("--epsilon", type=float, help="Privacy budget ε: 8 is weak, 3 medium, 1 strong.")
@click.option("--delta", type=float, help="δ; by default the largest power of ten up to 1/(2N).")
@click.option("--model", "model_name", help="A model of the zoo (sfumato models list).")
@click.option(
    "--weights", metavar="RUN", help="Begin with the weights of a run, a release or a .safetensors."
)
@backbone_options
@click.option("--unit", type=click.Choice(["image", "patient"]), help="What one guarantee protects.")
@click.option(
    "--patient-from", metavar="REGEX", help="Finds the patient in each file's path; dicom: in its header."
)
@click.option(
    "--window", type=Window(), help="Grey values to show, for all images; else each DICOM file's own."
)
@click.option("--findings", metavar="A,B", help="Any number per image: the manifest's findings, in order.")
@click.option("--loss", metavar="NAME", help="By default what the labels need.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="The run's folder.")
@click.option("--resume", is_flag=True, help="Go on with the interrupted run in --out.")
@click.option("--dry-run", is_flag=True, help="Check everything, show plan, memory and time; train nothing.")
@hardware_options
@click.option("--no-privacy", is_flag=True, help="Train without ANY guarantee: baselines, public data.")
@click.option("--seed", type=int, help="Reproducible, and therefore not releasable.")
@click.option("--audit-canaries", type=click.IntRange(0), metavar="M", help="Canaries for sfumato audit run.")
@click.option(
    "--audit-kind",
    type=click.Choice(["gradient", "mislabelled", "noise", "optimised"]),
    help="What the canaries are; by default gradients.",
)
@log_options
@click.option("--force", is_flag=True, help="Accept a delta above 1/N.")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="Change any setting.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    data: str | None,
    recipe_name: str | None,
    minutes: float | None,
    epsilon: float | None,
    delta: float | None,
    model_name: str | None,
    weights: str | None,
    unit: str | None,
    patient_from: str | None,
    findings: str | None,
    loss: str | None,
    window: tuple[float, float] | None,
    out: Path | None,
    resume: bool,
    dry_run: bool,
    hardware: str | None,
    price: float | None,
    no_privacy: bool,
    seed: int | None,
    audit_canaries: int | None,
    audit_kind: str | None,
    force: bool,
    assignments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train a private model on DATA, a folder of images or a known data set.

    The folder holds train/<class>/*.png and optional val/ and test/, or a manifest.csv. The result is
    runs/NAME with the model in release/, a report, and the guarantee in whole sentences.
    """
    _check_flags(data, epsilon, out, no_privacy=no_privacy, resume=resume)
    check_planned(hardware, dry_run=dry_run)
    if helped_first_rank(force=force, dry_run=dry_run):
        return
    flags: dict[str, Any] = {
        "data.name": absolute(data),
        "data.patient_from": patient_from,
        "data.findings": split_names(findings),
        "training.loss": loss,
        "data.window": window,
        "model.name": model_name,
        "model.weights": absolute(weights),
        "privacy.epsilon": epsilon,
        "privacy.delta": delta,
        "privacy.unit": unit,
        "privacy.enabled": False if no_privacy else None,
        "training.seed": seed,
        "audit.canaries": audit_canaries,
        "audit.kind": audit_kind,
    }
    recipe_name, backbone, network = backbone_settings(recipe_name)
    given = {key: value for key, value in flags.items() if value is not None} | backbone
    every = (*network, *assignments)
    recipe = assemble(recipe_name, given, every, out, resume, minutes=minutes, quiet=as_json)
    folder = out if out is not None else Path("runs") / default_name(recipe)
    if dry_run:
        show_plan(recipe, folder, resume=resume, force=force, as_json=as_json, hardware=hardware, price=price)
        return
    echo_result(run_recipe(recipe, folder, resume=resume, force=force, quiet=as_json), as_json=as_json)


def _check_flags(
    data: str | None, epsilon: float | None, out: Path | None, *, no_privacy: bool, resume: bool
) -> None:
    """Refuse flags that contradict each other, or that leave open which run is meant."""
    if no_privacy and epsilon is not None:
        raise ConfigError(
            "contradictory-budget",
            f"--no-privacy and --epsilon {epsilon:g} exclude each other.",
            why="Training without privacy spends no budget and gives no guarantee.",
            fix="Leave one of the two out.",
        )
    if resume and out is None and data is None:
        raise ConfigError(
            "no-out", "--resume does not say which run.", fix="Name its folder: --resume --out runs/NAME."
        )


def assemble(
    recipe_name: str | None,
    flags: dict[str, Any],
    assignments: tuple[str, ...],
    out: Path | None,
    resume: bool,
    *,
    minutes: float | None = None,
    quiet: bool = False,
) -> Recipe:
    """The recipe of this call: the named one, the interrupted run's or the advised one; flags; ``--set``.

    ``quiet``: without a display of how far the listing of files is that an advice needs.
    """
    from sfumato.recipes.recipe import load_recipe, parse_assignment, with_settings
    from sfumato.release.run_folder import RunFolder

    settings = dict(parse_assignment(text) for text in assignments)
    if recipe_name is None and resume and out is not None:
        recipe = RunFolder(out).stored_recipe()
    elif recipe_name is not None:
        recipe = load_recipe(recipe_name)
    else:
        recipe = _advised({**flags, **settings}, minutes, quiet=quiet)
    budget = flags.get("privacy.epsilon", settings.get("privacy.epsilon"))
    if budget is not None and recipe.privacy.epsilon is None and "privacy.noise_multiplier" not in settings:
        flags["privacy.noise_multiplier"] = None  # a budget asked for replaces the recipe's fixed noise
    return with_settings(recipe, {**flags, **settings})


def _advised(given: dict[str, Any], minutes: float | None, *, quiet: bool) -> Recipe:
    """The recipe that suits the public facts of this call; says which, and what else there is."""
    from sfumato.cli.advise import advice_for, choice_line, missing_lines
    from sfumato.recipes.recipe import Recipe, load_recipe, with_settings
    from sfumato.run.advice import FROM_PIXELS, wants_pixels

    asked, wanted = with_settings(Recipe(), given), wants_pixels(given)
    if asked.data.name is None or wanted:
        if wanted:
            click.echo(f"Chosen     {FROM_PIXELS}: {wanted[0]} belongs to a training from pixels.", err=True)
        return load_recipe(FROM_PIXELS)
    advice = advice_for(
        asked.data.name,
        epsilon=asked.privacy.epsilon,
        unit=asked.privacy.unit,
        patient_from=asked.data.patient_from,
        classes=asked.data.classes,
        findings=asked.data.findings,
        minutes=minutes,
        quiet=quiet,
    )
    for line in [choice_line(advice), *missing_lines(advice)]:
        click.echo(line, err=True)
    changes = advice.settings
    if asked.data.prevalence is not None:
        changes.pop("data.class_counts", None)  # declared: it need not be paid for
    return with_settings(load_recipe(advice.chosen.recipe), changes)


def default_name(recipe: Recipe) -> str:
    """A name for the run's folder, from what it trains."""
    data = Path(recipe.data.name or "data").name
    privacy = recipe.privacy
    if not privacy.enabled:
        budget = "no-privacy"
    elif privacy.epsilon is not None:
        budget = f"eps{privacy.epsilon:g}"
    else:
        budget = f"noise{privacy.noise_multiplier or 0:g}"
    return f"{data}-{recipe.model.name}-{budget}"


def run_recipe(recipe: Recipe, folder: Path, *, resume: bool, force: bool, quiet: bool = False) -> RunResult:
    """Train with a progress display, or ``quiet`` without."""
    from sfumato.cli.progress import make_progress, note_busy_cores
    from sfumato.run.session import train

    progress = make_progress(quiet=quiet)
    note_busy_cores(recipe)
    logs = mirrored(progress, folder)
    try:
        result = train(recipe, out=folder, resume=resume, force=force, observer=logs or progress)
        if logs is not None:
            logs.finish(result)
        return result
    except KeyboardInterrupt:
        progress.close()
        if (folder / "state").is_dir():
            click.echo(f"\nSaved. Continue with: sfumato train --resume --out {folder}", err=True)
        else:
            click.echo(f"\n{NOTHING_SPENT}", err=True)
        raise
    finally:
        progress.close()


def echo_result(result: RunResult, *, as_json: bool) -> None:
    """Guarantee, accuracy and where everything lies."""
    from sfumato.release.card import headline
    from sfumato.training.assessment import flat_measures
    from sfumato.training.finding_scores import FindingScores

    folder, privacy, scores = result.folder, result.privacy, result.scores
    if as_json:
        echo_json(
            {
                "folder": str(folder),
                "report": str(folder / "report.html"),
                "num_steps": result.num_steps,
                "seconds": result.seconds,
                "split": result.scored_split,
                "accuracy": None if scores is None else scores.accuracy,
                **({} if result.assessment is None else flat_measures(result.assessment)),
                "sensitive": result.scores_are_sensitive,
                "privacy": privacy,
            }
        )
        return
    click.echo()
    if scores is not None:
        split, shown = result.scored_split, f"Accuracy   {100 * scores.accuracy:.2f} %"
        if isinstance(scores, FindingScores) and scores.mean_auc is not None:
            # accuracy says little where most findings are rare
            shown = f"Mean AUC   {scores.mean_auc:.4f} over {len(scores.auc)} findings"
        note = " (sensitive: of private images, keep it local)" if result.scores_are_sensitive else ""
        for line in measure_lines(result.assessment):
            click.echo(f"{line}{note}")
        click.echo(f"{shown} of {scores.num_examples:,} {split} images{note}")
    else:
        click.echo(
            "Accuracy   not measured: there are no test images. Put some aside in test/<class>/, or train "
            "with --set data.holdout=0.2"
        )
    click.secho(f"Guarantee  {headline(privacy)}", fg=None if privacy["releasable"] else "red", bold=True)
    click.echo(f"\n{privacy['statement']}\n")
    click.echo(
        f"Model      {folder / 'release'}   (may be published)"
        if privacy["releasable"]
        else f"Model      {folder / 'release'}   (must NOT be published)"
    )
    click.echo(f"Report     {folder / 'report.html'}")


def measure_lines(assessment: dict[str, Any] | None) -> list[str]:
    """What to read before the accuracy, which hides rare classes."""
    from sfumato.release.card import measure_text
    from sfumato.release.escaping import one_line

    if assessment is None:
        return []
    measures = assessment["measures"]
    lines = [f"AUC        {measure_text(measures['auc'])}"]
    lines.append(f"Balanced   {measure_text(measures['balanced_accuracy'])}   accuracy over classes")
    if assessment["positive"] is not None:
        called = one_line(assessment["positive"])
        rule = f"called {called} from a probability of {assessment['threshold']:.3g} on"
        lines.append(f"Finds      {measure_text(measures['sensitivity'])}   sensitivity; {rule}")
        lines.append(f"Clears     {measure_text(measures['specificity'])}   specificity")
    return lines


def absolute(data: str | None) -> str | None:
    """A folder or file by its full path: a run can be resumed from anywhere. A known name as it is."""
    if data is None:
        return None
    from sfumato.data.known import KNOWN_SETS

    return data if data in KNOWN_SETS or not Path(data).exists() else str(Path(data).resolve())
