"""``sfumato recipes``: what ships, what it says, and whether yours is sound."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import click

from sfumato.cli import echo_json
from sfumato.errors import ConfigError


@click.group("recipes")
def command() -> None:
    """List, show, copy or validate recipes."""


@command.command("list")
@click.argument("pattern", default="*")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(pattern: str, as_json: bool) -> None:
    """The recipes whose names match PATTERN, e.g. "de2022/*"."""
    from sfumato.recipes.recipe import list_recipes, recipe_summary, recipe_text

    rows = [
        {"name": name, "title": recipe_summary(recipe_text(name)).partition("\n")[0]}
        for name in list_recipes()
        if fnmatch(name, pattern)
    ]
    if as_json:
        echo_json(rows)
        return
    if not rows:
        click.echo(f"No recipe matches {pattern!r}; sfumato recipes list shows all.", err=True)
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        click.echo(f"{row['name']:<{width}}  {row['title']}")


@command.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print every setting as JSON.")
def show_command(name: str, as_json: bool) -> None:
    """A recipe as it is written: paper, cost, command, expected result, settings."""
    from sfumato.recipes.recipe import recipe_from_toml, recipe_summary, recipe_text
    from sfumato.recipes.settings import to_table

    text = recipe_text(name)
    recipe = recipe_from_toml(text, origin=name)
    if as_json:
        echo_json({"name": name, "summary": recipe_summary(text), "settings": to_table(recipe)})
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
