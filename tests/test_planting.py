"""Planted faults can all be planted, are active while they are, and leave nothing behind."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

ATTACKS = Path(__file__).resolve().parent.parent / "attacks"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ATTACKS)


@pytest.fixture
def planting() -> ModuleType:
    return importlib.import_module("planting")


@pytest.fixture
def mutants() -> ModuleType:
    return importlib.import_module("mutants")


def outer(amount: int) -> Callable[[int], int]:
    def inner(x: int, *, more: int = 100) -> int:
        return x + amount + more

    return inner


inner = outer(10)


@functools.cache
def cached(x: int) -> int:
    return x + 1


def recursive(x: int) -> int:
    return recursive(x - 1) + 1 if x else 0


@contextmanager
def managed(x: int) -> Iterator[int]:
    yield x + 1


class Parent:
    def total(self) -> int:
        return 1


class Child(Parent):
    factor = 3

    def total(self) -> int:
        text = """
at the margin"""
        return super().total() + len(text)

    @staticmethod
    def still(x: int) -> int:
        return x + 1

    @classmethod
    def of_class(cls, x: int) -> int:
        return x + cls.factor

    @property
    def shown(self) -> int:
        return self.factor + 1


def test_every_planted_fault_still_applies(planting, mutants):
    """As ``python attacks/mutants.py --check``: a refactoring that breaks a fault is noticed at once."""
    faults = planting.load_faults().values()
    assert len(faults) >= 19
    assert mutants.check_all(faults) == []
    gone = planting.Fault("gone", ("test_planting.py",), lambda patch: patch.setattr(Parent, "gone", 1))
    assert mutants.check_all([gone]) == [f"gone: AttributeError: {Parent!r} has no attribute 'gone'"]


def test_a_planted_fault_is_active_and_then_gone(planting):
    import torch

    from sfumato.gradients import clipping

    nan_passes = planting.load_faults()["nan-passes"]
    norms = torch.tensor([float("nan")], dtype=torch.float64)
    assert clipping.clip_factors(norms, 1.0).item() == 0
    with nan_passes.planted():
        assert clipping.clip_factors(norms, 1.0).isnan().all()
    assert clipping.clip_factors(norms, 1.0).item() == 0


@pytest.mark.parametrize(
    ("place", "old", "new", "call", "before", "after"),
    [
        ("inner", "x + amount", "x - amount", lambda: inner(1, more=0), 11, -9),
        ("inner", "amount + more", "more", lambda: inner(1), 111, 101),  # one variable of the closure less
        ("cached", "+ 1", "+ 2", lambda: cached.__wrapped__(1), 2, 3),
        ("recursive", "+ 1", "+ 2", lambda: recursive(3), 3, 6),  # it finds itself in its module
        ("managed", "x + 1", "x + 2", lambda: managed(1).__enter__(), 2, 3),
        ("Child.total", "len(text)", "2 * len(text)", lambda: Child().total(), 15, 29),
        ("Child.still", "+ 1", "+ 2", lambda: Child.still(1), 2, 3),
        ("Child.of_class", "x +", "x -", lambda: Child.of_class(1), 4, -2),
        ("Child.shown", "+ 1", "+ 2", lambda: Child().shown, 4, 5),
    ],
)
def test_a_function_is_rewritten_whatever_it_is_wrapped_in(planting, place, old, new, call, before, after):
    assert call() == before
    with pytest.MonkeyPatch.context() as patch:
        planting.rewrite(patch, f"{__name__}:{place}", old, new)
        assert call() == after
    assert call() == before


def test_a_function_can_be_rewritten_twice(planting):
    held = Child.still  # as if imported by its name elsewhere
    with pytest.MonkeyPatch.context() as patch:
        planting.rewrite(patch, f"{__name__}:Child.still", "x + 1", "x + 1 + 4")
        planting.rewrite(patch, f"{__name__}:Child.still", "+ 4", "+ 7")
        assert held(1) == 9
    assert held(1) == 2


@pytest.mark.parametrize(
    ("place", "old", "new", "told"),
    [
        ("cached", "x - 1", "x", "found 0 times"),
        ("inner", " + ", " - ", "found 2 times"),
        ("gone", "x", "y", "there is no gone"),
        ("Child.factor", "x", "y", "not a function"),
        ("cached", "x + 1", "x + unheard_of", "unheard_of is not known"),  # would be 'caught' by any test
        ("cached", "x + 1", "x + (", "never closed"),
    ],
)
def test_a_rewrite_that_does_not_fit_is_an_error(planting, place, old, new, told):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(planting.PlantingError, match=told):
        planting.rewrite(patch, f"{__name__}:{place}", old, new)


def test_tests_that_are_not_there_are_an_error(planting):
    for tests in ((), ("test_gone.py",), ("test_planting.py::test_gone",)):
        with pytest.raises(planting.PlantingError):
            planting.check_tests(planting.Fault("some", tests, lambda patch: None))
    planting.check_tests(
        planting.Fault(
            "some", ("test_planting.py::test_a_function_can_be_rewritten_twice",), lambda patch: None
        )
    )


def test_the_parts_are_all_of_it(planting, mutants):
    faults = list(planting.load_faults().values())
    parts = [fault.name for number in range(1, 7) for fault in mutants.part_of(faults, f"{number}/6")]
    assert sorted(parts) == sorted(fault.name for fault in faults)
    assert mutants.part_of(faults, "6") == mutants.part_of(faults, f"{mutants.commit_number() % 6 + 1}/6")
    for wrong in ("0/6", "7/6", "0", "x"):
        with pytest.raises(SystemExit, match="--part"):
            mutants.part_of(faults, wrong)


def test_the_runner_tells_a_fault_that_is_caught_from_one_that_survives(planting, mutants, monkeypatch):
    """Also in a program that a test starts."""
    half_noise = planting.load_faults()["half-noise"]
    assert mutants.examine(half_noise, half_noise.tests).code == 1
    elsewhere = ["mechanism/test_sampling.py::test_a_rate_of_one_takes_everyone"]
    assert mutants.examine(half_noise, elsewhere).code == 0
    monkeypatch.setenv("SFUMATO_FAULT", half_noise.name)
    paths = [ATTACKS / "children", ATTACKS, ATTACKS.parent / "src"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    program = "from sfumato.privacy.plan import Plan; print(Plan.noise.__qualname__)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "half_noise.<locals>.noise"
