"""``sfumato recipes`` as people and programs read it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest
from click.testing import CliRunner

from sfumato.cli.recipes import command
from sfumato.recipes.families import list_families, load_family
from sfumato.recipes.recipe import list_recipes, load_recipe
from sfumato.recipes.schema import recipe_schema


def call(*arguments: str, columns: int = 80) -> str:
    done = CliRunner().invoke(command, arguments, env={"COLUMNS": str(columns)}, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_recipes_to_begin_with_come_before_the_papers() -> None:
    rows = json.loads(call("list", "--json"))
    names = [row["name"] for row in rows]
    assert sorted(names) == list_recipes()
    groups = [row["group"] for row in rows]
    assert groups == sorted(groups)  # "begin" before "paper"
    assert {name.split("/")[0] for name, group in zip(names, groups, strict=True) if group == "paper"} == {
        "bao2024",
        "de2022",
        "scalenorm2022",
        "smoothnets2022",
    }
    text = call("list")
    assert text.index("To begin with") < text.index("demo/digits") < text.index("The papers' own")
    assert text.index("The papers' own") < text.index("de2022/table3 ") < text.index("de2022/table10 ")
    assert "de2022/cifar10-wrn16-4-eps1 " not in text  # newcomers are not buried under rows
    assert len(text.splitlines()) < 90


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_list_fits_the_terminal_and_cuts_no_word(columns: int) -> None:
    together = " ".join(call("list", columns=columns).split())
    for name in list_families():
        family = load_family(name)
        assert f"{name} {family.title} ({len(family.recipes)})" in together or not family.recipes
    text = call("list", "*", columns=columns)
    assert max(map(len, text.splitlines())) <= columns
    together = " ".join(text.split())
    for name in list_recipes():
        assert f"{name} {load_recipe(name).reference.title}" in together
    assert not any(line.rstrip().endswith((" ε", " =", " ε =")) for line in text.splitlines())


def test_a_group_alone_has_no_heading() -> None:
    assert call("list", "demo/*").startswith("demo/digits ")
    assert len(call("list", "de2022/cifar10-*").splitlines()) == 12


def test_the_recipes_of_a_table_are_listed_by_its_name() -> None:
    rows = json.loads(call("list", "de2022/table5", "--json"))
    assert len(rows) == 16
    assert {row["family"] for row in rows} == {"de2022/table5"}
    assert call("list", "de2022/table5").count("de2022/table5-cifar100-all-eps") == 4


def test_the_reference_is_shown_and_listed() -> None:
    name = "de2022/cifar10-wrn40-4-eps8"
    assert tomllib.loads(call("show", name))["reference"]["value"] == 81.4
    shown = json.loads(call("show", name, "--json"))
    assert (shown["reference"]["value"], shown["reference"]["spread"]) == (81.4, 0.2)
    assert "reference" not in shown["settings"]
    listed = {row["name"]: row["reference"] for row in json.loads(call("list", "--json"))}
    assert listed[name] == shown["reference"]
    assert listed["fast/patches"]["ours"][0]["median"] == 70.0


def test_the_schema_is_printed() -> None:
    assert json.loads(call("schema")) == recipe_schema() == json.loads(call("schema", "--json"))


def test_reading_recipes_does_not_wait_for_torch() -> None:
    script = (
        "import sys; from sfumato.cli import main\n"
        "main(['recipes', 'list', '--json'])\n"
        "heavy = {'torch', 'numpy', 'scipy', 'dp_accounting'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
