"""Every attack succeeds without its safeguard and fails with it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

ATTACKS = Path(__file__).resolve().parent.parent / "attacks"
SCRIPTS = [
    "loss_released",
    "nan_image",
    "no_clipping",
    "noise_per_rank",
    "resumed_noise",
    "seed_known",
    "shuffled_batches",
    "true_batch_size",
]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ATTACKS)
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_attack_succeeds_without_its_safeguard_and_fails_with_it(name):
    script = importlib.import_module(name)
    succeeded, told = script.without_safeguard()
    assert succeeded, told
    succeeded, told = script.with_safeguard()
    assert not succeeded, told


def test_the_table_names_every_script():
    text = (ATTACKS / "README.md").read_text()
    scripts = {path.stem for path in ATTACKS.glob("*.py")}
    others = {
        "audit_faults",
        "audit_run_faults",
        "membership",
        "kill_ranks",
        "kill_training",
        "mutants",
        "planting",
        "planted",
        "rank_hosts",
    }
    assert {*SCRIPTS, *others} == scripts
    assert all(f"{name}.py" in text for name in scripts)


@pytest.mark.parametrize(
    ("fault", "column", "epsilon_above"),
    [
        ("nothing planted", "head", None),
        ("divisor by true size", "head", 4.0),
        ("model randomness seeded", "dropout", 4.0),
    ],
)
def test_the_mechanism_audit_bites(fault, column, epsilon_above):
    """A few cells of ``python attacks/audit_faults.py``."""
    audit_faults = importlib.import_module("audit_faults")
    cell = audit_faults.audited(fault, column, trainings=40)
    assert bool(cell["violations"]) == cell["expected"] == (epsilon_above is not None), cell["violations"]
    assert epsilon_above is None or cell["epsilon"] > epsilon_above


def test_the_table_of_faults_in_the_docs_is_that_of_the_recorded_run():
    audit_faults = importlib.import_module("audit_faults")
    recorded = json.loads((ATTACKS.parent / "benchmarks" / "2026-11-18-audit-faults.json").read_text())
    text = audit_faults.DOCS.read_text(encoding="utf-8")
    written = text.split(audit_faults.BEGIN)[1].split(audit_faults.END)[0]
    assert written == audit_faults.docs_text(recorded)
    assert set(recorded["table"]) == set(audit_faults.ROWS)


def test_a_proven_epsilon_is_below_the_true_one_and_grows_with_the_evidence():
    import numpy as np

    from sfumato import accounting

    membership = importlib.import_module("membership")
    random = np.random.default_rng(0)
    event = accounting.SampledGaussian(noise_multiplier=1.0)
    true = accounting.epsilon([event], delta=1e-3)
    few, many = (
        membership.proven_epsilon(
            1 + random.standard_normal(size), random.standard_normal(size), delta=1e-3, threshold=2.0
        )
        for size in (500, 500_000)
    )
    assert few < many < true
    assert many > 1.5
    hopeless = membership.proven_epsilon(np.zeros(100), np.zeros(100), delta=1e-3, threshold=1.0)
    assert hopeless == -np.inf


def test_killed_trainings_resume_and_the_ledger_never_shows_too_little(tmp_path, monkeypatch):
    """A short form of ``python attacks/kill_training.py --kills 100``."""
    import os
    import subprocess
    import sys

    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    done = subprocess.run(
        [sys.executable, ATTACKS / "kill_training.py", "--kills", "6"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills: 6" in done.stdout


def test_killed_ranks_leave_a_run_that_another_number_of_them_finishes():
    """A short form of ``python attacks/kill_ranks.py --rounds 20``: each harm once, on 1, 2 and 4 ranks."""
    import os
    import subprocess
    import sys

    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    done = subprocess.run(
        [sys.executable, ATTACKS / "kill_ranks.py", "--rounds", "5", "--longest", "0.5"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGTERM to one: 1" in done.stdout
