"""environment.json: software and hardware, and nobody's name."""

from __future__ import annotations

import getpass
import json
import socket
import sys
from pathlib import Path

import pytest

from sfumato.release.run_folder import describe_environment, public_command

PRIVATE = ("/home/alice", "alice", "St-Mary", "secret", "P0017", "ward-7.example.org", "\n", "müller")
COMMANDS = [
    "train /home/alice/St-Mary --epsilon 3 --out /home/alice/runs/secret",
    "train St-Mary --recipe /home/alice/my.toml --weights=/home/alice/secret --seed 4",
    "train cifar10 --patient-from (P0017)_ --set data.name=/home/alice/x --set model.weights=secret",
    "train --set=data.name=alice --out=alice --set data.classes=['alice','secret'] --dry-run",
    "train ward-7.example.org:/scans --set training.num_steps=4 --set privacy.enabled=true müller",
    "train 'two\nlines' -x/home/alice --alice=secret --unit patient --model resnet9",
]


@pytest.mark.parametrize("text", COMMANDS)
def test_the_command_holds_no_path_and_no_name_of_ones_own(text):
    arguments = text.split(" ")
    shown = public_command(arguments)
    assert not any(word in shown.replace("--alice", "") for word in PRIVATE)
    assert any(word in " ".join(arguments) for word in PRIVATE)  # the control: they were there
    assert len(shown.split(" ")) == len(arguments) + 1


def test_the_command_keeps_what_explains_the_run():
    text = "train cifar10 --recipe fast/patches --epsilon 3 --delta=1e-5 --set training.num_steps=40 --resume"
    assert public_command(text.split()) == f"sfumato {text}"


def test_the_environment_names_no_user_home_or_host(monkeypatch):
    here = str(Path.home() / "scans")
    monkeypatch.setattr(
        sys, "argv", ["/usr/bin/sfumato", "train", here, "--out", f"/tmp/{getpass.getuser()}"]
    )
    text = json.dumps(describe_environment())
    assert here not in text
    assert str(Path.home() / "scans") in " ".join(sys.argv)
    assert f"/{getpass.getuser()}" not in text
    assert socket.gethostname() not in text
    assert '"command": "sfumato train \\u2026 --out \\u2026"' in text
