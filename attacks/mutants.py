"""Faults planted into the package, one at a time: the test suite must find every one of them.

    python attacks/mutants.py                  # all; prints a table, and fails if a fault survives
    python attacks/mutants.py half-noise       # some
    python attacks/mutants.py --part 2/6       # the second sixth; --part 6: the sixth that this commit picks
    python attacks/mutants.py --check          # only whether each can still be planted; seconds

The faults are in ``attacks/faults``, one file per area; ``planting.py`` says how they are written. For each,
only the tests that it names are run. The control runs them all without a fault and must pass.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from planted import NOTHING, VARIABLE
from planting import ROOT, Fault, PlantingError, load_faults

PROCESSES = 2  # one thread each: small tensors gain nothing from a second one


@dataclass(frozen=True)
class Verdict:
    """What the tests said: pytest's exit code, the line that tells why, and how long it took."""

    code: int
    told: str
    seconds: float


def examine(fault: Fault, tests: Sequence[str]) -> Verdict:
    """Run ``tests`` with the fault planted, in a process of their own, up to the first that fails."""
    began = time.monotonic()
    environment = {
        **os.environ,
        VARIABLE: fault.name,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "attacks")]),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "250",  # room for the reason, behind the name of the test that failed
    }
    command = [sys.executable, "-m", "pytest", "-x", "-p", "planted", "-p", "no:cacheprovider"]
    places = [str(ROOT / "tests" / test) for test in tests]
    done = subprocess.run(
        [*command, "--durations=0", "--durations-min=1e9", *places],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["nothing was printed"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    totals = [line for line in lines if re.search(r"\d (passed|failed)", line)]
    return Verdict(done.returncode, (failed or totals or lines)[-1], time.monotonic() - began)


def check_all(faults: Sequence[Fault]) -> list[str]:
    """Plant one after another in this process, undoing each: what can no longer be planted, and why."""
    rotten = []
    for fault in faults:
        try:
            with fault.planted():
                pass
        except Exception as error:  # whatever a fault stumbles over, the others are still looked at
            rotten.append(f"{fault.name}: {type(error).__name__}: {error}")
    return rotten


def part_of(faults: Sequence[Fault], wanted: str) -> list[Fault]:
    """``"2/6"``: every sixth fault from the second on; ``"6"``: the commit's hash picks which."""
    first, _, last = wanted.rpartition("/")
    try:
        parts = int(last)
        number = int(first) if first else commit_number() % parts + 1
    except (ValueError, ZeroDivisionError):
        parts = number = 0
    if not 1 <= number <= parts:
        raise SystemExit(f"--part {wanted}: give K/N with 1 <= K <= N, or N")
    return list(faults[number - 1 :: parts])


def commit_number() -> int:
    """The commit's hash as a number, so that a run can be repeated; the day without a repository."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout, 16) if done.returncode == 0 else time.localtime().tm_yday


def all_are_caught(faults: Sequence[Fault]) -> bool:
    """Print a line for the control and for each fault; whether the tests pass without, and fail with each."""
    tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
    caught = 0
    with ThreadPoolExecutor(PROCESSES) as pool:
        control = pool.submit(examine, NOTHING, tests)
        verdicts = [pool.submit(examine, fault, fault.tests) for fault in faults]
        for fault, waiting in zip(faults, verdicts, strict=True):
            verdict = waiting.result()
            # 1: a test failed; any other code is no verdict
            word = {0: "SURVIVES", 1: "caught"}.get(verdict.code, "NO VERDICT")
            caught += word == "caught"
            report(fault.name, word, verdict)
        sound = control.result().code == 0
        report(NOTHING.name, "passes" if sound else "FAILS", control.result())
    print(f"{caught} of {len(faults)} faults are caught.")
    return sound and caught == len(faults)


def report(name: str, word: str, verdict: Verdict) -> None:
    print(f"{name:<36} {word:<10} {verdict.seconds:4.0f} s  {verdict.told[:200]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="faults to plant; all by default")
    parser.add_argument("--check", action="store_true", help="only see whether each can still be planted")
    parser.add_argument("--part", metavar="K/N", help="the K-th of N parts; N alone: the commit picks one")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))  # the package beside this file, whatever is installed
    try:
        known = load_faults()
    except PlantingError as error:
        raise SystemExit(str(error)) from error
    unknown = [name for name in options.names if name not in known]
    if unknown:
        raise SystemExit(f"there is no fault {unknown[0]}; known: {', '.join(known)}")
    faults = [known[name] for name in options.names or known]
    if options.part:
        faults = part_of(faults, options.part)
    if not options.check:
        return 0 if all_are_caught(faults) else 1
    rotten = check_all(faults)
    print(*rotten, f"{len(faults) - len(rotten)} of {len(faults)} faults can be planted.", sep="\n")
    return 1 if rotten else 0


if __name__ == "__main__":
    sys.exit(main())
