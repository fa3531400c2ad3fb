"""sfumato audit paper: the membership inference of De et al. 2022, appendix A.2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sfumato.cli import echo_json
from sfumato.cli.progress import CountLines

if TYPE_CHECKING:
    from sfumato.audit.paper import PaperAudit
    from sfumato.audit.paper_results import Row
    from sfumato.audit.paper_settings import Setting

_TASKS = 20  # a side of one ε, before the next one's turn and a new table


@click.command()
@click.option(
    "--epsilon",
    "epsilons",
    multiple=True,
    type=float,
    default=(1.0, 2.0, 4.0, 8.0),
    help="Nominal ε; repeat it.",
)
@click.option(
    "--models", default=5000, show_default=True, type=click.IntRange(10), help="In phase II, a side."
)
@click.option("--size", default="100", show_default=True, type=click.Choice(["100", "60000"]), help="|D|.")
@click.option(
    "--phase", default="all", show_default=True, type=click.Choice(["1", "all"]), help="1: settings only."
)
@click.option(
    "--setting",
    "chosen",
    metavar="Z,RATE,CLIP,UPDATES",
    help="Instead of phase I, fixed beforehand: as in 7-as-8,0.1,1,50.",
)
@click.option("--views", default=0, show_default=True, type=click.IntRange(0), help="Views of each image.")
@click.option("--out", default="audit-paper", show_default=True, type=click.Path(path_type=Path))
@click.option(
    "--workers", type=click.IntRange(1), help="Stacks of models trained side by side.  [default: cores]"
)
@click.option("--seed", type=click.IntRange(0), help="Repeatable batches and noise in phase II.")
@click.option(
    "--init-seed", default=0, show_default=True, type=click.IntRange(0), help="Of the first weights."
)
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def command(
    epsilons: tuple[float, ...],
    models: int,
    size: str,
    phase: str,
    chosen: str | None,
    views: int,
    out: Path,
    workers: int | None,
    seed: int | None,
    init_seed: int,
    as_json: bool,
) -> None:
    """Train thousands of LeNets with and without an example z, and bound ε by how well they are told apart.

    The same command goes on where it was stopped. With |D| = 60,000 a model takes minutes of a core and
    phase I days, with 16 views hours: take a --setting there. Exit code 1: more was found than is promised;
    if nothing is wrong, that happens to one command in a thousand.
    """
    from sfumato.audit.paper import PaperAudit
    from sfumato.audit.paper_settings import PROBLEMS, parse_setting
    from sfumato.audit.paper_store import Header, Store
    from sfumato.data.readers.decode import num_threads

    if phase == "1" and chosen is not None:
        raise click.UsageError("--setting stands in place of phase I: leave one of the two out.")
    problem = PROBLEMS[int(size)]
    given = None if chosen is None else parse_setting(problem, chosen)
    header = Header(num_examples=problem.num_examples, views=views, seed=seed, init_seed=init_seed)
    audit = PaperAudit(
        problem=problem,
        views=views,
        store=Store.open(out, header),
        seed=seed,
        init_seed=init_seed,
        num_workers=workers or num_threads(),
    )
    found = {
        epsilon: _best_setting(audit, epsilon, quiet=as_json) if given is None else given
        for epsilon in epsilons
    }
    rows = []
    some = _TASKS * problem.models_at_once
    for target in range(some, models + some, some) if phase == "all" else ():
        for epsilon, setting in found.items():
            audit.phase_two(
                epsilon, setting, min(target, models), progress=CountLines("models", quiet=as_json)
            )
            rows = _write(audit, found, out, quiet=as_json)
    if as_json:
        settings = {f"{epsilon:g}": setting.as_dict() for epsilon, setting in found.items()}
        echo_json({"phase_one": settings, "table": [row.as_dict() for row in rows], "out": str(out)})
    if any(row.violates for row in rows):
        sys.exit(1)


def _best_setting(audit: PaperAudit, epsilon: float, *, quiet: bool) -> Setting:
    """Phase I."""
    setting, variation = audit.phase_one(epsilon, progress=CountLines("models", quiet=quiet))[0]
    if not quiet:
        click.echo(f"ε = {epsilon:g}: total variation {variation:.3f} with {setting}", err=True)
    return setting


def _write(audit: PaperAudit, found: dict[float, Setting], out: Path, *, quiet: bool) -> list[Row]:
    """results.json and the plots for what has been trained so far."""
    from sfumato.audit.paper_results import plot_audit, table_row, table_text
    from sfumato.files import write_json

    scores = {epsilon: audit.scores(2, epsilon, setting) for epsilon, setting in found.items()}
    made = [
        table_row(audit.problem, epsilon, found[epsilon], scores[epsilon], num_rows=len(found))
        for epsilon in found
    ]
    rows = [row for row in made if row is not None]
    write_json(out / "results.json", [row.as_dict() for row in rows])
    plot_audit(rows, scores, out / "audit.png")
    if not quiet:
        click.echo(table_text(rows))
    return rows
