"""Imports never go upwards or in circles, need no particular system, and nothing is ever unpickled."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "sfumato"

# Each part of the package, from the bottom up. A file imports from its own part and from parts further down;
# inside one tier the order of the list holds too, so that no two parts can need each other.
TIERS = {
    "mechanism": [
        "errors",
        "randomness",
        "noise",
        "discrete_gaussian",
        "sampling",
        "accounting",
        "gradients",
    ],
    "coupling": ["files", "privacy", "ledger"],
    "materials": ["data", "layers", "features", "models", "recipes"],
    "method": ["training", "release"],
    "run": ["doctor", "reporting", "run", "audit", "study", "tune", "bench", "serve"],
    "surface": ["cli", "__init__", "__main__"],
}
ORDER = [part for parts in TIERS.values() for part in parts]
# The mechanism's parts do not import each other, but for the source of randomness at their bottom.
FOUNDATIONS = {"noise": {"randomness"}, "discrete_gaussian": {"randomness"}, "sampling": {"randomness"}}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "core", "engine", "misc", "base"}
UNIX_MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
UNIX_FUNCTIONS = {
    "fork",
    "getloadavg",
    "getuid",
    "sched_getaffinity",
    "statvfs",
    "sysconf",
    "uname",
    "SIGKILL",
}
# Files of one package that need each other's types, and nothing else of each other.
TYPES_OF_EACH_OTHER = {
    ("privacy.statement", "privacy.plan"): "a plan makes its statement, and a statement is made of a plan",
    ("privacy.plan_rules", "privacy.plan"): "a plan is checked when it is made, by rules about a plan",
    ("run.decision", "run.prepare"): "a decision is made of what was prepared, which holds its first part",
    ("run.canaries", "run.prepare"): "canaries join what was prepared, which asks whether they have room",
    ("ledger.account", "ledger.ledger"): "a ledger gives out accounts, and an account writes to its ledger",
}
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The file or package right below ``sfumato`` that ``path`` belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(node: ast.AST) -> list[str]:
    """What an import statement names, with dots; nothing for other nodes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def imported_parts(tree: ast.Module, parts: set[str]) -> set[str]:
    """The parts of ``sfumato`` that a file imports, at its top, inside functions or for types only."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            found.add("a relative import")
            continue
        for name in imported_names(node):
            root, *rest = name.split(".")
            if root == "sfumato" and rest != ["__version__"]:
                found.add(rest[0] if rest and rest[0] in parts else "__init__")
    return found


def forbidden_imports(part: str, tree: ast.Module, parts: set[str]) -> list[str]:
    """What a file of ``part`` imports and may not."""
    allowed = {part, "errors"} | FOUNDATIONS.get(part, set())
    if part not in TIERS["mechanism"]:
        allowed |= set(ORDER[: ORDER.index(part)])
    return sorted(imported_parts(tree, parts) - allowed)


def dangerous_calls(tree: ast.Module) -> list[str]:
    """Whatever could run code out of a file: unpicklers, eval, exec, unguarded loads."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLERS:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            guards = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            if name in {"eval", "exec", "__import__", "builtins.eval", "builtins.exec", "torch.save"}:
                found.append(name)
            if name == "torch.load" and guards.get("weights_only") is not True:
                found.append(name)
            if name in {"np.load", "numpy.load", "np.save"} and guards.get("allow_pickle") is not False:
                found.append(name)
    return found


def without_types(tree: ast.Module) -> ast.Module:
    """The file without what it imports for type checkers only."""
    kept = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return ast.Module(kept, [])


def needs(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """For each file, by its dotted name, those that it imports, inside functions and for types too."""
    found = {}
    for name, source in sources.items():
        tree = ast.parse(source)
        found[name] = files_of(tree, sources) - {name}
        for other in found[name] - files_of(without_types(tree), sources):
            if (name, other) in TYPES_OF_EACH_OTHER:
                found[name] = found[name] - {other}
    return found


def files_of(tree: ast.Module, sources: Mapping[str, str]) -> set[str]:
    """Those of ``sources`` that are imported: ``sfumato.a.b.c`` is a.b.c, or what has it: a.b, or a."""
    found = set()
    for dotted in (name for node in ast.walk(tree) for name in imported_names(node)):
        root, _, name = dotted.partition(".")
        while root == "sfumato" and name and name not in sources:
            name = name.rpartition(".")[0]
        found |= {name} if root == "sfumato" and name else set()
    return found


def absent_elsewhere(tree: ast.Module) -> list[str]:
    """What macOS or Windows lack: modules, and functions that nobody has asked for with hasattr."""
    words = [name for node in ast.walk(tree) for name in imported_names(node)]
    asked = {
        ast.literal_eval(node.args[1])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr"
    }
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return sorted({word.split(".")[0] for word in words} & UNIX_MODULES | (used & UNIX_FUNCTIONS) - asked)


def test_every_file_imports_from_its_own_tier_or_below() -> None:
    parts = {part_of(path) for path in files()}
    assert parts == set(ORDER)  # a new or renamed part has its place
    wrong = {
        str(path.relative_to(PACKAGE)): bad
        for path in files()
        if (bad := forbidden_imports(part_of(path), ast.parse(path.read_text()), parts))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("noise", "from sfumato.sampling import PoissonSampling"),  # mechanism files do not know each other
        ("gradients", "def late():\n    from sfumato import accounting"),
        ("accounting", "from sfumato.randomness import SecureSource"),
        ("sampling", "from sfumato.privacy import Plan"),
        ("privacy", "import sfumato.training"),
        ("ledger", "from sfumato.data import ImageSet"),
        ("training", "from sfumato.cli import echo_json"),
        ("training", "from sfumato import Plan"),  # through the front door, which stands above
        ("training", "from .inputs import Units"),
        ("features", "from sfumato.models import create_model"),  # models are built on features
        ("release", "from sfumato.run.state import RunState"),
        ("reporting", "import sfumato.run"),
        ("data", "def late():\n    from sfumato.recipes import Recipe"),  # inside functions too
    ],
)
def test_an_import_upwards_is_found(part: str, source: str) -> None:
    parts = {part_of(path) for path in files()}
    assert forbidden_imports(part, ast.parse(source), parts)
    assert not forbidden_imports(part, ast.parse("from sfumato.errors import ConfigError"), parts)


def test_no_files_import_each_other_in_a_circle() -> None:
    named = {path.relative_to(PACKAGE).with_suffix("").parts: path.read_text() for path in files()}
    sources = {".".join(parts).removesuffix(".__init__"): text for parts, text in named.items()}
    TopologicalSorter(needs(sources)).prepare()  # raises CycleError with the files of a circle


@pytest.mark.parametrize(
    "sources",
    [
        {"data.a": "from sfumato.data import b", "data.b": "from sfumato.data.a import name"},
        {"data.a": "def late():\n    import sfumato.data.b", "data.b": "from sfumato.data.a import name"},
        {"data": "from sfumato.data.a import name", "data.a": "from sfumato.data import name"},
        {
            "data.a": "if TYPE_CHECKING:\n    from sfumato.data.b import name",
            "data.b": "from sfumato.data.a import name",
        },
        {  # listed, but not for its type only
            "privacy.plan": "from sfumato.privacy.statement import name",
            "privacy.statement": "from sfumato.privacy.plan import name",
        },
    ],
)
def test_a_circle_is_found(sources: dict[str, str]) -> None:
    with pytest.raises(CycleError):
        TopologicalSorter(needs(sources)).prepare()
    TopologicalSorter(needs(dict(list(sources.items())[:1]))).prepare()


def test_nothing_is_unpickled_and_no_text_is_run() -> None:
    found = {
        str(path.relative_to(PACKAGE)): calls
        for path in files()
        if (calls := dangerous_calls(ast.parse(path.read_text())))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "torch.load(file, weights_only=choice)",
        "np.load(file)",
        "np.load(file, allow_pickle=True)",
        "value = eval(text)",
        "exec(text)",
    ],
)
def test_a_dangerous_call_is_found(source: str) -> None:
    assert dangerous_calls(ast.parse(source))
    assert not dangerous_calls(ast.parse("model.eval(); torch.load(file, weights_only=True)"))


def test_nothing_is_used_that_another_system_lacks() -> None:
    found = {
        str(path.relative_to(PACKAGE)): words
        for path in files()
        if (words := absent_elsewhere(ast.parse(path.read_text())))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source", ["import resource", "from fcntl import flock", "os.sched_getaffinity(0)", "late = os.fork"]
)
def test_a_need_of_unix_is_found(source: str) -> None:
    assert absent_elsewhere(ast.parse(source))
    assert not absent_elsewhere(ast.parse("hasattr(os, 'sched_getaffinity') and os.sched_getaffinity(0)"))


def test_no_file_has_a_vague_name_or_asks_for_a_certain_device() -> None:
    assert {path.stem for path in files()} & VAGUE_NAMES == set()
    assert [path.name for path in files() if ".cuda()" in path.read_text()] == []


MAX_FILE_LINES, MAX_FUNCTION_LINES = 350, 60


def long_functions(source: str) -> list[str]:
    """The functions that are too long to be read at a glance, their docstrings counted."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def test_files_and_functions_have_a_size_that_reads_well() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in files()}
    assert [name for name, text in sources.items() if len(text.splitlines()) > MAX_FILE_LINES] == []
    assert {name: found for name, text in sources.items() if (found := long_functions(text))} == {}


def test_a_long_function_is_found() -> None:
    assert long_functions("def long():\n" + "    pass\n" * MAX_FUNCTION_LINES) == ["long"]
    assert long_functions("def short():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1)) == []
