"""How faults are written and planted: each is a function that patches the package inside the process.

    @fault("half-noise", tests=("privacy/test_privacy.py",))
    def half_noise(patch):
        from sfumato.privacy.plan import Plan
        original = Plan.noise
        patch.setattr(Plan, "noise", lambda self, total, **k: original(halved(self), total, **k))

Prefer to patch a function by its name: a line of text rots with the next refactoring. ``rewrite`` is for a
change in the middle of a function; it changes the function itself, wherever its name was imported to.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest

ROOT = Path(__file__).resolve().parent.parent
_REWRITTEN: dict[CodeType, str] = {}  # the source of code that was compiled here, to change it once more


class PlantingError(Exception):
    """A fault that cannot be planted as it is written."""


@dataclass(frozen=True)
class Fault:
    """``plant`` breaks the package; one of ``tests`` must notice."""

    name: str
    tests: tuple[str, ...]  # below tests/: a file, or file::test_name
    plant: Callable[[pytest.MonkeyPatch], None]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The package with this fault in it; whole again at the end."""
        with pytest.MonkeyPatch.context() as patch:
            self.plant(patch)
            yield


def fault(name: str, *, tests: tuple[str, ...]) -> Callable[[Callable[[pytest.MonkeyPatch], None]], Fault]:
    """Makes the decorated function a fault that one of ``tests`` must find."""
    return lambda plant: Fault(name, tests, plant)


def load_faults() -> dict[str, Fault]:
    """Every fault in ``attacks/faults``, by its name, in a fixed order.

    Two of one name, tests that are not there, and a file without a fault are errors.
    """
    found: dict[str, Fault] = {}
    for path in sorted((ROOT / "attacks" / "faults").glob("*.py")):
        module = importlib.import_module(f"faults.{path.stem}")
        here = [value for value in vars(module).values() if isinstance(value, Fault)]
        if not here:
            raise PlantingError(f"{path.name} holds no fault")
        for one in here:
            if one.name in found:
                raise PlantingError(f"{path.name}: there are two faults named {one.name}")
            check_tests(one)
            found[one.name] = one
    return found


def check_tests(one: Fault) -> None:
    """Refuse a fault whose tests are not there: it would be 'caught' by an empty collection."""
    if not one.tests:
        raise PlantingError(f"{one.name} names no test")
    for test in one.tests:
        file, *names = test.split("::")
        path = ROOT / "tests" / file
        if not path.is_file():
            raise PlantingError(f"{one.name}: there is no tests/{file}")
        for name in names:
            if not re.search(rf"^\s*(def|class) {re.escape(name.split('[')[0])}\b", path.read_text(), re.M):
                raise PlantingError(f"{one.name}: tests/{file} has no {name}")


def rewrite(patch: pytest.MonkeyPatch, place: str, old: str, new: str) -> None:
    """Compile the function at ``place`` ("module:function", "module:Class.method") with ``new`` for ``old``.

    ``old`` is text as it stands in the file and must be in that function exactly once. The function object
    stays the same and gets other code, so that decorators, defaults, closures, properties and names imported
    elsewhere all keep working. ``new`` may use what the function's module knows.
    """
    function = _function_at(place)
    source = _REWRITTEN.get(function.__code__) or inspect.getsource(function)
    if source.count(old) != 1:
        raise PlantingError(f"{place}: found {source.count(old)} times: {old}")
    changed = source.replace(old, new)
    code = _compiled(changed, function, place)
    _check_names(code, function, place)
    _REWRITTEN[code] = changed
    patch.setattr(function, "__code__", code)


def _function_at(place: str) -> FunctionType:
    """The plain function under whatever decorates it."""
    module, _, path = place.partition(":")
    found: object = importlib.import_module(module)
    for name in path.split("."):
        try:
            found = inspect.getattr_static(found, name)
        except AttributeError:
            raise PlantingError(f"{place}: there is no {name}") from None
    # a property, a cached property, a command of the command line; then functools.wraps and lru_cache
    for wrapper, inner in ((property, "fget"), (functools.cached_property, "func")):
        if isinstance(found, wrapper):
            found = getattr(found, inner)
    found = inspect.unwrap(getattr(found, "callback", found))  # type: ignore[arg-type]
    found = getattr(found, "__func__", found)
    if not isinstance(found, FunctionType) or found.__name__ != path.rpartition(".")[2]:
        raise PlantingError(f"{place} is not a function that can be rewritten: {found!r}")
    return found


def _compiled(source: str, function: FunctionType, place: str) -> CodeType:
    """Code for ``function`` out of its changed source, with the same closure."""
    # Under "if" it may stay as indented as it is in its file: dedenting would change texts inside it.
    indented = source[:1].isspace()
    try:
        tree = ast.parse(f"if True:\n{source}" if indented else source)
    except SyntaxError as error:
        raise PlantingError(f"{place}: {error}") from error
    definition = (tree.body[0].body if indented else tree.body)[0]
    definition.decorator_list = []
    free = function.__code__.co_freevars
    # Never run, but it keeps each variable of the closure in use, so that the closure fits as it is.
    unused = ast.parse("if False:\n    ({},)".format(", ".join(free))).body if free else []
    definition.body = [*definition.body, *unused]
    outer = ast.parse(f"def outer({', '.join(free)}): pass")
    # "global" lets a function that calls itself find itself in its module, as before.
    named = [] if function.__name__ in free else [ast.Global(names=[function.__name__])]
    outer.body[0].body = [*named, definition]
    ast.increment_lineno(definition, function.__code__.co_firstlineno - 1 - indented)
    compiled = compile(ast.fix_missing_locations(outer), inspect.getfile(function), "exec")
    (around,) = (part for part in compiled.co_consts if isinstance(part, CodeType))
    (code,) = (
        part
        for part in around.co_consts
        if isinstance(part, CodeType) and part.co_name == function.__name__  # not a default's lambda
    )
    if code.co_freevars != free:
        raise PlantingError(f"{place}: the closure was {free}, now {code.co_freevars}")
    return code.replace(co_qualname=function.__code__.co_qualname)


def _check_names(code: CodeType, function: FunctionType, place: str) -> None:
    """Refuse names that nobody defines: every test would 'catch' the NameError."""
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname == "LOAD_GLOBAL" and not (
            name in function.__globals__ or hasattr(builtins, name)
        ):
            raise PlantingError(f"{place}: {name} is not known there")
    for part in code.co_consts:
        if isinstance(part, CodeType):
            _check_names(part, function, place)
