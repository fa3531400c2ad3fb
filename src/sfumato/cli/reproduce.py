"""``sfumato reproduce``: a table or figure of a paper, run again."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sfumato.cli import echo_json
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.study import Condition, Reproduction, Scale

_SEEDS = {"mini": 5, "full": 3}


@click.command("reproduce")
@click.argument("name", required=False)
@click.option("--list", "list_all", is_flag=True, help="The tables and figures that there are.")
@click.option(
    "--scale",
    type=click.Choice(["mini", "full"]),
    default="mini",
    show_default=True,
    help="mini: a small net or few steps at the same ε, for two cores; full: the paper's own size.",
)
@click.option("--seeds", type=click.IntRange(1), help="Runs of each condition.  [default: mini 5, full 3]")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default="reproductions", show_default=True
)
@click.option(
    "--data", "places", multiple=True, metavar="[SET=]FOLDER", help="Where a data set lies; repeat it."
)
@click.option("--only", default="*", metavar="PATTERN", help="Recipes to run, by wildcard.")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="Change any setting.")
@click.option("--replace", is_flag=True, help="Run again what was run with other settings.")
@click.option("--dry-run", is_flag=True, help="Show conditions and what is finished; train nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    name: str | None,
    list_all: bool,
    scale: Scale,
    seeds: int | None,
    out: Path,
    places: tuple[str, ...],
    only: str,
    assignments: tuple[str, ...],
    replace: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train every condition of a table or figure with the same seeds and print it beside the paper's.

    NAME is PAPER/PLACE, e.g. de2022/table2. Finished runs are kept in --out and not repeated; an interrupted
    call goes on when it is given again. Two calls at once share the work.
    """
    if list_all or name is None:
        _list(as_json)
        return
    reproduction = _reproduction(name, scale, seeds or _SEEDS[scale], out, places, only, assignments, replace)
    if not dry_run:
        _run(reproduction, quiet=as_json)
    document = reproduction.document()
    if as_json:
        echo_json(document)
        return
    from sfumato.study.tables import table_text

    click.echo(("" if dry_run else "\n") + table_text(document, width=shutil.get_terminal_size().columns))
    finished = sum(
        reproduction.result(c, seed) is not None
        for c in reproduction.conditions
        for seed in reproduction.seeds
    )
    planned = len(reproduction.conditions) * len(reproduction.seeds)
    click.echo(f"\n{finished} of {planned} runs finished. Runs and results.csv: {out}")


def _list(as_json: bool) -> None:
    from sfumato.recipes.families import list_families, load_family

    families = [load_family(name) for name in list_families()]
    if as_json:
        echo_json(
            [
                {
                    "name": family.name,
                    "paper": family.paper,
                    "title": family.title,
                    "claim": family.claim,
                    "conditions": len(family.members),
                    "mini_conditions": sum(member.mini is not None for member in family.members),
                    "mini": family.mini_note,
                    "needs": family.needs,
                }
                for family in families
            ]
        )
        return
    width = shutil.get_terminal_size().columns
    indent = max(len(family.name) for family in families) + 2
    paper = ""
    for family in families:
        if family.paper != paper:
            click.echo(("\n" if paper else "") + textwrap.fill(family.paper, width))
            paper = family.paper
        small = sum(member.mini is not None for member in family.members)
        count = len(family.members)
        sizes = f"{count} condition{'s' * (count > 1)}, " + (
            f"{small} of them mini" if small else "full only"
        )
        body = textwrap.wrap(f"{family.title} ({sizes})", max(width - indent, 24), break_on_hyphens=False)
        click.echo(f"{family.name:<{indent}}" + f"\n{' ' * indent}".join(body))


def _reproduction(
    name: str,
    scale: Scale,
    seeds: int,
    out: Path,
    places: tuple[str, ...],
    only: str,
    assignments: tuple[str, ...],
    replace: bool,
) -> Reproduction:
    from sfumato.recipes.families import load_family
    from sfumato.recipes.recipe import load_recipe, parse_assignment
    from sfumato.study import Reproduction, conditions_of
    from sfumato.study.store import Store

    family = load_family(name)
    sets = list(dict.fromkeys(str(load_recipe(member.recipe).data.name) for member in family.members))
    settings: dict[str, Any] = dict(parse_assignment(text) for text in assignments)
    data = _places(places, sets)
    conditions = conditions_of(family, scale, data=data, only=only, settings=settings)
    return Reproduction(
        family=family,
        scale=scale,
        conditions=conditions,
        seeds=range(seeds),
        store=Store(out),
        changed=settings,
        replace=replace,
    )


def _places(places: tuple[str, ...], sets: list[str]) -> dict[str, str]:
    """``imagenette=FOLDER`` as a mapping; a bare FOLDER where the table has one data set only."""
    found = {}
    for text in places:
        before, separator, folder = text.partition("=")
        known = before if separator else sets[0]
        if known not in sets or (not separator and len(sets) > 1):
            raise ConfigError(
                "unclear-data",
                f"--data {text} does not say which data set it is",
                why=f"This table uses {', '.join(sets)}.",
                fix=f"for example --data {sets[0]}=FOLDER",
            )
        found[known] = str(Path(folder if separator else before).expanduser().resolve())
    return found


def _run(reproduction: Reproduction, *, quiet: bool) -> None:
    from sfumato.cli.progress import make_progress

    progress = make_progress(quiet=quiet)

    def start(condition: Condition, seed: int) -> Any:
        if not quiet:
            click.echo(f"\n{condition.recipe_name}, {reproduction.scale}, seed {seed}", err=True)
        return progress

    def skip(condition: Condition, why: str) -> None:
        click.echo(f"{condition.recipe_name} is left out: {why}", err=True)

    try:
        reproduction.run(on_start=start, on_skip=skip)
    except KeyboardInterrupt:
        progress.close()
        click.echo("\nSaved. The same command goes on from here.", err=True)
        raise
    finally:
        progress.close()
