"""Shell completion: what is printed is what the shell needs, and the answers come without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from sfumato.cli import COMMANDS, cli


@pytest.mark.parametrize(
    ("shell", "sign"),
    [("bash", "complete -o nosort"), ("zsh", "#compdef sfumato"), ("fish", "complete --no-files")],
)
def test_each_shell_gets_its_script(shell, sign):
    printed = CliRunner().invoke(cli, ["completion", shell])
    assert printed.exit_code == 0
    assert sign in printed.output
    assert "_SFUMATO_COMPLETE" in printed.output


def test_another_shell_is_refused():
    assert CliRunner().invoke(cli, ["completion", "tcsh"]).exit_code == 2


def completed(*words: str) -> list[str]:
    """What a shell would be offered for the last word."""
    code = (
        "import sys; from sfumato.cli import main\ntry: main([])\nfinally: assert 'torch' not in sys.modules"
    )
    line = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    surroundings = {**os.environ, **line, "_SFUMATO_COMPLETE": "bash_complete"}
    done = subprocess.run([sys.executable, "-c", code], env=surroundings, capture_output=True, text=True)
    assert not done.stderr
    return [entry.partition(",")[2] for entry in done.stdout.splitlines()]


def test_commands_and_options_are_completed_without_torch():
    assert completed("sfumato", "pre") == ["predict"]
    assert set(completed("sfumato", "")) == set(COMMANDS)
    assert "--backbone-weights" in completed("sfumato", "train", "--backb")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_reads_the_script_without_complaint():
    script = CliRunner().invoke(cli, ["completion", "bash"]).output
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
