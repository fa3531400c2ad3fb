"""``sfumato evaluate``: the scores of a released model, with what medicine reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sfumato.cli import echo_json
from sfumato.errors import ConfigError
from sfumato.release.escaping import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sfumato.data import ImageSet
    from sfumato.release.release import ReleasedModel
    from sfumato.training.assessment import Outputs


@click.command("evaluate")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("data", required=False)
@click.option("--split", type=click.Choice(["test", "val", "train"]), help="By default test, else val.")
@click.option("--by", "column", metavar="COLUMN", help="Per subgroup: group_COLUMN of manifest.csv.")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="OTHER",
    help="The gap to another run, such as one without privacy, on the same images.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    run: Path, data: str | None, split: str | None, column: str | None, against: Path | None, as_json: bool
) -> None:
    """Scores of a finished RUN, or of a release folder: AUC, sensitivity, specificity, with intervals.

    DATA is by default what the run was trained with; what it held out is then the split val. A folder
    without train/, val/ and test/ is used whole. Intervals are over patients where they are known, else
    over images.
    """
    from sfumato.release.release import load
    from sfumato.release.scored_images import data_of, images_of, is_sensitive, settings_of, with_one_class
    from sfumato.training.assessment import assess, flat_measures, gaps, subgroups
    from sfumato.training.evaluation import scores

    released = load(run)
    settings = settings_of(run) if data is None else None
    where = data_of(run, released, data)
    name, images = images_of(released, where, split, settings=settings)
    sensitive = is_sensitive(run, name, own_data=data is None)
    if images.multi_label:
        if column is not None or against is not None:
            with_one_class(images)  # refuses
        _evaluate_findings(released, images, name, sensitive=sensitive, as_json=as_json)
        return
    outputs = _outputs(released, images, name, quiet=as_json)
    found = scores(outputs.logits, outputs.labels, images.classes, decision=released.decision)
    assessment = assess(outputs)
    if column is not None:
        held_out = settings is not None and settings.holdout > 0
        assessment["subgroups"] = {
            column: subgroups(outputs, _subgroup_values(where, name, column, images, held_out=held_out))
        }
    if against is not None:
        assessment["gap"] = gaps(outputs, _other_outputs(against, released, images, name, quiet=as_json))
    if as_json:
        privacy = {key: released.privacy[key] for key in ("epsilon", "releasable")}
        head = {"split": name, "sensitive": sensitive, **privacy}
        echo_json({**head, **found.as_dict(), **flat_measures(assessment), **assessment})
        return
    _echo(assessment, found.top5_accuracy, found.num_examples, name, sensitive=sensitive)
    if against is not None:
        _echo_gap(assessment["gap"], against)
    if name == "train" and split is None:
        click.echo(
            "There are no test or val images: these are those that the model was trained on. Put some aside "
            "in test/<class>/, or train with --set data.holdout=0.2.",
            err=True,
        )
    _echo_guarantee(released, name, sensitive=sensitive)


def _echo_guarantee(released: ReleasedModel, name: str, *, sensitive: bool) -> None:
    from sfumato.release.card import headline

    click.echo(headline(released.privacy))
    if sensitive:
        click.echo(
            f"sensitive: these scores are computed from {name} images without noise. Keep them local unless "
            "all of these images are public.",
            err=True,
        )


def _evaluate_findings(
    released: ReleasedModel, images: ImageSet, split: str, *, sensitive: bool, as_json: bool
) -> None:
    """Images with any number of findings each: every finding by itself."""
    from sfumato.release.finding_rows import COLUMNS, finding_rows
    from sfumato.training.finding_scores import finding_scores

    logits = _outputs(released, images, split, quiet=as_json).logits
    result = finding_scores(
        logits, images.labels, images.classes, decision=released.decision, groups=images.patients
    )
    if as_json:
        privacy = {key: released.privacy[key] for key in ("epsilon", "releasable")}
        echo_json({"split": split, "sensitive": sensitive, **privacy, **result.as_dict()})
        return
    note = " (sensitive)" if sensitive else ""
    mean = "" if result.mean_auc is None else f"mean area under the ROC curve {result.mean_auc:.4f}, "
    click.echo(f"{mean}{result.num_examples:,} {split} images{note}")
    click.echo(
        f"{100 * result.accuracy:.2f} % of findings are called rightly at their thresholds, all findings of "
        f"an image in {100 * result.exact_match:.2f} %"
    )
    rows = [COLUMNS, *finding_rows(result.as_dict()["per_finding"])]
    widths = [max(len(one_line(value)) for value in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{one_line(value):<{width}}" for value, width in zip(row, widths, strict=True)]
        click.echo(f"  {'  '.join(cells)}".rstrip())
    _echo_guarantee(released, split, sensitive=sensitive)


def _outputs(released: ReleasedModel, images: ImageSet, split: str, *, quiet: bool) -> Outputs:
    from sfumato.cli.progress import make_progress
    from sfumato.run.prepare import features_counter
    from sfumato.training.assessment import Outputs
    from sfumato.training.evaluation import logits_of

    progress = make_progress(quiet=quiet)
    try:
        logits = logits_of(
            released.model,
            images.images,
            mean=tuple(released.config["mean"]),
            std=tuple(released.config["std"]),
            on_progress=features_counter(progress, split),
        )
    finally:
        progress.close()
    return Outputs.of(logits, images, released.decision)


def _other_outputs(path: Path, mine: ReleasedModel, images: ImageSet, split: str, *, quiet: bool) -> Outputs:
    """What the other model says of the same images; refused if it takes others."""
    from sfumato.release.release import load

    other = load(path)
    for key in ("classes", "image_size", "channels", "fit"):
        if other.config[key] != mine.config[key]:
            raise ConfigError(
                "other-model",
                f"{path} has another {key}: {other.config[key]}, not {mine.config[key]}.",
                why="A gap is the difference of two models on the very same images.",
                fix="Compare runs of one data set at one image size.",
            )
    return _outputs(other, images, split, quiet=quiet)


def _subgroup_values(data: str, split: str, column: str, images: ImageSet, *, held_out: bool) -> list[str]:
    from sfumato.data.subgroups import subgroup_column

    if held_out and split != "test":
        raise ConfigError(
            "subgroups-held-out",
            f"--by {column} with images that the run held out of train/.",
            why="The manifest does not say which those are.",
            fix="Use --split test, or give the images a split of their own in manifest.csv.",
        )
    return subgroup_column(Path(data), column, split=split, num_images=len(images), classes=images.classes)


def _echo(
    assessment: Mapping[str, Any], top5: float | None, num_examples: int, split: str, *, sensitive: bool
) -> None:
    """Measures first, then classes and subgroups as tables."""
    from sfumato.release.card import NAMES, measure_text

    measures = assessment["measures"]
    note = " (sensitive)" if sensitive else ""
    click.echo(
        f"{num_examples:,} {split} images of {assessment['num_people']:,} people{note}, intervals of "
        f"{100 * assessment['confidence']:g} %"
    )
    share = measures["accuracy"]["value"]
    click.echo(f"{100 * share:.2f} % of {num_examples:,} {split} images are right{note}")
    if assessment["positive"] is not None:
        called = one_line(assessment["positive"])
        click.echo(f"called {called} from a probability of {assessment['threshold']:.3g} on")
    for key, name in NAMES.items():
        if key in measures:
            click.echo(f"  {name:<27} {measure_text(measures[key])}")
    if top5 is not None:
        click.echo(f"  {'top-5 accuracy':<27} {top5:.3f}")
    calibration = assessment["calibration"]
    click.echo(f"  {'calibration error':<27} {calibration['error']:.3f}")
    if len(assessment["classes"]) > 2:
        _echo_table("class", assessment["classes"], ("auc", "sensitivity", "specificity"))
    for column, groups in assessment.get("subgroups", {}).items():
        shown = ("auc", "balanced_accuracy", "sensitivity", "specificity")
        rows = {value: {**group["measures"], **group} for value, group in groups.items()}
        _echo_table(column, rows, tuple(key for key in shown if key in next(iter(rows.values()))))


def _echo_table(title: str, rows: Mapping[str, Mapping[str, Any]], keys: tuple[str, ...]) -> None:
    from sfumato.release.card import measure_text

    width = max(len(title), *(len(one_line(name)) for name in rows))
    head = "  ".join(f"{key.replace('_', ' '):<22}" for key in ("images", *keys))
    click.echo(f"\n{one_line(title):<{width}}  {head}".rstrip())
    for name, row in rows.items():
        cells = [f"{row['num_examples']:,}", *(measure_text(row[key]) for key in keys)]
        click.echo(f"{one_line(name):<{width}}  {'  '.join(f'{cell:<22}' for cell in cells)}".rstrip())


def _echo_gap(gap: Mapping[str, Mapping[str, Any]], other: Path) -> None:
    from sfumato.release.card import NAMES, measure_text

    click.echo(f"\n{other.name} above this run, on the same images:")
    for key, name in NAMES.items():
        if key in gap:
            click.echo(f"  {name:<27} {measure_text(gap[key])}")
