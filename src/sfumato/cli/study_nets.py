"""sfumato study activations, hessian, landscape: what is inside a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from sfumato.cli.study_output import Command, finish, progress, writes

if TYPE_CHECKING:
    from sfumato.study.subjects import On, Subject

DEFAULT_NETS = ("resnet9", "scale_resnet9")


def _looks_at_nets(function: Command) -> Command:
    """The options of studies of networks."""
    options = [
        click.argument("nets", nargs=-1),
        click.option("--data", help="Images to look with.  [default: the run's own; generated ones]"),
        click.option(
            "--on",
            type=click.Choice(["test", "val", "train", "generated"]),
            help="Which images. train, and val unless declared public: NOT PRIVATE.  [default: test]",
        ),
        click.option(
            "--option", "options", multiple=True, metavar="KEY=VALUE", help="Of fresh models; repeat it."
        ),
        click.option("--seed", default=0, show_default=True, help="Of fresh weights and random vectors."),
    ]
    for option in reversed(options):
        function = option(function)
    return writes(function)


def _num_images(default: int) -> Callable[[Command], Command]:
    return click.option("--num-images", default=default, show_default=True, type=click.IntRange(2))


@click.command()
@_looks_at_nets
@_num_images(256)
@click.option("--block", type=click.IntRange(1), help="Residual block to draw.  [default: the last]")
def activations(
    nets: tuple[str, ...],
    data: str | None,
    on: str | None,
    options: tuple[str, ...],
    seed: int,
    num_images: int,
    block: int | None,
    out: Path,
    as_json: bool,
) -> None:
    """V_R, V_F and V_A around residual additions (Klause et al. 2022, figure 2).

    NETS are runs, release folders, or models of the zoo with fresh weights; by default resnet9 and
    scale_resnet9.
    """
    from sfumato.study.activations import activations_result, draw_activations, measure_activations

    loaded = _subjects(nets, data, on, options, seed, num_images, needs_labels=False)
    measured = []
    for subject in loaded:
        with progress(subject.name, quiet=as_json) as on_progress:
            measured.append((subject, measure_activations(subject, on_progress=on_progress)))
    result = activations_result(measured)
    figure = draw_activations(measured, block=-1 if block is None else block - 1)
    finish(
        result, figure, out, as_json, columns=("net", "block", "activation", "mean", "deviation", "skewness")
    )


@click.command()
@_looks_at_nets
@_num_images(64)
@click.option("--num-vectors", default=2, show_default=True, type=click.IntRange(1), help="Random vectors.")
@click.option("--num-iterations", default=25, show_default=True, type=click.IntRange(2), help="Of Lanczos.")
@click.option("--num-top", default=10, show_default=True, type=click.IntRange(1), help="Eigenvalues kept.")
def hessian(
    nets: tuple[str, ...],
    data: str | None,
    on: str | None,
    options: tuple[str, ...],
    seed: int,
    num_images: int,
    num_vectors: int,
    num_iterations: int,
    num_top: int,
    out: Path,
    as_json: bool,
) -> None:
    """Trace, eigenvalues and spectral density of the loss's Hessian (Klause et al. 2022, section 3.1).

    NETS are runs, release folders, or models of the zoo with fresh weights; by default resnet9 and
    scale_resnet9. The work is --num-vectors times --num-iterations products with the Hessian.
    """
    from sfumato.study.curvature import curvature_result, draw_curvature, hessian_product, measure_curvature

    measured, losses = [], []
    for subject in _subjects(nets, data, on, options, seed, num_images):
        product, dimension = hessian_product(subject)
        with progress(f"products with the Hessian of {subject.name}", quiet=as_json) as on_progress:
            found = measure_curvature(
                product,
                dimension,
                num_vectors=num_vectors,
                num_iterations=num_iterations,
                num_top=num_top,
                seed=seed,
                on_progress=on_progress,
            )
        measured.append((subject, found))
        losses.append(subject.loss())
    shown = ("net", "trace", "largest_eigenvalue", "lowest_eigenvalue", "inverse_condition", "negative_ritz")
    finish(curvature_result(measured, losses), draw_curvature(measured), out, as_json, columns=shown)


@click.command()
@_looks_at_nets
@_num_images(64)
@click.option("--points", default=15, show_default=True, type=click.IntRange(3), help="A side, odd.")
@click.option("--reach", default=1.0, show_default=True, type=click.FloatRange(0, min_open=True))
def landscape(
    nets: tuple[str, ...],
    data: str | None,
    on: str | None,
    options: tuple[str, ...],
    seed: int,
    num_images: int,
    points: int,
    reach: float,
    out: Path,
    as_json: bool,
) -> None:
    """The loss on a plane of two random, filter-normalised directions (Li et al. 2018).

    NETS are runs, release folders, or models of the zoo with fresh weights; by default resnet9 and
    scale_resnet9.
    """
    from sfumato.study.landscape import draw_landscape, landscape_result, measure_landscape

    measured = []
    for subject in _subjects(nets, data, on, options, seed, num_images):
        with progress(f"points around {subject.name}", quiet=as_json) as on_progress:
            found = measure_landscape(subject, reach=reach, points=points, seed=seed, on_progress=on_progress)
        measured.append((subject, found))
    finish(landscape_result(measured), draw_landscape(measured), out, as_json, columns=())


def _subjects(
    nets: Sequence[str],
    data: str | None,
    on: str | None,
    options: Sequence[str],
    seed: int,
    num_images: int,
    *,
    needs_labels: bool = True,
) -> list[Subject]:
    from sfumato.recipes.recipe import parse_assignment
    from sfumato.study.subjects import load_subject

    given = dict(parse_assignment(f"model.{option}") for option in options)
    chosen = {key.removeprefix("model."): value for key, value in given.items()}
    return [
        load_subject(
            net,
            data=data,
            on=cast("On | None", on),  # click has checked the word
            num_images=num_images,
            options=chosen,
            needs_labels=needs_labels,
            seed=seed,
        )
        for net in nets or DEFAULT_NETS
    ]
