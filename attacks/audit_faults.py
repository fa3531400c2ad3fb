"""Does the audit bite? Faults are planted one at a time; `audit mechanism` runs over every part of the code.

    python attacks/audit_faults.py [NAME ...] [--repetitions 300] [--json FILE]

A cell is the lower bound of ε beside the promised one, and a mark if a violation was reported. A blind spot
is a fault that the audit's training does not pass through, or that leaves the guarantee whole.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from planting import Fault, load_faults

from sfumato.audit.mechanism import MechanismAudit, run_mechanism_audit

AUDITS = {
    "full": MechanismAudit(epsilon=4),
    "views": MechanismAudit(epsilon=4, over=("views",)),
    "patients": MechanismAudit(epsilon=4, over=("patients",)),
    "head": MechanismAudit(epsilon=4, over=("head",)),
    "sampled": MechanismAudit(epsilon=4, sampling_rate=0.1, num_steps=10, over=("head",)),
    "ema": MechanismAudit(epsilon=4, over=("head", "ema")),
    "resume": MechanismAudit(epsilon=4, num_steps=2, over=("head", "resume")),
}
# name of the fault here -> as it is planted, and where the audit is expected to see it
EXPECTED = {
    "nothing planted": (None, ()),
    "half noise": ("half-noise", tuple(AUDITS)),
    "missing clip": ("missing clip", ("full", "views", "patients")),  # the head has a clip of its own
    "view-wise clipping": ("view-wise-clipping", ("views", "patients")),
    "sampling rate doubled": ("sampling rate doubled", ("sampled",)),
    "noise of a step reused": ("noise of a step reused", tuple(AUDITS)),
    "noise repeated after resuming": ("seed-reuse-on-resume", tuple(AUDITS)),
    "divisor by true size": ("wrong-divisor", tuple(AUDITS)),
    "average of raw gradients": ("average-of-raw-gradients", ("ema",)),
    "model randomness seeded": ("model randomness seeded", ()),
    "one rank without noise, seen from rank 0": ("one-rank-without-noise", ()),
    "one rank without noise, seen from rank 1": ("one-rank-without-noise", tuple(AUDITS)),
}


def missing_clip(patch) -> None:
    from sfumato.gradients.clipping import FlatClipping

    def factors(self, squared_norms, clip_norm, margin):
        return {name: torch.ones_like(value) for name, value in squared_norms.items()}

    patch.setattr(FlatClipping, "factors", factors)


def doubled_rate(patch) -> None:
    from sfumato.privacy.plan import Plan

    original = Plan.sampler

    def sampler(self):
        true = original(self)
        return dataclasses.replace(true, sampling_rate=min(1.0, 2 * true.sampling_rate))

    patch.setattr(Plan, "sampler", sampler)


def reused_noise(patch) -> None:
    from sfumato.privacy.plan import Plan
    from sfumato.randomness import SeededSource

    original = Plan.noise
    patch.setattr(
        Plan, "noise", lambda self, total, **options: original(self, total, source=SeededSource(0), step=0)
    )


def seeded_model(patch) -> None:
    from sfumato.randomness import SeededSource, UnitRandomness

    original = UnitRandomness.__init__

    def start(self, source, *, purpose, step):
        original(self, SeededSource(0), purpose=purpose, step=step)

    patch.setattr(UnitRandomness, "__init__", start)


OWN = {
    "missing clip": missing_clip,
    "sampling rate doubled": doubled_rate,
    "noise of a step reused": reused_noise,
    "model randomness seeded": seeded_model,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The product with the fault of this row."""
    fault = EXPECTED[name][0]
    if fault is None:
        yield
        return
    found = Fault(fault, (), OWN[fault]) if fault in OWN else load_faults()[fault]
    os.environ["RANK"] = "1" if "rank 1" in name else "0"
    with found.planted():
        yield
    del os.environ["RANK"]


def audited(name: str, *, repetitions: int, audits: tuple[str, ...] = tuple(AUDITS)) -> dict[str, dict]:
    """Each audit of the product with this fault in it."""
    cells = {}
    for column in audits:
        audit = dataclasses.replace(
            AUDITS[column]
        )  # its own models: a planted fault must not outlive its row
        audit.plan  # noqa: B018, the promise is made before the fault is planted
        with planted(name):
            try:
                result, _ = run_mechanism_audit(audit, repetitions=repetitions)
                cells[column] = result.as_dict()
            except Exception as error:  # a fault that the product itself refuses is found too
                cells[column] = {"epsilon": None, "violations": [f"refused: {error}"]}
        cells[column]["expected"] = column in EXPECTED[name][1]
    return cells


def cell_text(cell: dict) -> str:
    found = "refused" if cell["epsilon"] is None else f"{cell['epsilon']:.2f}"
    mark = "FOUND" if cell["violations"] else "-"
    return f"{found} {mark}" + ("" if bool(cell["violations"]) == cell["expected"] else " (!)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*EXPECTED, []], help="rows; all by default")
    parser.add_argument("--repetitions", type=int, default=300, help="trainings a side")
    parser.add_argument("--json", type=Path, help="write all results there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table, surprises = {}, 0
    print("| fault | " + " | ".join(AUDITS) + " |\n" + "|---" * (len(AUDITS) + 1) + "|", flush=True)
    for name in arguments.names or EXPECTED:
        table[name] = audited(name, repetitions=arguments.repetitions)
        print(
            f"| {name} | " + " | ".join(cell_text(cell) for cell in table[name].values()) + " |", flush=True
        )
        surprises += sum(bool(cell["violations"]) != cell["expected"] for cell in table[name].values())
        if arguments.json:
            arguments.json.write_text(json.dumps(table, indent=1))
    print(f"{surprises} cells differ from what is expected")
    return int(surprises > 0)


if __name__ == "__main__":
    raise SystemExit(main())
