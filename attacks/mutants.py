"""Faults planted into a copy of the code, one at a time: the test suite must find every one of them.

    python attacks/mutants.py            # all; prints a table, and fails if a fault survives
    python attacks/mutants.py half-noise

Each fault replaces one piece of text in one file, and it is an error if the text is not there exactly
once. Only the tests named with a fault are run; the control runs them all on the unchanged copy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Fault:
    """``old`` in ``file`` becomes ``new``; one of ``tests`` must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


TWELVE = [
    Fault(
        "clip-after-averaging",
        "gradients/clipped.py",
        "    factors = clipping.factors(squares, clip_norm, MARGIN_IN_EPS * eps)\n",
        "    factors = clipping.factors(squares, clip_norm, MARGIN_IN_EPS * eps)\n"
        "    factors = {key: torch.full_like(one, one.mean().item()) for key, one in factors.items()}\n",
        ("test_sensitivity.py", "test_training.py"),
    ),
    Fault(
        "wrong-divisor",
        "training.py",
        "noisy, scale=1 / divisor,",
        "noisy, scale=plan.batch_size / max(1, len(indices)) / divisor,",
        ("test_training.py",),
    ),
    Fault(
        "noise-before-clipping",
        "privacy.py",
        "        return add_noise(total.gradients, stddev=stddev, source=source, step=step)\n",
        "        noisy = add_noise(total.gradients, stddev=stddev, source=source, step=step)\n"
        "        norm = sum(value.double().square().sum() for value in noisy.values()) ** 0.5\n"
        "        return {key: one * min(1.0, float(self.clip_norm / norm)) for key, one in noisy.items()}\n",
        ("test_privacy.py",),
    ),
    Fault(
        "half-noise",
        "privacy.py",
        "stddev = self.noise_multiplier * total.sensitivity\n",
        "stddev = 0.5 * self.noise_multiplier * total.sensitivity\n",
        ("test_privacy.py",),
    ),
    Fault(
        "noise-per-microbatch",
        "training.py",
        "        noisy = plan.noise(total, source=source, step=step)\n",
        "        noisy = plan.noise(total, source=source, step=step)\n"
        "        for _ in range((len(indices) - 1) // max_rows):\n"
        "            total = dataclasses.replace(total, gradients=noisy)\n"
        "            noisy = plan.noise(total, source=source, step=step)\n",
        ("test_training.py",),
    ),
    Fault(
        "wrong-sampling-rate",
        "privacy.py",
        "return PoissonSampling(sampling_rate=self.sampling_rate, num_steps=self.num_steps)",
        "return PoissonSampling(sampling_rate=min(1.0, 1.1 * self.sampling_rate), num_steps=self.num_steps)",
        ("test_privacy.py",),
    ),
    Fault(
        "missing-parameter",
        "gradients/clipped.py",
        "    squares = {name: piece.squared_norms for name, piece in pieces.items()}\n",
        "    squares = {name: piece.squared_norms for name, piece in pieces.items()}\n"
        "    squares[next(reversed(squares))] = torch.zeros_like(squares[next(reversed(squares))])\n",
        ("test_sensitivity.py",),
    ),
    Fault(
        "nan-passes",
        "gradients/clipping.py",
        "    return torch.where(norms.isfinite() & (factors > SMALLEST), factors, 0.0)\n",
        "    return factors\n",
        ("test_sensitivity.py",),
    ),
    Fault(
        "average-of-raw-gradients",
        "training.py",
        "        yield _record(step, rate, began, losses=total.losses,",
        "        for name, value in average.weights.items():\n"
        "            value.sub_(total.gradients[name], alpha=rate / divisor)\n"
        "        yield _record(step, rate, began, losses=total.losses,",
        ("test_training.py", "test_invariants.py"),
    ),
    Fault(
        "seed-reuse-on-resume",
        "randomness.py",
        "self._stream = _encryptor(os.urandom(32), os.urandom(16))",
        "self._stream = _encryptor(bytes(32), bytes(16))",
        ("test_randomness.py", "test_noise.py"),
    ),
    Fault(
        "one-rank-without-noise",
        "privacy.py",
        "        stddev = self.noise_multiplier * total.sensitivity\n",
        "        if __import__('os').environ.get('RANK', '0') != '0':\n"
        "            return dict(total.gradients)\n"
        "        stddev = self.noise_multiplier * total.sensitivity\n",
        ("test_invariants.py",),
    ),
    Fault(
        "view-wise-clipping",
        "training.py",
        "unit_index=part.unit_index if part.num_units < len(part.inputs) else None,",
        "unit_index=None,",
        ("test_training.py", "test_invariants.py"),
    ),
]

MORE = [
    Fault(
        "spending-after-use",
        "training.py",
        "        spend(step + 1)  # durable before the update is used\n",
        "",
        ("test_training.py", "test_invariants.py"),
    ),
    Fault(
        "ledger-records-one-less",
        "ledger.py",
        "                record.reserved_steps,\n",
        "                max(0, record.reserved_steps - 1),\n",
        ("test_ledger.py",),
    ),
    Fault(
        "copied-folder-spends-in-the-shadow",
        "ledger.py",
        'if row is not None and row["lease"] not in copy["leases"]:',
        "if False:",
        ("test_ledger.py",),
    ),
    Fault(
        "low-bits-of-the-sum",
        "noise.py",
        "alpha=1.0 / spacing).round_().mul_(spacing)",
        "alpha=1.0 / spacing).mul_(spacing)",
        ("test_noise.py",),
    ),
    Fault(
        "tail-cut-at-eight",
        "noise.py",
        "bitwise_and_(2**63 - 1)",
        "bitwise_and_(2**63 - 1).bitwise_or_(2**17)",
        ("test_noise.py",),
    ),
    Fault(
        "replacing-counted-as-removing",
        "accounting/accountants.py",
        'replace = neighbouring == "replace-one"\n',
        "replace = False\n",
        ("test_accounting.py",),
    ),
    Fault(
        "batch-norm-accepted",
        "doctor/model_checks.py",
        "    if not _moved(plain[-1][2], other[-1][2]):\n        return\n",
        "    return\n",
        ("test_doctor.py",),
    ),
]

ENGINE = [
    Fault(
        "draws-by-place",
        "gradients/stochastic.py",
        "words = self.randomness.words(self.units, self.rows, count, stream=stream)",
        "words = self.randomness.words(np.arange(len(self.units)), self.rows, count, stream=stream)",
        ("gradients/test_stochastic.py",),
    ),
    Fault(
        "draws-of-the-global-generator",
        "gradients/random_operations.py",
        "if torch.Tag.nondeterministic_seeded not in func.tags or",
        "if func is not torch.ops.aten.poisson.default or",
        ("gradients/test_stochastic.py",),
    ),
    Fault(
        "rows-of-a-unit-draw-alike",
        "gradients/stochastic.py",
        "return cls(randomness, np.repeat(unit_ids.cpu().numpy(), sizes), rows)",
        "return cls(randomness, np.repeat(unit_ids.cpu().numpy(), sizes), 0 * rows)",
        ("gradients/test_stochastic.py",),
    ),
    Fault(
        "repeated-with-other-draws",
        "gradients/stochastic.py",
        "        return self.values.pop(0)\n",
        "        return torch.rand_like(self.values.pop(0))\n",
        ("gradients/test_stochastic.py",),
    ),
    Fault(
        "views-by-place",
        "units.py",
        "owners = unit_ids.repeat_interleave(sizes).numpy()",
        "owners = torch.arange(len(group)).repeat_interleave(sizes).numpy()",
        ("test_units.py",),
    ),
    Fault(
        "sum-in-half-precision",
        "gradients/clipped.py",
        "totals = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in trained.items()}",
        "totals = {name: torch.zeros_like(value) for name, value in trained.items()}",
        ("gradients/test_precision.py",),
    ),
    Fault(
        "working-precision-of-the-weights",
        "gradients/piece.py",
        "return torch.promote_types(dtype, torch.float32)",
        "return dtype",
        ("gradients/test_precision.py",),
    ),
    Fault(
        "outputs-counted-twice",
        "gradients/tape.py",
        "elif value._is_view() or not alone:",
        "elif value._is_view():",
        ("gradients/test_third_party.py",),
    ),
    Fault(
        "forward-may-keep",
        "gradients/suitability.py",
        "    if after == before:\n        return\n",
        "    return\n",
        ("gradients/test_third_party.py",),
    ),
]


def run_tests(source: Path, tests: list[str]) -> tuple[int, str]:
    """pytest's exit code and its last line, with the package taken from ``source``."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--durations=1"]
    places = [str(ROOT / "tests" / name) for name in tests]
    done = subprocess.run(
        [*command, *places], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines() or [done.stderr]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    totals = [line for line in lines if " passed" in line or " failed" in line]
    return done.returncode, (failed or totals or lines)[-1]


def plant(fault: Fault, source: Path) -> None:
    """Change the copy; an error if the text to change is not there exactly once."""
    path = source / "sfumato" / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: found {text.count(fault.old)} times in {fault.file}:\n{fault.old}")
    text = text.replace(fault.old, fault.new)
    if "dataclasses.replace" in fault.new:
        text = text.replace("import time\n", "import dataclasses\nimport time\n", 1)
    path.write_text(text, encoding="utf-8")


def examine(fault: Fault | None, tests: list[str]) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        if fault is not None:
            plant(fault, source)
        where = subprocess.run(
            [sys.executable, "-c", "import sfumato; print(sfumato.__file__)"],
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        if not where.startswith(folder):
            raise SystemExit(f"the tests would use {where.strip()} instead of the copy")
        return run_tests(source, tests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="faults to plant; all by default")
    names = parser.parse_args().names
    faults = [fault for fault in TWELVE + MORE + ENGINE if not names or fault.name in names]
    if names and len(faults) != len(names):
        raise SystemExit(f"known faults: {', '.join(fault.name for fault in TWELVE + MORE + ENGINE)}")
    tests = sorted({test for fault in faults for test in fault.tests})
    code, told = examine(None, tests)
    print(f"{'no fault':<36} {'passes' if code == 0 else 'FAILS'}   {told}", flush=True)
    sound, caught_faults = code == 0, 0
    for fault in faults:
        began = time.monotonic()
        code, told = examine(fault, list(fault.tests))
        caught = code == 1  # 1: a test failed; anything else is no verdict
        print(
            f"{fault.name:<36} {'caught' if caught else 'SURVIVES'}   {told[:140]}  "
            f"({time.monotonic() - began:.0f} s)",
            flush=True,
        )
        caught_faults += caught
    print(f"{caught_faults} of {len(faults)} faults are caught.")
    return 0 if sound and caught_faults == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
