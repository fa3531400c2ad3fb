"""``sfumato adapt``: a release for another place, by unlabelled images of it and declared prevalences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sfumato.cli import echo_json
from sfumato.release.escaping import one_line

if TYPE_CHECKING:
    from sfumato.release.another_place import Adapted, Place
    from sfumato.release.release import ReleasedModel


class Prevalences(click.ParamType):
    """``0.62``, or ``0.2,0.3,0.5`` for each class or finding."""

    name = "SHARES"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no share such as 0.62, and no list such as 0.2,0.3,0.5.", param, ctx)


@click.command("adapt")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--prevalence",
    type=Prevalences(),
    required=True,
    help="How frequent the positive class is at the place, such as 0.62; for several classes or findings a "
    "list in their order.",
)
@click.option(
    "--patient-from",
    metavar="REGEX",
    help="Finds the patient in file names, dicom: in their headers; each then counts once.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The new release folder; by default RUN-adapted beside RUN.",
)
@click.option(
    "--at-least",
    type=click.IntRange(10),
    default=50,
    show_default=True,
    help="Fewer images, or patients, are refused.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    run: Path,
    images: tuple[Path, ...],
    prevalence: tuple[float, ...],
    patient_from: str | None,
    out: Path | None,
    at_least: int,
    as_json: bool,
) -> None:
    """Set the operating point of a finished RUN or a release folder for another place.

    IMAGES, files or folders of files, are of the place where the model will be used; they need no labels.
    The original is left as it is: a new release folder is written, for evaluate, predict and serve.
    It costs the training units nothing. The people on IMAGES are not protected by the guarantee.
    """
    from sfumato.cli.progress import make_progress
    from sfumato.release.another_place import (
        adapt,
        check_apart,
        check_new,
        check_original,
        declared_shares,
        look_at_place,
        notes,
        write_adapted,
    )
    from sfumato.release.image_files import find_images
    from sfumato.release.release import load

    place_of_new = out or run.resolve().with_name(f"{run.resolve().name}-adapted")
    check_new(place_of_new)
    released = load(run)
    check_original(released)
    shares = declared_shares(released, prevalence)
    files, skipped = find_images(images)
    progress = make_progress(quiet=as_json)
    try:
        place = look_at_place(
            released,
            files,
            shares,
            patient_from=patient_from,
            at_least=at_least,
            on_progress=progress.computed,
        )
    finally:
        progress.close()
    is_known_apart = check_apart(run, released, place)
    adapted = adapt(released, place)
    write_adapted(run, place_of_new, released, place, adapted.decision)
    if skipped:
        click.echo(f"Skipped {len(skipped):,} files, hidden or without the ending of an image.", err=True)
    said = notes(released, place, is_known_apart=is_known_apart)
    _echo(place_of_new, released, place, adapted, said, as_json=as_json)


def _echo(
    out: Path,
    released: ReleasedModel,
    place: Place,
    adapted: Adapted,
    said: list[str],
    *,
    as_json: bool,
) -> None:
    from sfumato.release.card import headline

    rows = list(
        zip(
            released.classes,
            place.prevalence,
            adapted.called_before,
            adapted.called,
            adapted.moved,
            strict=True,
        )
    )
    if as_json:
        echo_json(
            {
                "folder": str(out),
                "num_images": place.num_images,
                "num_units": place.num_units,
                "unit": place.unit,
                "classes": {
                    name: {
                        "prevalence": share,
                        "called_before": before,
                        "called": now,
                        "added_to_logit": moved,
                    }
                    for name, share, before, now, moved in rows
                },
                "decision": adapted.decision.as_dict(),
                "notes": said,
                "epsilon": released.privacy["epsilon"],
                "releasable": released.privacy["releasable"],
            }
        )
    else:
        people = f" of {place.num_units:,} patients" if place.unit == "patient" else ""
        click.echo(f"{place.num_images:,} images{people} of the place, without labels")
        width = max(5, *(len(one_line(name)) for name in released.classes))
        click.echo(f"{'':<{width}}  declared  called before  now     added to its logit")
        for name, share, before, now, moved in rows:
            shown = f"{share:<8.3f}  {before:<13.3f}  {now:<6.3f}  {moved:+.3f}"
            click.echo(f"{one_line(name):<{width}}  {shown}")
        click.echo(f"{one_line(str(out))}   {headline(released.privacy)}")
    for note in said:
        click.echo(f"weak: {one_line(note)}", err=True)
    guarantee = "The guarantee is for the training data. " if released.privacy["epsilon"] is not None else ""
    click.echo(
        f"{guarantee}The people on these images are not protected: the new folder holds one number for each "
        "class that is computed from them.",
        err=True,
    )
