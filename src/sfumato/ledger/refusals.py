"""What the ledger refuses, and why."""

from __future__ import annotations

from sfumato.errors import PrivacyError, RunError
from sfumato.ledger.totals import Cap, Record, Total
from sfumato.privacy.statement import round_up


def taken_over(record: Record) -> RunError:
    return RunError(
        "run-taken-over",
        f"another process went on with run {record.run_id}.",
        why="Two continuations of one run would spend the same record twice.",
        fix="Stop one of them; resume from this folder to go on as a run of its own.",
    )


def run_closed(record: Record) -> RunError:
    return RunError(
        "run-closed",
        f"run {record.run_id} was closed while it was at work (sfumato ledger close).",
        why="What it had not used was given back, and may be planned for other runs by now.",
        fix="Resume it if it should go on: that is checked against the caps again.",
    )


def changed_source(record: Record) -> PrivacyError:
    before = "without a seed" if record.releasable else "with a seed"
    return PrivacyError(
        "changed-source",
        f"run {record.run_id} was begun {before}, and is to go on otherwise.",
        why="Whoever knows a seed can subtract the noise of every step that was taken with it.",
        fix="Resume as it was begun, or start a new run with another --out.",
    )


def over_cap(fingerprint: str, cap: Cap, total: Total, spent: Total) -> PrivacyError:
    return PrivacyError(
        "over-cap",
        f"with this run, data set {fingerprint[:12]} would reach ε = {round_up(total.epsilon)} per "
        f"{cap.unit} at δ = {cap.delta:g}; its cap is {cap.epsilon:g}, and {round_up(spent.epsilon)} is "
        f"spent by {spent.num_runs} runs.",
        why="What all published runs reveal about the same images or patients adds up.",
        fix="Plan a smaller epsilon, or decide to raise the cap (sfumato ledger cap).",
    )
