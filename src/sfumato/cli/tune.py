"""``sfumato tune``: settings for a recipe, with the cost of looking for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sfumato.cli import echo_json
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.tune import TuneResult, TuneSettings
    from sfumato.tune.budget import Budget

_STRATEGIES = ["scaled", "random-stopping", "public", "uncounted"]
_SPACES = ["de2022", "scalenorm2022", "smoothnets2022"]


@click.command("tune")
@click.argument("recipe_name", metavar="RECIPE")
@click.argument("data")
@click.option(
    "--trials", "num_trials", type=click.IntRange(2), required=True, help="Random stopping: on average."
)
@click.option(
    "--over", "over", multiple=True, metavar="KEY=RANGE", help="log:a:b, lin:a:b, int:a:b[:n] or a,b,c."
)
@click.option("--space", "spaces", multiple=True, type=click.Choice(_SPACES), help="Ranges of a paper.")
@click.option("--epsilon", type=float, help="The total ε: of all trials and what comes out.")
@click.option("--delta", type=float, help="δ; by default the largest power of ten up to 1/(2N).")
@click.option(
    "--strategy",
    type=click.Choice(_STRATEGIES),
    help="How it is paid for.  [default: scaled, or public with --search-data]",
)
@click.option("--search-data", metavar="DATA", help="Public images for the trials of --strategy public.")
@click.option(
    "--search-share", type=float, default=0.4, show_default=True, help="Scaled: of ε, for all trials."
)
@click.option(
    "--shape", type=float, default=1.0, show_default=True, help="Random stopping: 1 geometric, 0 logarithmic."
)
@click.option(
    "--holdout", type=float, default=0.1, show_default=True, help="Of the units, to score trials on."
)
@click.option(
    "--sampler", type=click.Choice(["tpe", "random", "grid"]), help="[default: tpe; random stopping: random]"
)
@click.option(
    "--pruner", type=click.Choice(["none", "median", "threshold"]), default="none", show_default=True
)
@click.option("--prune-below", type=float, default=0.0, help="Accuracy, of the threshold pruner.")
@click.option("--storage", metavar="URL", help="Of Optuna.  [default: SQLite in OUT/state]")
@click.option("--study", metavar="NAME", help="The study's name in the storage.  [default: that of OUT]")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder of the search.")
@click.option("--seed", type=int, help="Reproducible, and therefore not releasable.")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="Change any setting.")
@click.option("--dry-run", is_flag=True, help="Show what the search would cost; spend nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    recipe_name: str,
    data: str,
    storage: str | None,
    study: str | None,
    out: Path | None,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Search settings of RECIPE on DATA; ε is the total, the search included.

    The same command goes on after an interruption, and several at once share the trials. What comes out lies
    in OUT/run, like every run; OUT/report.html shows the search.
    """
    _need_optuna()
    settings = build_settings(recipe_name, data, **options)
    folder = out if out is not None else Path("tunes") / _default_name(settings)
    from sfumato.tune.session import plan_tuning

    if dry_run:
        echo_plan(plan_tuning(settings).budget, folder, as_json=as_json)
        return
    result = _run(settings, folder, storage, study, quiet=as_json)
    echo_result(result, as_json=as_json)


def build_settings(
    recipe_name: str,
    data: str,
    *,
    num_trials: int,
    over: tuple[str, ...],
    spaces: tuple[str, ...],
    epsilon: float | None,
    delta: float | None,
    strategy: str | None,
    search_data: str | None,
    seed: int | None,
    assignments: tuple[str, ...],
    **rest: Any,
) -> TuneSettings:
    """What was asked for, checked."""
    from sfumato.cli.train import absolute, assemble
    from sfumato.tune.ranges import parse_ranges
    from sfumato.tune.settings import TuneSettings

    flags: dict[str, Any] = {
        "data.name": absolute(data),
        "privacy.epsilon": epsilon,
        "privacy.delta": delta,
        "training.seed": seed,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    recipe = assemble(recipe_name, given, assignments, None, False)
    chosen: Any = strategy or ("public" if search_data is not None else "scaled")
    return TuneSettings(
        recipe=recipe,
        ranges=parse_ranges(over, spaces, recipe),
        num_trials=num_trials,
        strategy=chosen,
        search_data=absolute(search_data),
        **rest,
    )


def _need_optuna() -> None:
    from importlib.util import find_spec

    if find_spec("optuna") is None:
        raise ConfigError(
            "tune-not-installed",
            "sfumato tune needs Optuna, which is not installed.",
            fix="Install it with: pip install 'sfumato[tune]'",
        )


def _default_name(settings: TuneSettings) -> str:
    from sfumato.cli.train import default_name

    return f"{default_name(settings.recipe)}-{settings.strategy}"


def _run(
    settings: TuneSettings, folder: Path, storage: str | None, study: str | None, *, quiet: bool
) -> TuneResult:
    from sfumato.cli.train import note_busy_cores
    from sfumato.tune import tune

    note_busy_cores(settings.recipe)

    def tell(line: str) -> None:
        if not quiet:
            click.echo(line)

    try:
        return tune(settings, out=folder, storage=storage, study=study, tell=tell)
    except KeyboardInterrupt:
        click.echo(f"\nSaved in {folder}. The same command goes on.", err=True)
        raise


def plan_values(budget: Budget) -> dict[str, Any]:
    """What a search costs, as JSON values."""
    search = budget.search
    return {
        "strategy": budget.settings.strategy,
        "epsilon": budget.epsilon,
        "delta": budget.base.privacy.delta,
        "counted": search is not None,
        "num_trials": budget.settings.num_trials,
        "trial_epsilon": budget.trial_epsilon,
        "trial_noise_multiplier": search.trial[-1].noise_multiplier if search and search.trial else None,
        "final_noise_multiplier": search.final[-1].noise_multiplier if search and search.final else None,
        "score_noise": budget.score_noise,
        "step_factor": budget.step_factor,
        "over": {one.key: one.text for one in budget.settings.ranges},
    }


def echo_plan(budget: Budget, folder: Path, *, as_json: bool) -> None:
    """What ``--dry-run`` shows."""
    from sfumato.privacy.statement import round_up

    values = plan_values(budget)
    if as_json:
        echo_json({"folder": str(folder), **values})
        return
    settings = budget.settings
    for line in cost_lines(budget):
        click.echo(line)
    mean = " on average" if settings.strategy == "random-stopping" else ""
    alone = f"each alone ε = {round_up(budget.trial_epsilon)}"
    click.echo(f"Trials     {settings.num_trials}{mean}, sampler {settings.chosen_sampler}, {alone}")
    if values["trial_noise_multiplier"] is not None:
        click.echo(f"Noise      {values['trial_noise_multiplier']:.4g} in a trial like the recipe's")
    if values["final_noise_multiplier"] is not None:
        steps = f"trials have {budget.step_factor:.3g} times its steps"
        click.echo(f"           {values['final_noise_multiplier']:.4g} in the last run; {steps}")
    if budget.score_noise is not None:
        click.echo(f"Scores     of private images, with noise of {budget.score_noise:.3g} units")
    for one in settings.ranges:
        click.echo(f"Over       {one.key} = {one.text}")
    click.echo(f"Folder     {folder}   (not made; nothing was spent)")


def cost_lines(budget: Budget) -> list[str]:
    """The cost in words, first of all."""
    from sfumato.privacy.statement import round_up

    epsilon, delta = round_up(budget.epsilon), budget.base.privacy.delta
    strategy = budget.settings.strategy
    if strategy == "uncounted":
        return [
            f"Cost       NOT COUNTED: ε = {epsilon} is of one run; the search is left out, and is stated so"
        ]
    if strategy == "public":
        return [f"Cost       ε = {epsilon}, δ = {delta:g}: of the last run; the trials are on public images"]
    return [f"Cost       ε = {epsilon}, δ = {delta:g} in all: trials, scores and what comes out ({strategy})"]


def echo_result(result: TuneResult, *, as_json: bool) -> None:
    """What came out, what it cost, and where it lies."""
    found = result.found
    if as_json:
        outcome = None if found is None else found.as_dict()
        echo_json(
            {
                "folder": str(result.folder),
                "finished": found is not None,
                **plan_values(result.budget),
                "found": outcome,
            }
        )
        return
    if found is None:
        click.echo("Other workers have trials to finish; the last of them, or this command again, goes on.")
        return
    from sfumato.privacy.statement import round_up

    click.echo()
    for key, value in found.settings.items():
        click.echo(f"Chosen     {key} = {value}")
    if found.accuracy is not None:
        click.echo(
            f"Accuracy   {100 * found.accuracy:.2f} % of {found.num_examples:,} test images, scored once"
        )
    for line in cost_lines(result.budget):
        click.echo(line)
    may = "may be published" if found.releasable else "must NOT be published: seeded"
    click.echo(f"Guarantee  ε = {round_up(found.epsilon)}, δ = {found.delta:g}")
    click.echo(f"Model      {found.run / 'release'}   ({may})")
    click.echo(f"Report     {result.folder / 'report.html'}")
