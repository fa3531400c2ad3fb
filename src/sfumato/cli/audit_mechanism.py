"""sfumato audit mechanism: is the noise of every step as large as the accountant was told?"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from sfumato.cli import echo_json
from sfumato.cli.progress import CountLines

if TYPE_CHECKING:
    from sfumato.audit.mechanism import MechanismAudit
    from sfumato.audit.mechanism_results import MechanismResult
    from sfumato.audit.pipeline import Canary, Part

PARTS = ["views", "patients", "microbatches", "dropout", "head", "ema", "resume", "ranks"]
FULL_SHARE, SAMPLED_SHARE = 0.9, 0.75


@click.command()
@click.option(
    "--epsilon",
    "epsilons",
    multiple=True,
    type=click.FloatRange(0, min_open=True),
    default=(1.0, 2.0, 4.0, 8.0),
    help="Nominal ε; repeat it.  [default: 1, 2, 4, 8]",
)
@click.option("--delta", default=1e-5, show_default=True, type=float)
@click.option("--sampling-rate", default=1.0, show_default=True, type=float, help="q; 1: full batches.")
@click.option("--num-steps", type=click.IntRange(1), help="Of each training.  [default: 1; 100 if sampled]")
@click.option("--trainings", type=click.IntRange(20), help="How many.  [default: what it takes]")
@click.option("--canaries", type=click.IntRange(1), help="Of each training.  [default: what is fastest]")
@click.option("--over", multiple=True, type=click.Choice(PARTS), help="A part to train through; repeat it.")
@click.option("--canary", default="input", show_default=True, type=click.Choice(["input", "gradient"]))
@click.option("--confidence", default=0.95, show_default=True, type=float)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Scores, result and plots.")
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: cores]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    epsilons: tuple[float, ...],
    delta: float,
    sampling_rate: float,
    num_steps: int | None,
    trainings: int | None,
    canaries: int | None,
    over: tuple[str, ...],
    canary: str,
    confidence: float,
    out: Path | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """Train tiny models through the product's own code, with canaries that fair coins choose, and bound ε.

    The auditor sees every update. By default there are as many trainings as prove 90 % of the nominal ε (75 %
    with sampling), with probability 99 %, if nothing is wrong. The same command with the same --out goes on
    where it was stopped. Exit code 1: more than is promised was found; if all is well, only with probability
    1 - confidence, for all ε together.
    """
    from sfumato.audit.mechanism import MechanismAudit, sized
    from sfumato.audit.mechanism_results import run_mechanism_audit
    from sfumato.data.readers.decode import num_threads

    share = FULL_SHARE if sampling_rate == 1 else SAMPLED_SHARE
    audits = [
        MechanismAudit(
            epsilon=epsilon,
            delta=delta,
            sampling_rate=sampling_rate,
            num_steps=num_steps or (1 if sampling_rate == 1 else 100),
            over=cast("tuple[Part, ...]", over),  # click has checked the words
            canary=cast("Canary", canary),
            confidence=confidence,
        )
        for epsilon in epsilons
    ]
    planned = _checked([sized(audit, share=share, num_canaries=canaries) for audit in audits])
    results, scores, began = [], [], time.monotonic()
    for audit, enough in planned:
        result, trials = run_mechanism_audit(
            audit,
            trainings=trainings or enough,
            scores=None if out is None else out / f"scores-{audit.epsilon:g}.jsonl",
            workers=workers or num_threads(),
            num_audits=len(planned),
            on_progress=partial(CountLines("trainings", quiet=as_json), f"ε = {audit.epsilon:g}"),
        )
        results.append(result)
        scores.append(trials.sides)
        if not as_json:
            _echo(result)
    if out is not None:
        _write(out, results, scores, [audit for audit, _ in planned])
    if as_json:
        seconds = time.monotonic() - began
        echo_json({"results": [result.as_dict() for result in results], "seconds": seconds})
    if any(result.violations for result in results):
        sys.exit(1)


def _checked(planned: list[tuple[MechanismAudit, int]]) -> list[tuple[MechanismAudit, int]]:
    """The same, refused before anything is trained if one cannot be audited."""
    for audit, _ in planned:
        audit.check()
    return planned


def _write(out: Path, results: list, scores: list, audits: list) -> None:
    from sfumato.audit.mechanism_plots import plot_mechanism
    from sfumato.files import write_json

    settings = [audit.identity() for audit in audits]
    write_json(
        out / "results.json",
        [
            {"settings": setting, **result.as_dict()}
            for setting, result in zip(settings, results, strict=True)
        ],
    )
    plot_mechanism(results, scores, [out / "audit.png", out / "audit.svg"])


def _echo(result: MechanismResult) -> None:
    from sfumato.privacy.statement import round_down, round_up

    click.echo(
        f"ε = {round_up(result.nominal_epsilon, 3)} promised   "
        f"at least {round_down(result.epsilon, 3)} found "
        f"({100 * result.share:.0f} %, {100 * result.confidence:g} % sure)   "
        f"at most {round_up(result.ceiling, 3)} could have been   "
        f"{result.trainings:,} trainings of {result.canaries} canaries"
    )
    click.echo(
        f"    noise multiplier {result.measured_noise_multiplier:.4g} measured, "
        f"{result.noise_multiplier:.4g} accounted   nothing assumed: ε at least "
        f"{round_down(result.clopper_pearson_epsilon, 3)}"
    )
    for violation in result.violations:
        click.secho(f"    VIOLATION  {violation}", fg="red", bold=True)
