"""sfumato audit run: what a finished run gives away about its canaries."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sfumato.cli import echo_json


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--confidence", default=0.95, show_default=True, type=float)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(run: Path, confidence: float, as_json: bool) -> None:
    """Bound ε from below by the canaries of RUN, which was trained with --audit-canaries.

    The result goes to RUN/audit.json, into the model card and into the report. Exit code 1: more was found
    than is promised.
    """
    from sfumato.audit.run import ACCESS, audit_run
    from sfumato.privacy.statement import round_down, round_up

    result = audit_run(run, confidence=confidence)
    if as_json:
        echo_json(result.as_dict())
    else:
        sure = f"{100 * result.confidence:g} % sure"
        click.echo(f"Promised   ε = {round_up(result.nominal_epsilon, 3)} at δ = {result.delta:g}")
        click.echo(
            f"Found      at least {round_down(result.epsilon, 3)} ({sure}); "
            f"{round_down(result.plain_epsilon, 3)} if nothing is assumed about the mechanism"
        )
        click.echo(f"Ceiling    {round_down(result.ceiling, 3)} if every guess had been right")
        click.echo(
            f"Guesses    {result.num_correct:,} of {result.num_guesses:,} right; {result.num_canaries:,} "
            f"canaries, {result.num_members:,} of them in; area under the ROC curve {result.auc:.3f}"
        )
        if result.measured is not None:
            click.echo(
                f"Noise      multiplier {result.measured.noise_multiplier:.4g} seen, real gradients "
                f"included; {result.noise_multiplier:.4g} accounted"
            )
            click.echo(
                f"Rate       {result.measured.sampling_rate:.3g} seen; {result.sampling_rate:.3g} accounted"
            )
        click.echo(f"Access     {ACCESS[result.kind]}")
        click.echo(f"Report     {run / 'report.html'}")
        for sentence in result.violations:
            click.secho(f"VIOLATION  {sentence}", fg="red", bold=True)
    if result.violations:
        sys.exit(1)
