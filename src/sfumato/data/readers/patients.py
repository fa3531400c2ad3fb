"""Patients out of file names, by a regular expression that cannot hang the command.

Python's ``re`` takes time exponential in a text's length for expressions such as ``(a+)+$``, and cannot be
interrupted. So the search runs in a process of its own that is ended when its time is over: that works in any
thread and on any system, and needs no judgement about which expressions are slow.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sfumato.data.readers import matching
from sfumato.errors import ConfigError

SECONDS = 5.0  # for the whole search, and another second for every …
TEXTS_PER_SECOND = 1000  # … file names; an expression that marks a patient does thousands in a second


def find_patients(pattern: str, texts: Sequence[str]) -> list[str | None]:
    """What ``pattern`` marks in each text: its patient, or None.

    Guarantee: it ends within ``SECONDS`` and a second for each thousand texts, whatever the expression is.
    """
    seconds = SECONDS + len(texts) / TEXTS_PER_SECOND
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(Path(matching.__file__))],
            input=json.dumps({"pattern": pattern, "texts": list(texts)}).encode("ascii"),
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        slowest = (late.stdout or b"").count(b"\n") - 1  # the first line is about the expression
        where = f" in {texts[slowest]!r}" if 0 <= slowest < len(texts) else ""
        raise _slow(pattern, f"was still searching{where} after {seconds:.0f} seconds") from late
    except OSError as error:
        raise _slow(pattern, f"could not be searched for in a process of its own: {error}") from error
    head, *lines = done.stdout.decode("ascii").splitlines() or [""]
    problem = json.loads(head)["error"] if head else None
    if problem is not None:
        raise ConfigError(
            "bad-pattern",
            f"--patient-from {pattern!r} is not a regular expression: {problem}.",
            fix="Try one that marks the patient, e.g. '(person\\d+)_'.",
        )
    if done.returncode or len(lines) != len(texts):
        raise _slow(pattern, f"ended its process with {done.returncode} before the last file")
    return [json.loads(line) for line in lines]


def _slow(pattern: str, what: str) -> ConfigError:
    return ConfigError(
        "slow-pattern",
        f"--patient-from {pattern!r} {what}.",
        why="A repetition inside a repetition, such as (a+)+, can take longer than anybody waits.",
        fix="Write it without one; '/(P\\d+)_' is enough for most names. Or use a patient column.",
    )
