"""``sfumato budget``: any one of epsilon, delta, noise, steps and batch size from the other four."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import click

from sfumato.accounting import ACCOUNTANTS, Selection, default_accountant
from sfumato.cli import echo_json
from sfumato.errors import ConfigError
from sfumato.privacy.noise_mechanisms import MECHANISMS
from sfumato.privacy.sampling_schemes import SCHEMES

if TYPE_CHECKING:
    from sfumato.accounting import Accountant, Neighbouring
    from sfumato.privacy.plan import Plan, PlanSettings

_SOLVABLE = ("epsilon", "delta", "noise_multiplier", "num_steps", "batch_size")
_Number = TypeVar("_Number", int, float)


class Given(TypedDict):
    """The five values that determine each other; None is the one to be found."""

    epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    num_steps: int | None
    batch_size: float | None


@click.command("budget")
@click.option("--num-examples", type=int, required=True, help="Number of units N: images, or patients.")
@click.option("--batch-size", type=float, help="Expected batch size B.")
@click.option("--noise-multiplier", type=float, help="Noise σ, as a multiple of the clip norm.")
@click.option("--num-steps", type=int, help="Number of steps T.")
@click.option("--epsilon", type=float, help="Privacy budget ε.")
@click.option("--delta", type=float, help="δ; at most 1/N.")
@click.option(
    "--accountant", type=click.Choice(list(ACCOUNTANTS)), help="Default pld; rdp if a search is counted."
)
@click.option(
    "--neighbouring",
    type=click.Choice(["add-or-remove", "replace-one"]),
    default="add-or-remove",
    show_default=True,
)
@click.option("--unit", type=click.Choice(["image", "patient"]), default="image", show_default=True)
@click.option("--sampling", type=click.Choice(list(SCHEMES)), default="poisson", show_default=True)
@click.option("--mechanism", type=click.Choice(list(MECHANISMS)), default="gaussian", show_default=True)
@click.option(
    "--tuning-runs", type=float, help="Count choosing the best of so many runs on average (geometric)."
)
@click.option("--images-per-person", type=int, help="Also give ε for a person with so many images.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the budget into a .png or .svg."
)
@click.option("--force", is_flag=True, help="Accept delta above 1/N.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    num_examples: int,
    batch_size: float | None,
    noise_multiplier: float | None,
    num_steps: int | None,
    epsilon: float | None,
    delta: float | None,
    accountant: Accountant | None,
    neighbouring: Neighbouring,
    unit: Literal["image", "patient"],
    sampling: str,
    mechanism: str,
    tuning_runs: float | None,
    images_per_person: int | None,
    plot: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Solve for the one of epsilon, delta, noise multiplier, steps and batch size that is left out.

    \b
    sfumato budget --num-examples 50000 --batch-size 4096 --num-steps 2500 --delta 1e-5 --epsilon 8
    """
    if batch_size is None:
        batch_size = SCHEMES[sampling].default_batch_size(num_examples)
    if batch_size is not None and float(batch_size).is_integer():
        batch_size = int(batch_size)
    given: Given = {
        "epsilon": epsilon,
        "delta": delta,
        "noise_multiplier": noise_multiplier,
        "num_steps": num_steps,
        "batch_size": batch_size,
    }
    unknown = _unknown(given)
    settings: PlanSettings = {
        "accountant": accountant or _default_accountant(mechanism, tuning_runs),
        "neighbouring": neighbouring,
        "unit": unit,
        "sampling": sampling,
        "mechanism": mechanism,
        "tuning_runs": tuning_runs,
        "allow_large_delta": force or unknown == "delta",  # what is solved for cannot be refused
    }
    plan = _solve(unknown, given, num_examples, settings)
    people = _people(plan, images_per_person)
    if plot is not None:
        from sfumato.reporting.budget_plot import plot_budget

        curve = plot_budget(plan, plot)
        people["useful_batch_size"] = curve.useful_batch_size
    if as_json:
        echo_json({**_figures(plan, unknown), **people})
    else:
        _print(plan, unknown, people, plot)


def _unknown(given: Given) -> str:
    missing = [name for name, value in given.items() if value is None]
    if not missing:
        raise ConfigError(
            "contradictory-budget",
            "epsilon, delta, noise multiplier, steps and batch size are all given.",
            why="Any four of them determine the fifth.",
            fix="Leave out the one you want to know.",
        )
    if len(missing) > 1:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(
            "underdetermined-budget",
            f"{flags} are not given.",
            why="Only one unknown can be solved for.",
            fix="Give all but one of them.",
        )
    return missing[0]


def _default_accountant(mechanism: str, tuning_runs: float | None) -> Accountant:
    release = MECHANISMS[mechanism].event(1.0)
    if tuning_runs is None:
        return default_accountant([release])
    return default_accountant([Selection(events=(release,), mean_runs=tuning_runs)])


def _known(value: _Number | None) -> _Number:
    assert value is not None  # all but one are given
    return value


def _solve(unknown: str, given: Given, num_examples: int, settings: PlanSettings) -> Plan:
    from dataclasses import replace

    from sfumato import accounting
    from sfumato.privacy.plan import Plan

    if unknown in ("epsilon", "delta"):
        plan = Plan(
            num_examples=num_examples,
            batch_size=_known(given["batch_size"]),
            num_steps=_known(given["num_steps"]),
            noise_multiplier=_known(given["noise_multiplier"]),
            delta=0.5 if unknown == "delta" else _known(given["delta"]),
            **settings,
        )
        if unknown == "epsilon":
            return plan
        delta = accounting.delta(
            plan.events(),
            epsilon=_known(given["epsilon"]),
            accountant=plan.accountant,
            neighbouring=plan.neighbouring,
        )
        return replace(plan, delta=min(max(delta, 1e-300), 1 - 1e-12))
    return Plan.calibrate(
        epsilon=_known(given["epsilon"]),
        delta=_known(given["delta"]),
        num_examples=num_examples,
        batch_size=given["batch_size"],
        num_steps=given["num_steps"],
        noise_multiplier=given["noise_multiplier"],
        **settings,
    )


def _people(plan: Plan, images_per_person: int | None) -> dict[str, Any]:
    if images_per_person is None:
        return {}
    from sfumato import accounting

    value, method = accounting.group_epsilon(
        plan.events(),
        delta=plan.delta,
        group_size=images_per_person,
        accountant=plan.accountant,
        neighbouring=plan.neighbouring,
    )
    finite = value if value < float("inf") else None
    return {"images_per_person": images_per_person, "person_epsilon": finite, "person_method": method}


def _figures(plan: Plan, unknown: str) -> dict[str, Any]:
    from sfumato import accounting
    from sfumato.privacy.statement import FALSE_ALARMS

    mu, kind = accounting.mu_gdp(plan.events(), delta=plan.delta, neighbouring=plan.neighbouring)
    misses = accounting.trade_off(
        plan.events(), FALSE_ALARMS, accountant=plan.accountant, neighbouring=plan.neighbouring
    )
    return {
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "num_steps": plan.num_steps,
        "batch_size": plan.batch_size,
        "num_examples": plan.num_examples,
        "sampling_rate": plan.sampling_rate,
        "accountant": plan.accountant,
        "neighbouring": plan.neighbouring,
        "unit": plan.unit,
        "sampling": plan.sampling,
        "mechanism": plan.mechanism,
        "tuning_runs": plan.tuning_runs,
        "mu_gdp": mu if mu < float("inf") else None,
        "mu_gdp_kind": kind,
        "trade_off": [list(pair) for pair in zip(FALSE_ALARMS, misses, strict=True)],
        "solved": unknown,
    }


def _print(plan: Plan, unknown: str, people: dict[str, Any], plot: Path | None) -> None:
    from sfumato.privacy.statement import round_up

    figures = _figures(plan, unknown)
    for name in _SOLVABLE:
        bound = name in ("epsilon", "delta", "noise_multiplier")
        value = round_up(figures[name]) if bound else f"{figures[name]:g}"
        click.echo(f"{name:<17} {value:<10}{'   <- solved' if name == unknown else ''}")
    click.echo(f"{'num_examples':<17} {plan.num_examples:<10} sampling rate {plan.sampling_rate:.4g}")
    click.echo(f"{'mu_gdp':<17} {round_up(figures['mu_gdp'] or float('inf')):<10} {figures['mu_gdp_kind']}")
    members_found = round_up(100 * (1 - dict(figures["trade_off"])[0.01]), 3)
    click.echo(f"{'membership test':<17} {members_found:<10} % of members found at most, at 1 % false alarms")
    search = (
        "" if plan.tuning_runs is None else f"; the best of {plan.tuning_runs:g} runs on average is published"
    )
    click.echo(
        f"Protects each {plan.unit} ({plan.neighbouring}), by the {plan.accountant} accountant{search}."
    )
    if people.get("images_per_person"):
        eps = people["person_epsilon"]
        bound_text = "no useful bound" if eps is None else f"ε = {round_up(eps)}"
        click.echo(
            f"A person with {people['images_per_person']} images: {bound_text} ({people['person_method']})."
        )
    if plan.delta > 1 / plan.num_examples:
        click.echo(f"Warning: delta is above 1/{plan.num_examples}; such a guarantee is weak.", err=True)
    if plot is not None:
        click.echo(f"Batch sizes beyond about {people['useful_batch_size']:,} gain little. Drawn in {plot}.")
