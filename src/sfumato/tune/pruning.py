"""Ending trials early by scores that may be looked at: of public images, or where nothing is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.run.monitor import Observer
from sfumato.run.prepare import Prepared, ScoredSet
from sfumato.training.evaluation import AnyScores
from sfumato.training.loop import StepRecord

if TYPE_CHECKING:
    import optuna


class PruningObserver:
    """Passes on what it is told, reports scores to Optuna, and ends the trial when Optuna says so."""

    class Pruned(Exception):
        """The trial is not worth going on with."""

        def __init__(self, score: float) -> None:
            super().__init__(f"pruned at {score:.4f}")
            self.score = score

    def __init__(self, inner: Observer | None, trial: optuna.Trial) -> None:
        self.inner, self.trial, self.num_steps = inner, trial, 0

    @classmethod
    def around(cls, inner: Observer | None, trial: optuna.Trial | None) -> Observer | None:
        """The observer itself where nothing is pruned; a resumed trial is not."""
        return inner if trial is None else cls(inner, trial)

    def started(self, prepared: Prepared, start_step: int) -> None:
        self.num_steps = prepared.num_steps
        if self.inner is not None:
            self.inner.started(prepared, start_step)

    def stepped(self, record: StepRecord, epsilon: float | None) -> None:
        if self.inner is not None:
            self.inner.stepped(record, epsilon)

    def scored(self, step: int, scored: ScoredSet, scores: AnyScores) -> None:
        if self.inner is not None:
            self.inner.scored(step, scored, scores)
        self.trial.report(scores.accuracy, step)
        if step < self.num_steps and self.trial.should_prune():
            raise self.Pruned(scores.accuracy)

    def noted(self, text: str) -> None:
        if self.inner is not None:
            self.inner.noted(text)

    def computed(self, what: str, done: int, total: int) -> None:
        if self.inner is not None:
            self.inner.computed(what, done, total)
