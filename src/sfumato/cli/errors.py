"""``sfumato errors``: what a code means, without network or clone; docs/errors.md is part of every wheel."""

from __future__ import annotations

import re
from pathlib import Path

import click

import sfumato.errors
from sfumato.cli import echo_json
from sfumato.errors import ConfigError, RunError, did_you_mean

_HOME = Path(sfumato.errors.__file__).resolve().parent
PLACES = (_HOME / "errors.md", _HOME.parent.parent / "docs" / "errors.md")  # a wheel's, and a clone's


@click.group("errors")
def command() -> None:
    """Explain the codes of errors."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_codes(as_json: bool) -> None:
    """All codes."""
    codes = sorted(sections())
    if as_json:
        echo_json(codes)
        return
    for code in codes:
        click.echo(code)


@command.command("show")
@click.argument("code")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(code: str, as_json: bool) -> None:
    """What CODE means and what to do, e.g. class-not-in-train."""
    known = sections()
    if code not in known:
        raise ConfigError(
            "unknown-code",
            f"no error has the code {code!r}. {did_you_mean(code, list(known))}".rstrip(),
            fix="The code stands in brackets: DataError [empty-class]. All: sfumato errors list",
        )
    if as_json:
        echo_json({"code": code, "text": known[code]})
        return
    click.echo(f"{code}\n\n{known[code]}")


def sections() -> dict[str, str]:
    """Each code with its section of docs/errors.md."""
    place = next((place for place in PLACES if place.is_file()), None)
    if place is None:
        raise RunError(
            "no-explanations",
            "this installation has no list of errors.",
            fix="Install the package again from its wheel, or read docs/errors.md in the repository.",
        )
    parts = re.split(r"^## (\S+)\n", place.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {code: text.strip() for code, text in zip(parts[1::2], parts[2::2], strict=True)}
