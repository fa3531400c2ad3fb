"""What a run shows while it trains: scores, what they decide, and a line for each step.

Public records (step, epsilon, rate, test scores) go to ``metrics.jsonl``; what is computed from private
images goes to ``state/sensitive.jsonl`` and stays there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sfumato.run.prepare import Prepared, ProgressObserver, ScoredSet, features_counter
from sfumato.run.scoring import scored_logits
from sfumato.run.state import LineLog
from sfumato.training.averaging import WeightAverage
from sfumato.training.evaluation import AnyScores, score
from sfumato.training.loop import StepRecord
from sfumato.training.optimizers import Schedule


class Observer(ProgressObserver, Protocol):
    """Is told of everything that happens in a run: a progress display, a test.

    What it is told of a step, or sees in ``prepared.model``, may be shown only once ``scored`` or the end of
    the run has come after it: a step that was not saved is taken again after an interruption.
    """

    def started(self, prepared: Prepared, start_step: int) -> None:
        """All checks passed; steps begin."""

    def stepped(self, record: StepRecord, epsilon: float | None) -> None:
        """A step is done."""

    def scored(self, step: int, scored: ScoredSet, scores: AnyScores) -> None:
        """An evaluation is done."""


@dataclass
class Monitor:
    """Records each step, scores the averaged weights when it is due, and applies what public scores decide.

    Guarantee: lines wait in the logs until the state that makes them final is saved.
    """

    prepared: Prepared
    schedule: Schedule
    metrics: LineLog
    sensitive: LineLog
    observer: Observer | None
    best_loss: float = math.inf
    evaluations_since_best: int = 0
    stopped_early: bool = False
    last_scores: AnyScores | None = None

    def record(self, record: StepRecord, average: WeightAverage) -> AnyScores | None:
        """Score if that is due, then keep the step's lines for the next commit."""
        plan = self.prepared.plan
        epsilon = plan.epsilon_after(record.step) if plan is not None else None
        public = {
            "step": record.step,
            "epsilon": epsilon,
            "learning_rate": record.learning_rate,
        }
        private = {
            "step": record.step,
            "loss": _finite(record.loss),
            "median_norm": _finite(record.median_norm),
            "clipped_share": record.clipped_share,
            # how long a step takes tells the true batch size, which is private
            "units_per_second": round(self.prepared.batch_size / max(record.seconds, 1e-9), 2),
        }
        if self.observer is not None:
            self.observer.stepped(record, epsilon)
        self.schedule.advance()
        scores, monitored = None, self.prepared.monitored
        if monitored is not None and self._is_due(record.step):
            scores = self.last_scores = self._evaluate(average, monitored)
            target = private if monitored.sensitive else public
            target |= {f"{monitored.split}_accuracy": scores.accuracy}
            target |= {f"{monitored.split}_loss": _finite(scores.loss)}
            self._apply(scores)
        self.metrics.add(public)
        self.sensitive.add(private)
        return scores

    def values(self) -> dict[str, Any]:
        """For the state of the run."""
        return {
            "schedule": self.schedule.state_dict(),
            "best_loss": _finite(self.best_loss),
            "evaluations_since_best": self.evaluations_since_best,
            "stopped_early": self.stopped_early,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from ``values`` of a saved state."""
        self.stopped_early = saved["stopped_early"]
        self.best_loss = math.inf if saved["best_loss"] is None else saved["best_loss"]
        self.evaluations_since_best = saved["evaluations_since_best"]
        self.schedule.load_state_dict(saved["schedule"])

    def _is_due(self, step: int) -> bool:
        return step == self.prepared.num_steps or step % self.prepared.resolved.evaluate_every == 0

    def _apply(self, scores: AnyScores) -> None:
        """Plateau and early stopping; ``resolve`` refuses both unless the scored images are public."""
        self.schedule.observe(scores.loss)
        patience = self.prepared.recipe.training.early_stopping
        if scores.loss < self.best_loss:
            self.best_loss, self.evaluations_since_best = scores.loss, 0
        else:
            self.evaluations_since_best += 1
        self.stopped_early = 0 < patience <= self.evaluations_since_best

    def _evaluate(self, average: WeightAverage, scored: ScoredSet) -> AnyScores:
        counter = features_counter(self.observer, scored.split)
        model = average.averaged(self.prepared.model)
        logits = scored_logits(self.prepared, model, scored, on_progress=counter)
        # intervals take time, and the finished model is scored once more
        return score(logits, scored.images, decision=self.prepared.decision, intervals=False)


def _finite(value: float | None) -> float | None:
    """``value`` if JSON can represent it."""
    return value if value is not None and math.isfinite(value) else None
