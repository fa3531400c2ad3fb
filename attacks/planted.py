"""Plants the fault that SFUMATO_FAULT names: pytest plugin (``-p planted``), and hook for child processes.

Covered are the process of the tests, its forks, and Python programs that tests start with the environment
handed on: ``children/sitecustomize.py`` plants there too, as the program starts. Not covered are programs
that get an environment of their own, or ``python -I``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from planting import ROOT, Fault, PlantingError, load_faults

VARIABLE = "SFUMATO_FAULT"


def import_all(patch: pytest.MonkeyPatch) -> None:
    """What most faults import; nothing is changed."""
    import sfumato.run.session  # noqa: F401


# The control: all that is done for a fault, but no fault. A test that only minds the planting fails here too.
NOTHING = Fault("no-fault", (), import_all)


def plant() -> None:
    """Plant the named fault in this process, for good."""
    import sfumato

    place = Path(sfumato.__file__).resolve()
    if not place.is_relative_to(ROOT):
        raise PlantingError(f"the tests would use {place}, which is not in {ROOT}")
    name = os.environ[VARIABLE]
    chosen = NOTHING if name == NOTHING.name else load_faults()[name]
    chosen.plant(pytest.MonkeyPatch())


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are collected, so that they import what is patched."""
    from hypothesis import settings

    # The same examples each time, so that a verdict is not a matter of luck; and none kept for later tests.
    settings.register_profile("planted", derandomize=True, database=None)
    settings.load_profile("planted")
    plant()
    paths = [ROOT / "attacks" / "children", ROOT / "attacks", ROOT / "src"]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))  # for programs that the tests start
