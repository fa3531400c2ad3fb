"""``sfumato completion``: what makes a shell complete commands and options."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the completion of SHELL, for example: sfumato completion bash > FILE.

    The file belongs to ~/.local/share/bash-completion/completions/sfumato for bash, to a folder of $fpath as
    _sfumato for zsh, and to ~/.config/fish/completions/sfumato.fish for fish.
    """
    from click.shell_completion import get_completion_class

    from sfumato.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None  # click knows all three
    click.echo(kind(cli, {}, "sfumato", "_SFUMATO_COMPLETE").source())
