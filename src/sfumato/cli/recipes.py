"""``sfumato recipes``: what ships, what it says, and whether a recipe file is valid."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from sfumato.cli import echo_json
from sfumato.cli.dry_run import hardware_options
from sfumato.errors import ConfigError

# Folders of recipes for whoever has images and a budget; the other folders are papers.
TO_BEGIN_WITH = ("default", "fast", "finetune", "demo")
HEADINGS = {
    "begin": "To begin with",
    "paper": "The papers' own, at full size: a recipe for each row of a table and each point of a figure",
}


@click.group("recipes")
def command() -> None:
    """List, show, copy or validate recipes; print their schema."""


@command.command("list")
@click.argument("pattern", required=False)
@hardware_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(pattern: str | None, hardware: str | None, price: float | None, as_json: bool) -> None:
    """The recipes whose names, or whose table or figure, match PATTERN, e.g. "de2022/table5".

    Without PATTERN the rows of one table or figure are one line; "*" lists every recipe. With --hardware each
    recipe has a line with time, memory and cost there; nothing is loaded or trained for that.
    """
    from sfumato.recipes.recipe import list_recipes

    rows = [_row(name) for name in sorted(list_recipes(), key=_place)]
    wanted = pattern or "*"
    rows = [row for row in rows if fnmatch(row["name"], wanted) or fnmatch(row["family"] or "", wanted)]
    if hardware is not None:
        rows = [row | {"projection": _projection(row["name"], hardware, price)} for row in rows]
    if as_json:
        echo_json(rows)
        return
    if hardware is not None:
        _echo_projections(rows, hardware)
        return
    if not rows:
        click.echo(f"No recipe matches {wanted!r}; sfumato recipes list shows what there is.", err=True)
    if pattern is None:
        rows = _folded(rows)
    groups = [key for key in HEADINGS if any(row["group"] == key for row in rows)]
    for number, group in enumerate(groups):
        if len(groups) > 1:
            heading = textwrap.fill(HEADINGS[group], shutil.get_terminal_size().columns)
            click.echo(("\n" if number else "") + heading)
        _echo_titles([row for row in rows if row["group"] == group])
    if pattern is None:
        click.echo(
            "\nThe recipes of a table: sfumato recipes list de2022/table5. All: sfumato recipes list '*'."
        )


@command.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print every setting as JSON.")
def show_command(name: str, as_json: bool) -> None:
    """A recipe as it is written: paper, expected result, cost, command, settings."""
    from sfumato.recipes.recipe import recipe_from_toml, recipe_text
    from sfumato.recipes.settings import to_table

    text = recipe_text(name)
    recipe = recipe_from_toml(text, origin=name)
    if as_json:
        settings = to_table(recipe)
        echo_json({"name": name, "reference": settings.pop("reference", None), "settings": settings})
        return
    click.echo(text, nl=False)


@command.command("copy")
@click.argument("name")
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def copy_command(name: str, target: Path, as_json: bool) -> None:
    """Copy a recipe to TARGET.toml, to change it there."""
    from sfumato.files import write_text
    from sfumato.recipes.recipe import recipe_text

    if target.suffix != ".toml":
        raise ConfigError(
            "not-toml", f"{target} does not end in .toml", fix="Name it so: --recipe expects it."
        )
    if target.exists():
        raise ConfigError("file-exists", f"{target} is already there", fix="Choose another name.")
    write_text(target, recipe_text(name))
    if as_json:
        echo_json({"name": name, "target": str(target)})
        return
    click.echo(target)


@command.command("validate")
@click.argument("names", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def validate_command(names: tuple[str, ...], as_json: bool) -> None:
    """Read recipes strictly and say what is wrong with the first bad one; builds no model, spends nothing."""
    from sfumato.recipes.recipe import load_recipe

    for name in names:
        load_recipe(name)
        if not as_json:
            click.echo(f"{name}: sound")
    if as_json:
        echo_json({"valid": list(names)})


@command.command("schema")
@click.option("--json", "as_json", is_flag=True, help="The same: a schema is JSON.")
def schema_command(as_json: bool) -> None:
    """The recipe format as a JSON schema, for editors that complete and check TOML."""
    from sfumato.recipes.schema import recipe_schema

    echo_json(recipe_schema())


def _row(name: str) -> dict[str, Any]:
    """What ``recipes list`` knows of a shipped recipe."""
    from sfumato.recipes.families import member_index
    from sfumato.recipes.recipe import load_recipe
    from sfumato.recipes.settings import to_table

    reference = load_recipe(name).reference
    assert reference is not None  # every shipped recipe has one
    return {
        "name": name,
        "title": reference.title,
        "group": "begin" if name.split("/")[0] in TO_BEGIN_WITH else "paper",
        "family": member_index()[name][0] if name in member_index() else None,
        "reference": to_table(reference),
    }


def _projection(name: str, hardware: str, price: float | None) -> dict[str, Any] | None:
    """What the recipe takes there; None where that cannot be known beforehand."""
    from sfumato.recipes.recipe import load_recipe
    from sfumato.run.hardware import parse_hardware, project
    from sfumato.run.workload import workload_of

    found = parse_hardware(hardware)
    try:
        return asdict(project(workload_of(load_recipe(name)), found, dollars_per_hour=price))
    except ConfigError as error:
        if error.code not in ("unknown-size", "not-counted"):
            raise
        return None


def _echo_projections(rows: list[dict[str, Any]], hardware: str) -> None:
    """Hours, memory and cost in columns."""
    width = max((len(row["name"]) for row in rows), default=0)
    click.echo(f"{f'on {hardware}':<{width}}      hours   GiB each   dollars")
    for row in rows:
        projection = row["projection"]
        if projection is None:
            click.echo(f"{row['name']:<{width}}          -          -         -")
            continue
        room = " " if projection["fits"] else "!"
        click.echo(
            f"{row['name']:<{width}} {projection['seconds'] / 3600:10,.2f} {projection['memory_gib']:10.1f}"
            f"{room}{projection['dollars']:9,.2f}"
        )
    click.echo(
        "\n-: needs your images (sfumato train DATA --dry-run --hardware …), or uses fixed features, which "
        "take minutes on two cores.\n!: does not fit. What these figures rest on: docs/scale.md."
    )


def _folded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with one line for each table or figure in place of its recipes."""
    from sfumato.recipes.families import list_families, load_family

    families = [load_family(name) for name in list_families()]
    return [row for row in rows if row["family"] is None] + [
        {"name": family.name, "title": f"{family.title} ({len(family.recipes)})", "group": "paper"}
        for family in families
        if family.recipes
    ]


def _place(name: str) -> tuple[int, str]:
    """Where a recipe stands in the list: those to begin with first, in the order of their folders."""
    folder = name.split("/")[0]
    return (TO_BEGIN_WITH.index(folder) if folder in TO_BEGIN_WITH else len(TO_BEGIN_WITH), name)


def _echo_titles(rows: list[dict[str, Any]]) -> None:
    """Names and titles in two columns within the terminal; neither a word nor an ``ε = 3`` is cut."""
    for _, folder in groupby(rows, key=lambda row: row["group"] == "paper" and row["name"].split("/")[0]):
        listed = list(folder)
        indent = max(len(row["name"]) for row in listed) + 2
        width = max(shutil.get_terminal_size().columns - indent, 24)
        for row in listed:
            title = row["title"].replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")
            lines = textwrap.wrap(title, width, break_long_words=False, break_on_hyphens=False)
            text = f"\n{' ' * indent}".join(lines).replace("\N{NO-BREAK SPACE}", " ")
            click.echo(f"{row['name']:<{indent}}{text}")
