"""sfumato study: what is inside networks and runs, as data and as figures for a paper."""

from __future__ import annotations

import click

from sfumato.cli.study_nets import activations, hessian, landscape
from sfumato.cli.study_runs import convergence, fairness, pareto, sweep


@click.group(name="study")
def command() -> None:
    """Look into networks and runs: data as JSON and CSV, and a figure as PNG and PDF.

    No guarantee covers what is computed from training images: studies use test or generated images unless
    they are told otherwise with --on train, and then say so in everything that they write.
    """


for _study in (activations, hessian, landscape, convergence, pareto, sweep, fairness):
    command.add_command(_study)
