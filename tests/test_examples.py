"""The examples run as they stand, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

OWN_LOOP = Path(__file__).resolve().parent.parent / "examples" / "own_loop.py"


def test_ones_own_loop_is_short_and_learns_within_its_budget():
    assert len(OWN_LOOP.read_text().splitlines()) < 40
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # a second one only waits on a busy machine
    done = subprocess.run(
        [sys.executable, str(OWN_LOOP)], capture_output=True, text=True, check=True, env=one_thread
    )
    accuracy, epsilon = map(float, re.search(r"accuracy (\S+), epsilon (\S+) at", done.stdout).groups())
    assert accuracy > 0.85  # ten classes: guessing gives 0.1
    assert 2.9 < epsilon <= 3.0


def test_ones_own_loop_protects_patients_and_ends_in_a_release():
    example = OWN_LOOP.with_name("own_loop_patients.py")
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, check=True, env=one_thread
    )
    assert "One patient is protected with all their images together." in done.stdout
    assert "ε = 3, δ = 0.0001" in done.stdout


def test_several_findings_are_learnt_in_closed_form_and_by_the_engine(tmp_path):
    """Tiny: both ways end, score every finding and stay in their budget; how well is measured elsewhere."""
    command = [sys.executable, str(OWN_LOOP.parent / "several_findings.py"), "--num-images", "240"]
    places = {"SFUMATO_LEDGER": str(tmp_path / "ledger.sqlite"), "SFUMATO_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out"), "--quick"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **places},
    )
    found = re.findall(r"^(\w+): epsilon (\S+), mean AUC (\S+)$", done.stdout, re.MULTILINE)
    assert [way for way, _, _ in found] == ["features", "engine"]
    assert all(7.9 < float(epsilon) <= 8.0 and 0.3 < float(area) < 1 for _, epsilon, area in found)
