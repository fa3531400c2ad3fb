"""sfumato study convergence, pareto, sweep, fairness: what finished runs show side by side."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sfumato.cli.study_output import finish, progress, writes
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.study import Scale
    from sfumato.study.fairness import Answers


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@writes
def convergence(runs: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Accuracy of finished RUNS against steps and against ε (Klause et al. 2022, figure 3).

    Runs that differ in nothing but their seeds become one curve with a band of deviations.
    """
    from sfumato.reporting.records import read_run
    from sfumato.study.convergence import convergence_result, draw_convergence, gather_curves

    curves = gather_curves([read_run(run) for run in runs])
    finish(convergence_result(curves), draw_convergence(curves), out, as_json, columns=())


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
@click.option("--results", type=click.Path(path_type=Path), help="A results.csv to take runs from as well.")
@click.option("--only", multiple=True, metavar="PATTERN", help="Of its recipes, e.g. 'fast/*'; repeat it.")
@click.option("--data", help="Which data set.  [default: that of the runs; cifar10]")
@writes
def pareto(
    runs: tuple[Path, ...],
    results: Path | None,
    only: tuple[str, ...],
    data: str | None,
    out: Path,
    as_json: bool,
) -> None:
    """Accuracy against ε of many RUNS beside published results (Remerscheid et al. 2022, figure 2).

    Published are results without further training data, as the three papers report them: with --only take
    such recipes out of a results.csv, if fronts are to be compared.
    """
    from sfumato.reporting.records import read_run
    from sfumato.study.pareto import draw_pareto, pareto_result, published_results, run_results, table_results

    found = run_results([read_run(run) for run in runs]) + (
        table_results(results, only=only or ("*",)) if results else []
    )
    chosen = data or (found[0].data if runs and found else "cifar10")
    points = [point for point in found if point.data == chosen] + published_results(chosen)
    if not points:
        raise ConfigError(
            "no-results",
            f"there is no private result on {chosen}, neither of the runs nor published",
            why="A point is a private run with a score on test images, or on public validation images.",
            fix="Give finished private runs, or another --data.",
        )
    shown = ("series", "epsilon", "accuracy", "num_runs", "on_front")
    finish(pareto_result(chosen, points), draw_pareto(chosen, points), out, as_json, columns=shown)


@click.command()
@click.argument("name")
@click.option(
    "--runs",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("reproductions"),
    show_default=True,
    help="The --out of sfumato reproduce.",
)
@click.option("--scale", type=click.Choice(["mini", "full"]), default="mini", show_default=True)
@click.option("--over", metavar="SECTION.KEY", help="What to go along.  [default: what takes most values]")
@writes
def sweep(name: str, runs: Path, scale: Scale, over: str | None, out: Path, as_json: bool) -> None:
    """Accuracy of a reproduced figure NAME along a setting (De et al. 2022, figures 2, 3, 6 to 8).

    NAME is as in sfumato reproduce, e.g. de2022/figure2. Means of finished runs with Student's intervals.
    """
    from sfumato.recipes.families import load_family
    from sfumato.study import Reproduction, conditions_of
    from sfumato.study.store import Store
    from sfumato.study.sweep import draw_sweep, sweep, sweep_result, swept_setting

    family, store = load_family(name), Store(runs)
    conditions = conditions_of(family, scale)
    seeds = store.seeds()
    reproduction = Reproduction(family=family, scale=scale, conditions=conditions, seeds=seeds, store=store)
    path = swept_setting(conditions, over)
    points = sweep(reproduction, path)
    result = sweep_result(reproduction, path, points)
    finish(result, draw_sweep(path, points), out, as_json, columns=tuple(result.rows[0])[:6])


@click.command()
@click.option("--private", "private", multiple=True, required=True, type=click.Path(path_type=Path))
@click.option("--ordinary", "ordinary", multiple=True, required=True, type=click.Path(path_type=Path))
@click.option("--data", help="Images to compare on.  [default: the runs' own]")
@click.option("--on", type=click.Choice(["test", "val", "train"]), default="test", show_default=True)
@click.option("--group", "groups", multiple=True, metavar="NAME=DATA", help="A group's images; repeat it.")
@click.option("--confidence", default=0.95, show_default=True, type=float)
@writes
def fairness(
    private: tuple[Path, ...],
    ordinary: tuple[Path, ...],
    data: str | None,
    on: str,
    groups: tuple[str, ...],
    confidence: float,
    out: Path,
    as_json: bool,
) -> None:
    """Whom privacy costs most, class by class and group by group (De et al. 2022, section 6).

    Give finished runs with --private, and runs of train --no-privacy with --ordinary; several of a side are
    averaged. A group is a folder or known set whose --on images are its members'.
    """
    from sfumato.study.fairness import draw_fairness, fairness_result, gather_answers, measure_fairness
    from sfumato.study.subjects import budget_words, not_private

    def both(name: str, images: str | None) -> tuple[Answers, Answers]:
        with progress(f"runs on {name}", quiet=as_json) as on_progress:
            gather = partial(gather_answers, data=images, split=on, on_progress=on_progress)
            sides = gather(ordinary, private=False), gather(private, private=True)
        sides[0].check_same_images(sides[1])
        return sides

    every = both(on + " images", data)
    named = {name: both(name, images) for name, images in map(_group, groups)}
    found = measure_fairness(
        every[0].right,
        every[1].right,
        every[0].labels,
        every[0].classes,
        groups={name: (sides[0].right, sides[1].right) for name, sides in named.items()},
        confidence=confidence,
    )
    sensitive = any(answers.sensitive for sides in (every, *named.values()) for answers in sides)
    described = {
        "data": every[0].data,
        "split": on,
        "private": [run.resolve().name for run in private],
        "ordinary": [run.resolve().name for run in ordinary],
        "epsilons": list(every[1].epsilons),
    }
    budgets = {budget_words(epsilon) for epsilon in every[1].epsilons}
    label = f"private, {budgets.pop()}" if len(budgets) == 1 else "private"
    result = fairness_result(found, described, not_private(on) if sensitive else None)
    shown = ("kind", "name", "num_images", "ordinary", "private", "gap", "lower", "upper")
    finish(result, draw_fairness(found, private_label=label), out, as_json, columns=shown)


def _group(text: str) -> tuple[str, str]:
    name, equals, data = text.partition("=")
    if not name or not equals or not data:
        raise click.UsageError(f"--group {text!r} is not NAME=DATA")
    return name, data
