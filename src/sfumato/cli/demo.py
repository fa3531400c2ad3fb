"""``sfumato demo``: the whole job on images that ship inside the package."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("demo")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="By default runs/demo.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(out: Path | None, as_json: bool) -> None:
    """Train privately on data that ships inside the package, in under two minutes.

    3,823 handwritten digits, ε = 3, true Poisson sampling and secure noise: only the size is small.
    """
    from sfumato.cli.train import echo_result, run_recipe
    from sfumato.recipes.recipe import load_recipe

    folder = out if out is not None else _fresh(Path("runs"))
    result = run_recipe(load_recipe("demo/digits"), folder, resume=False, force=False, quiet=as_json)
    echo_result(result, as_json=as_json)
    if not as_json:
        click.echo(f"\nTry it:    sfumato evaluate {folder}")
        click.echo("Next:      sfumato train YOUR_FOLDER --epsilon 3")


def _fresh(parent: Path) -> Path:
    """runs/demo, or runs/demo-2, … if there was one before."""
    names = ["demo", *(f"demo-{number}" for number in range(2, 10_000))]
    return next(parent / name for name in names if not (parent / name).exists())
