"""What ``import sfumato`` gives: every name, on first use, and as type checkers see it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sfumato

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def names_for_type_checkers() -> dict[str, str]:
    """The names imported under TYPE_CHECKING, and where from."""
    tree = ast.parse(Path(sfumato.__file__).read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    found = {}
    for node in guarded.body:
        assert isinstance(node, ast.ImportFrom)
        found |= {alias.name: str(node.module) for alias in node.names}
    return found


def test_every_name_is_there_and_type_checkers_see_the_same() -> None:
    seen = names_for_type_checkers()
    assert {*seen, "__version__"} == set(sfumato.__all__)
    for name, home in seen.items():
        value = getattr(sfumato, name)
        assert value is (
            sys.modules[f"sfumato.{name}"] if home == "sfumato" else getattr(sys.modules[home], name)
        )
    with pytest.raises(AttributeError, match="no_such_name"):
        sfumato.no_such_name  # noqa: B018


def test_packages_come_on_first_use_and_torch_not_before() -> None:
    script = (
        "import sfumato, sys; before = 'torch' in sys.modules;"
        "print(before, sfumato.training.EngineSum.__name__, sfumato.audit.Bound.__name__,"
        " sfumato.run.train is sfumato.train)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "EngineSum", "Bound", "True"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_come_in_by_the_front_door(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not str(node.module).startswith("sfumato.")
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("sfumato.") for alias in node.names)
