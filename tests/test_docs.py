"""The documents say what the code does: codes, commands, links, examples and versions are checked."""

from __future__ import annotations

import ast
import csv
import os
import re
import resource
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import sfumato
from sfumato import errors
from sfumato.cli import cli

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = sorted(
    page
    for place in (".", "docs", "results", "benchmarks", "attacks", "examples")
    for page in (ROOT / place).glob("*.md")
)
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type)}
HEAVY = ("torch", "numpy", "scipy", "matplotlib", "dp_accounting", "PIL")


def codes_raised(source: str) -> list[str | None]:
    """The first argument of every error of ours that is created; None where it is not a literal."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ERRORS:
            first = node.args[0] if node.args else None
            found.append(getattr(first, "value", None))
    return found


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language ("" for those without)."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for name, text in fences if name == language]


def commands_in(page: str) -> list[list[str]]:
    """Arguments of each line of a page's blocks that calls sfumato; two spaces end the command."""
    lines = "\n".join(blocks(page, "") + blocks(page, "bash")).splitlines()
    calls = [re.split(r"\s{2,}", line)[0] for line in lines if line.startswith("sfumato ")]
    return [shlex.split(call, comments=True)[1:] for call in calls]


def parse(arguments: list[str]) -> None:
    """Read a command line as click would, without running it."""
    command: click.Command = cli
    parent = None
    while isinstance(command, click.Group):
        parent = click.Context(command, parent=parent, info_name=command.name)
        name, command, arguments = command.resolve_command(parent, arguments)
    try:
        command.make_context(name, list(arguments), parent=parent)
    except click.BadParameter as error:
        if "does not exist" not in error.format_message():  # the documents' files are the reader's
            raise
    if "--recipe" in arguments:
        from sfumato.recipes.recipe import list_recipes

        recipe = arguments[arguments.index("--recipe") + 1]
        assert recipe.endswith(".toml") or recipe in list_recipes(), recipe


def anchors(page: str) -> set[str]:
    """The addresses of a page's headings."""
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path, text: str) -> list[str]:
    """Links of a page to files or headings that do not exist."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # One thread: the examples are small, and a busy machine should not make them slow.
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "SFUMATO_LEDGER": str(folder / "ledger.sqlite")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder, env=surroundings, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def test_every_error_code_has_its_section_and_every_section_its_code() -> None:
    raised = [code for path in SOURCES for code in codes_raised(path.read_text(encoding="utf-8"))]
    assert None not in raised
    headings = re.findall(
        r"^## (.+)$", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(headings) == sorted(set(raised))


def test_the_scan_finds_codes_and_sees_those_that_are_not_literal() -> None:
    source = 'raise DataError("a-code", "x")\nraise errors.RunError(code, "x")\nraise ValueError("not-ours")'
    assert codes_raised(source) == ["a-code", None]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_found() -> None:
    text = "# Here\n[a](nowhere.md) [b](README.md#no-such-heading) [c](#here) [d](https://example.org)"
    assert broken_links(ROOT / "page.md", text.replace("(#here)", "(README.md#python)")) == [
        "nowhere.md",
        "README.md#no-such-heading",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_in_the_documents_is_understood(page: Path) -> None:
    for arguments in commands_in(page.read_text(encoding="utf-8")):
        parse(arguments)


def test_a_command_that_does_not_exist_is_found() -> None:
    assert len(commands_in((ROOT / "README.md").read_text(encoding="utf-8"))) >= 5
    for wrong in (
        ["train", "xrays", "--epsilonn", "3"],
        ["trian", "xrays"],
        ["ledger", "sho"],
        ["train", "--epsilon", "x"],
    ):
        with pytest.raises(click.UsageError):
            parse(wrong)


def test_the_python_example_of_the_readme_runs_and_refuses_a_wrong_clip(tmp_path: Path) -> None:
    (example,) = blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python")
    assert len([line for line in example.splitlines() if line]) <= 12
    done = python(example, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(ε = 3, δ = 0.0001)-differentially private" in done.stdout

    broken = example.replace("clip_norm=plan.clip_norm", "clip_norm=2 * plan.clip_norm")
    refused = python(broken, tmp_path)
    assert refused.returncode != 0
    assert "PrivacyError" in refused.stderr


@pytest.mark.parametrize(
    "recipe",
    ["fast/patches", "fast/scatter", "fast/combined", "fast/wide", "fast/aligned", "fast/pretrained"],
)
def test_figures_of_the_readme_lie_among_the_measured_ones(recipe: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    budgets = re.search(r"^\| ε \|(.+)\|$", text, re.MULTILINE)
    figures = re.search(rf"^\| `{recipe}` \|(.+)\|$", text, re.MULTILINE)
    assert budgets is not None
    assert figures is not None
    with (ROOT / "results" / "results.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["recipe"], row["data"]) == (recipe, "cifar10")]
    pairs = list(zip(budgets[1].split("|"), figures[1].split("|"), strict=True))[:4]
    for budget, figure in pairs:
        measured = [100 * float(row["value"]) for row in rows if float(row["epsilon"] or 0) == float(budget)]
        assert min(measured) - 0.05 <= float(figure) <= max(measured) + 0.05
        assert not min(measured) - 0.05 <= float(figure) + 2 <= max(measured) + 0.05  # seeds differ by less


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_the_documents_is_python(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8"), "python"):
        ast.parse(block)


def test_importing_and_asking_for_help_loads_nothing_heavy(tmp_path: Path) -> None:
    loaded = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"
    ask = "from sfumato.cli import cli; cli.main(['--help'], standalone_mode=False)"
    done = python(f"import sfumato\n{ask}\n{loaded}", tmp_path)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
    assert "torch" in python(f"import sfumato; sfumato.clipped_sum\n{loaded}", tmp_path).stdout


def test_help_answers_in_under_a_third_of_a_second() -> None:
    def processor_seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    taken = []
    for _ in range(3):
        before = processor_seconds()
        subprocess.run([sys.executable, "-m", "sfumato", "--help"], capture_output=True, check=True)
        taken.append(processor_seconds() - before)
    assert min(taken) < 0.3  # processor time: one thread, so that a busy machine does not decide


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert sfumato.__version__ == version
    latest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert latest is not None
    assert latest[1] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
