"""``sfumato evaluate``: the scores of a released model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sfumato.cli import echo_json
from sfumato.release.escaping import one_line

if TYPE_CHECKING:
    from sfumato.data import ImageSet
    from sfumato.release.release import ReleasedModel
    from sfumato.training.evaluation import AnyScores, Scores
    from sfumato.training.finding_scores import FindingScores


@click.command("evaluate")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("data", required=False)
@click.option("--split", type=click.Choice(["test", "val", "train"]), help="By default test, else val.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run: Path, data: str | None, split: str | None, as_json: bool) -> None:
    """Accuracy of a finished RUN (or of a release folder), overall and per class.

    DATA is by default what the run was trained with. A folder without train/, val/ and test/ is used whole.
    """
    from sfumato.release.release import load
    from sfumato.release.scored_images import data_of, images_of, is_sensitive

    released = load(run)
    name, images = images_of(released, data_of(run, released, data), split)
    sensitive = is_sensitive(run, name, own_data=data is None)
    result = _scores(released, images, name, quiet=as_json)
    if as_json:
        privacy = {key: released.privacy[key] for key in ("epsilon", "releasable")}
        echo_json({"split": name, "sensitive": sensitive, **privacy, **result.as_dict()})
        return
    from sfumato.release.card import headline
    from sfumato.training.finding_scores import FindingScores

    note = " (sensitive)" if sensitive else ""
    if isinstance(result, FindingScores):
        _echo_findings(result, name, note)
    else:
        _echo_classes(result, name, note)
    click.echo(headline(released.privacy))
    if sensitive:
        click.echo(
            f"sensitive: these scores are computed from {name} images without noise. Keep them local unless "
            "all of these images are public.",
            err=True,
        )


def _echo_findings(result: FindingScores, split: str, note: str) -> None:
    from sfumato.release.finding_rows import COLUMNS, finding_rows

    mean = "" if result.mean_auc is None else f"mean area under the ROC curve {result.mean_auc:.4f}, "
    click.echo(f"{mean}{result.num_examples:,} {split} images{note}")
    click.echo(
        f"{100 * result.accuracy:.2f} % of findings are called rightly at 50 %, all findings of an image in "
        f"{100 * result.exact_match:.2f} %"
    )
    rows = [COLUMNS, *finding_rows(result.as_dict()["per_finding"])]
    widths = [max(len(one_line(value)) for value in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{one_line(value):<{width}}" for value, width in zip(row, widths, strict=True)]
        click.echo(f"  {'  '.join(cells)}".rstrip())


def _echo_classes(result: Scores, split: str, note: str) -> None:
    click.echo(f"{100 * result.accuracy:.2f} % of {result.num_examples:,} {split} images are right{note}")
    click.echo(f"balanced over classes {100 * result.balanced_accuracy:.2f} %", nl=False)
    click.echo(
        "" if result.top5_accuracy is None else f", top-5 {100 * result.top5_accuracy:.2f} %", nl=False
    )
    click.echo("" if result.auc is None else f", area under the ROC curve {result.auc:.4f}", nl=False)
    click.echo()
    width = max(len(one_line(label)) for label in result.per_class)
    for label, share in result.per_class.items():
        click.echo(
            f"  {one_line(label):<{width}}  {'no images' if share is None else f'{100 * share:6.2f} %'}"
        )


def _scores(released: ReleasedModel, images: ImageSet, split: str, *, quiet: bool) -> AnyScores:
    from sfumato.cli.progress import make_progress
    from sfumato.run.prepare import features_counter
    from sfumato.training.evaluation import evaluate

    progress = make_progress(quiet=quiet)
    try:
        return evaluate(
            released.model,
            images,
            mean=tuple(released.config["mean"]),
            std=tuple(released.config["std"]),
            on_progress=features_counter(progress, split),
        )
    finally:
        progress.close()
