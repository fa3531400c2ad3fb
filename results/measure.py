"""Run a recipe over budgets and seeds and add one row per run to results.csv.

    python results/measure.py fast/patches cifar10 --epsilon 1 --epsilon 8 --seeds 3

Each run is exactly ``sfumato train``. Minutes are processor time over the number of cores, so that a busy
machine does not change them; features, which all runs of a recipe share, are counted in each.
"""

from __future__ import annotations

import csv
import os
import platform
import resource
import shlex
import subprocess
import tempfile
from pathlib import Path

import click

COLUMNS = ["recipe", "data", "seed", "metric", "value", "epsilon", "delta", "minutes"]
COLUMNS += ["hardware", "commit", "command"]
TABLE = Path(__file__).with_name("results.csv")


@click.command()
@click.argument("recipe_name")
@click.argument("data")
@click.option("--epsilon", "epsilons", type=float, multiple=True, help="Without any: no privacy.")
@click.option("--seeds", default=3, show_default=True)
@click.option("--first-seed", default=0, show_default=True, help="To add seeds to rows that are there.")
@click.option("--feature-minutes", default=0.0, help="Of features or pre-training that are there already.")
@click.option("--weights", help="A finished pre-training of this recipe, which would otherwise come first.")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE")
@click.option("--folder", help="Where DATA is, if it is no known set; the table keeps the name DATA.")
def main(
    recipe_name: str,
    data: str,
    epsilons: tuple[float, ...],
    seeds: int,
    first_seed: int,
    feature_minutes: float,
    weights: str | None,
    assignments: tuple[str, ...],
    folder: str | None,
) -> None:
    """Train and note accuracy (and AUC, if there are two classes)."""
    for epsilon in epsilons or (None,):
        for seed in range(first_seed, first_seed + seeds):
            budget = "--no-privacy" if epsilon is None else f"--epsilon {epsilon:g}"
            changes = "".join(f" --set {shlex.quote(text)}" for text in assignments)
            command = f"sfumato train {data} --recipe {recipe_name} {budget}{changes}"
            began = _processor_minutes()
            scores, privacy = _train(recipe_name, folder or data, epsilon, seed, weights, assignments)
            minutes = _processor_minutes() - began + feature_minutes
            for metric in ("accuracy", "auc"):
                if scores[metric] is not None:
                    row = [recipe_name, data, seed, metric, f"{scores[metric]:.4f}", epsilon or ""]
                    row += [privacy["delta"] or "", f"{minutes:.1f}", _hardware(), _commit(), command]
                    _add(row)
                    click.echo(f"{command}  seed {seed}: {metric} {scores[metric]:.4f}, {minutes:.1f} min")


def _train(
    recipe_name: str,
    data: str,
    epsilon: float | None,
    seed: int,
    weights: str | None,
    assignments: tuple[str, ...],
) -> tuple[dict, dict]:
    from sfumato.ledger.ledger import Ledger
    from sfumato.recipes.recipe import load_recipe, parse_assignment, with_settings
    from sfumato.run.session import train

    settings = {"data.name": data, "training.seed": seed, "privacy.epsilon": epsilon}
    settings |= {} if weights is None else {"model.weights": weights}
    settings |= {"privacy.enabled": False, "privacy.sampling": "poisson"} if epsilon is None else {}
    recipe = with_settings(load_recipe(recipe_name), settings | dict(map(parse_assignment, assignments)))
    with tempfile.TemporaryDirectory() as scratch, Ledger.open(Path(scratch) / "ledger.db") as ledger:
        result = train(recipe, out=Path(scratch) / "run", ledger=ledger)
    return result.scores.as_dict(), result.privacy


def _add(row: list[object]) -> None:
    new = not TABLE.exists()
    with TABLE.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        writer.writerow(row)


def _processor_minutes() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return (used.ru_utime + used.ru_stime) / 60 / (os.cpu_count() or 1)


def _hardware() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()} {platform.processor()}".rstrip()


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
