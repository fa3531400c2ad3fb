"""A process that spends step after step, to be killed: ``python killed_spending.py LEDGER FOLDER USED``.

What it has used stands in a memory-mapped file, which the operating system keeps when the process is killed.
"""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

from sfumato.ledger.ledger import Ledger
from sfumato.privacy.plan import Plan

PLAN = Plan(num_examples=50_000, batch_size=500, num_steps=2000, noise_multiplier=2.0, delta=1e-5)


def spend_until_killed(ledger: Path, folder: Path, used: Path) -> None:
    with open(used, "r+b") as file, Ledger.open(ledger) as book:
        shared = mmap.mmap(file.fileno(), 8)
        account = book.begin(fingerprint="f" * 64, name="images", plan=PLAN, folder=folder)
        print("ready", flush=True)
        for step in range(int.from_bytes(shared[:8], "little") + 1, PLAN.num_steps + 1):
            account.spend(step)
            shared[:8] = step.to_bytes(8, "little")  # the step is used: from here on it must be on record
            time.sleep(0.001)  # a fast machine must not finish the run before it is killed ten times
        account.finish()


if __name__ == "__main__":
    spend_until_killed(*(Path(word) for word in sys.argv[1:4]))
