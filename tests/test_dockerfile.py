"""The Dockerfile, read: what it copies, installs, sets and runs is there. Building it needs an engine."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from sfumato.cli import cli

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text()


def instructions(text):
    """(word, rest) of each instruction, continued lines joined, without comments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


def check(text):
    """AssertionError for whatever does not fit the project."""
    found, project = instructions(text), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {word for word, _ in found} <= {
        "FROM",
        "RUN",
        "COPY",
        "ENV",
        "USER",
        "WORKDIR",
        "ENTRYPOINT",
        "CMD",
    }
    stages = {rest.split()[-1] for word, rest in found if word == "FROM" and " AS " in rest}
    version = re.search(r"python:(\d+)\.(\d+)", text)
    assert tuple(map(int, version.groups())) >= (3, 11)
    for source in (rest.split() for word, rest in found if word == "COPY"):
        stage = source[0].removeprefix("--from=")
        assert stage in stages if stage != source[0] else (ROOT / source[0]).exists()
    commands = " ".join(rest for word, rest in found if word == "RUN")
    (extras,) = re.findall(r'"/source\[([\w,]+)\]"', commands)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert {"pretrained", "medical"} <= set(extras.split(","))  # what `train` without a recipe takes, offline
    variables = dict(pair.split("=", 1) for word, rest in found if word == "ENV" for pair in rest.split())
    known = (ROOT / "src/sfumato/files.py").read_text()
    assert all(name in known for name in variables if name.startswith("SFUMATO_"))
    words = dict(found)
    assert f"useradd --create-home {words['USER']}" in commands  # not root
    assert f"mkdir {words['WORKDIR']}" in commands
    assert f"chown {words['USER']} {words['WORKDIR']}" in commands
    assert all(value.startswith(words["WORKDIR"]) for name, value in variables.items() if name != "PATH")
    assert json.loads(words["ENTRYPOINT"])[0] in project["scripts"]
    assert json.loads(words["CMD"]) == ["--help"]
    for line in re.findall(r"docker run (?:.* )?sfumato (.+)", text):
        name, *arguments = shlex.split(line)
        command = cli.get_command(click.Context(cli), name)
        command.make_context(name, arguments, resilient_parsing=False)


def test_the_dockerfile_fits_the_project():
    check(TEXT)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", "runs"} <= set(ignored)  # nobody's private runs go into an image


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pretrained,medical", "pretraned,medical"),
        ("SFUMATO_LEDGER", "SFUMATO_LEDGERS"),
        ("--from=build", "--from=builder"),
        ("USER sfumato", "USER root"),
        ("WORKDIR /kept", "WORKDIR /keep"),
        ('["sfumato"]', '["sfumat"]'),
        ("--epsilon 3", "--epsilom 3"),
        ("python:3.12-slim AS", "python:3.9-slim AS"),
    ],
)
def test_a_dockerfile_that_does_not_fit_is_noticed(before, after):
    assert before in TEXT
    with pytest.raises((AssertionError, click.ClickException)):
        check(TEXT.replace(before, after))
