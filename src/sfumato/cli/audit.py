"""sfumato audit: attack the guarantee and report what was found."""

from __future__ import annotations

import importlib

import click

COMMANDS = {
    "run": ("sfumato.cli.audit_run", "A training of your own that had --audit-canaries."),
    "mechanism": (
        "sfumato.cli.audit_mechanism",
        "Tight: every update of tiny trainings, with a canary or not.",
    ),
    "paper": ("sfumato.cli.audit_paper", "De et al.'s membership inference: LeNet on MNIST."),
}


class AuditGroup(click.Group):
    """Audits live in modules of their own, imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return importlib.import_module(COMMANDS[name][0]).command if name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=AuditGroup)
def command() -> None:
    """Attack the guarantee and report what was found."""
