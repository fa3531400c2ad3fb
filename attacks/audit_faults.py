"""Does the audit bite? Faults are planted one at a time; `audit mechanism` runs over every part of the code.

    python attacks/audit_faults.py [NAME ...] [--trainings 200] [--column COLUMN ...] [--json FILE]
    python attacks/audit_faults.py --docs FILE      # the table of that file, into docs/audit.md

A cell is the lower bound of ε beside the promised one, and a mark if a violation was reported. What is
expected was written down before the audits ran; a blind spot is expected for the reason that its row gives.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from planting import ROOT, Fault, load_faults

from sfumato.audit.mechanism import MechanismAudit
from sfumato.audit.mechanism_results import run_mechanism_audit
from sfumato.audit.paper import PaperAudit
from sfumato.audit.paper_results import table_row
from sfumato.audit.paper_settings import PROBLEMS, Problem, Setting, setting_plan
from sfumato.audit.paper_store import Line, Store
from sfumato.audit.score_file import ScoreFile
from sfumato.errors import SfumatoError
from sfumato.privacy.statement import round_down

EPSILON, PAPER_EPSILON, CONFIDENCE, CANARIES = (
    4.0,
    1.0,
    0.999,
    32,
)  # of 100 sound cells hardly one may raise an alarm
DOCS = ROOT / "docs" / "audit.md"
BEGIN, END = "<!-- fault table: begin -->\n", "<!-- fault table: end -->"

Cell = dict[str, object]  # "epsilon": the bound, None if the product refused; "violations": sentences
Audit = Callable[[int], Cell]  # of so many trainings


def mechanism(**settings) -> Callable[[], Audit]:
    """A column: `sfumato audit mechanism` with these settings, planned before a fault is planted."""

    def planned() -> Audit:
        audit = MechanismAudit(
            epsilon=EPSILON, confidence=CONFIDENCE, **{"num_canaries": CANARIES, **settings}
        )
        audit.check()

        def run(trainings: int) -> Cell:
            result, _ = run_mechanism_audit(audit, trainings=trainings)
            return result.as_dict()

        return run

    return planned


def paper() -> Audit:
    """A column: `sfumato audit paper` in one setting, with so many models a side of few updates.

    ε = 1 is promised: with 200 models a side not even a perfect attack could show 4.
    """
    problem = Problem(num_examples=100, batch_size=64, num_steps=(10,))
    setting = Setting(canary="6-as-7", learning_rate=0.5, clip_norm=1.0, num_steps=10)
    setting_plan(problem, PAPER_EPSILON, setting)  # before a fault is planted

    def run(models: int) -> Cell:
        audit = PaperAudit(problem=problem, views=0, store=Store(ScoreFile(None, Line)))
        row = table_row(
            PROBLEMS[100], PAPER_EPSILON, setting, audit.phase_two(PAPER_EPSILON, setting, models)
        )
        assert row is not None  # there are enough
        found = [f"ε is at least {row.lower_bound:.3g}"] if row.violates else []
        return {"epsilon": row.lower_bound, "violations": found, "ceiling": row.ceiling, "auc": row.auc}

    return run


# a column: what plans its audit; other commands can be put beside these
AUDITS: dict[str, Callable[[], Audit]] = {
    "full": mechanism(),
    "views": mechanism(over=("views",)),
    "patients": mechanism(over=("patients",)),
    "dropout": mechanism(over=("dropout",)),
    "head": mechanism(over=("head",)),
    "sampled": mechanism(sampling_rate=0.1, num_steps=10, over=("head",)),
    "ema": mechanism(over=("head", "ema")),
    "resume": mechanism(num_steps=2, over=("head", "resume")),
    "ranks": mechanism(over=("ranks",)),
    "paper": paper,
}
MECHANISM = tuple(name for name in AUDITS if name != "paper")
ENGINE, CLOSED = ("full", "views", "patients", "dropout", "ranks"), ("head", "sampled", "ema", "resume")


@dataclasses.dataclass(frozen=True)
class Row:
    """A fault as it is planted, the audits that must see it, and why the others cannot."""

    fault: str | None
    seen_by: tuple[str, ...]
    blind: str = ""


ROWS = {
    "nothing planted": Row(None, (), "nothing is wrong"),
    "half noise": Row("half-noise", MECHANISM, "`paper`: a bound far below ε leaves room for half the noise"),
    "missing clip": Row("missing clip", (*ENGINE, "paper"), "the closed-form head has a clip of its own"),
    "missing clip of the head": Row("missing clip of the head", CLOSED, "the engine has a clip of its own"),
    "view-wise clipping": Row(
        "view-wise clipping", ("views", "patients"), "a unit of one row is clipped as a whole either way"
    ),
    "sampling rate doubled": Row("sampling rate doubled", ("sampled",), "a full batch has no rate"),
    "noise of a step reused": Row("noise of a step reused", tuple(AUDITS)),
    "noise repeated after resuming": Row(
        "seed-reuse-on-resume",
        MECHANISM,
        "`paper` takes every model for a trial of its own, whatever noise it shares with another",
    ),
    "divisor by true size": Row(
        "wrong-divisor",
        tuple(name for name in MECHANISM if name != "sampled"),
        "the size of a sampled batch varies far more with who is drawn than with who is there",
    ),
    "average of raw gradients": Row(
        "average-of-raw-gradients", ("ema",), "these auditors see the updates and not the average"
    ),
    "model randomness seeded": Row(
        "model randomness seeded",
        ("views", "patients", "dropout"),
        "nothing is drawn for a unit there, so nothing can be foretold",
    ),
    "one rank without noise, seen from rank 0": Row(
        "one-rank-without-noise", (), "rank 0 is sound, and an auditor sees the rank that runs the audit"
    ),
    "one rank without noise, seen from rank 1": Row("one-rank-without-noise", tuple(AUDITS)),
    "no noise over several ranks": Row("no-noise-over-ranks", ("ranks",), "a process alone adds its noise"),
    "noise divided by the ranks": Row("noise-shrinks-with-ranks", ("ranks",), "a process alone is one rank"),
}


def missing_clip(patch) -> None:
    from sfumato.gradients import clipping

    def factors(self, squared_norms, clip_norm, margin):
        return {name: torch.ones_like(value) for name, value in squared_norms.items()}

    patch.setattr(clipping.FlatClipping, "factors", factors)
    # the product refuses such factors by itself; here the audit has to find them
    patch.setattr(clipping, "_checked", lambda clipping, factors, *rest: dict(factors))


def missing_clip_of_the_head(patch) -> None:
    from sfumato.training.head import SoftmaxRegression

    original = SoftmaxRegression.__call__

    def unclipped(self, weight, bias, *, clip_norm, indices=None):
        total = original(self, weight, bias, clip_norm=1e12, indices=indices)
        return dataclasses.replace(total, sensitivity=clip_norm)

    patch.setattr(SoftmaxRegression, "__call__", unclipped)


def view_wise_clipping(patch) -> None:
    from sfumato.training import gradient_sums

    original = gradient_sums.clipped_sum

    def clipped(model, inputs, targets, **options):  # with numbers for its rows, which the product asks for
        options |= {"unit_index": None, "unit_ids": torch.arange(len(inputs))}
        return original(model, inputs, targets, **options)

    patch.setattr(gradient_sums, "clipped_sum", clipped)


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
    """Whoever is removed changes the numbers of those behind them, and so, in a known way, their draws."""
    from sfumato.randomness import SeededSource, UnitRandomness

    original = UnitRandomness.__init__

    def start(self, source, *, purpose, step):
        original(self, SeededSource(0), purpose=purpose, step=step)

    patch.setattr(UnitRandomness, "__init__", start)


OWN = {
    "missing clip": missing_clip,
    "missing clip of the head": missing_clip_of_the_head,
    "view-wise clipping": view_wise_clipping,
    "sampling rate doubled": doubled_rate,
    "noise of a step reused": reused_noise,
    "model randomness seeded": seeded_model,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The product with the fault of this row."""
    fault = ROWS[name].fault
    if fault is None:
        yield
        return
    found = Fault(fault, (), OWN[fault]) if fault in OWN else load_faults()[fault]
    os.environ["RANK"] = "1" if "rank 1" in name else "0"
    with found.planted():
        yield
    del os.environ["RANK"]


def audited(name: str, column: str, *, trainings: int) -> Cell:
    """One audit of the product with this fault in it."""
    run = AUDITS[column]()
    with planted(name):
        try:
            cell = run(trainings)
        except SfumatoError as error:  # a fault that the product itself refuses is found too
            cell = {"epsilon": None, "violations": [f"refused: {error}"]}
    return {**cell, "expected": column in ROWS[name].seen_by}


def surprises(table: dict[str, dict[str, Cell]]) -> list[str]:
    """The cells that are not as expected."""
    return [
        f"{name}, {column}"
        for name, cells in table.items()
        for column, cell in cells.items()
        if bool(cell["violations"]) != cell["expected"]
    ]


def line(name: str, cells: dict[str, Cell], columns: list[str]) -> str:
    """A row of the table."""
    texts = []
    for column in columns:
        if column not in cells:
            texts.append("not run")
            continue
        cell = cells[column]
        text = "refused" if cell["epsilon"] is None else round_down(float(cell["epsilon"]), 3)  # type: ignore[arg-type]
        text = f"**{text}**" if cell["violations"] else f"{text}"
        texts.append(text + ("" if bool(cell["violations"]) == cell["expected"] else " (unexpected)"))
    return f"| {name} | " + " | ".join(texts) + f" | {ROWS[name].blind} |"


def heading(columns: list[str]) -> str:
    return (
        "| fault | "
        + " | ".join(columns)
        + " | why the others cannot see it |\n"
        + "|---" * (len(columns) + 2)
        + "|"
    )


def docs_text(recorded: dict) -> str:
    """What docs/audit.md says of a recorded run."""
    table = recorded["table"]
    differing = surprises(table)
    columns = [column for column in AUDITS if any(column in cells for cells in table.values())]
    return "\n".join(
        [
            f"`{recorded['command']}`, ε = {EPSILON:g} promised ({PAPER_EPSILON:g} in the last column), "
            f"{100 * CONFIDENCE:g} % sure; bold: a violation was reported.",
            "",
            heading(columns),
            *(line(name, cells, columns) for name, cells in table.items()),
            "",
            "Every cell that was run is as it was expected before."
            if not differing
            else "Not as expected before the run: " + "; ".join(differing) + ".",
            "",
        ]
    )


def write_docs(recorded: dict) -> None:
    text = DOCS.read_text(encoding="utf-8")
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    DOCS.write_text(between.sub(lambda _: BEGIN + docs_text(recorded) + END, text), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*ROWS, []], help="rows; all by default")
    parser.add_argument("--trainings", type=int, default=200, help="of each audit")
    parser.add_argument("--column", action="append", choices=list(AUDITS), help="repeat it; all by default")
    parser.add_argument("--json", type=Path, help="write all results there, beside what it holds")
    parser.add_argument("--docs", type=Path, help="run nothing; write this file's table into docs/audit.md")
    arguments = parser.parse_args()
    if arguments.docs:
        write_docs(json.loads(arguments.docs.read_text()))
        return 0
    torch.set_num_threads(1)
    columns = arguments.column or list(AUDITS)
    known = arguments.json is not None and arguments.json.exists()
    table: dict[str, dict[str, Cell]] = json.loads(arguments.json.read_text())["table"] if known else {}
    command = f"python attacks/audit_faults.py --trainings {arguments.trainings}"
    print(heading(columns), flush=True)
    for name in arguments.names or ROWS:
        found = {column: audited(name, column, trainings=arguments.trainings) for column in columns}
        table[name] = table.get(name, {}) | found
        print(line(name, found, columns), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({"command": command, "table": table}, indent=1) + "\n")
    differing = surprises(table)
    print(f"{len(differing)} cells differ from what is expected: {'; '.join(differing) or 'none'}")
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
