"""A run in progress: it takes the steps, scores, and saves where it stands.

Public records (step, epsilon, rate, test scores) go to ``metrics.jsonl``; what is computed from private
images goes to ``state/sensitive.jsonl`` and stays there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from sfumato.errors import RunError
from sfumato.gradients import Choices
from sfumato.ledger.ledger import Account, Ledger
from sfumato.ledger.receipt import plan_values
from sfumato.privacy.plan import Plan
from sfumato.release.run_folder import RunFolder
from sfumato.run.interruption import Interruption
from sfumato.run.prepare import Prepared, ScoredSet, Watcher, features_counter
from sfumato.run.state import LineLog, RunState, check_identity, load_state, save_state
from sfumato.training.averaging import WeightAverage
from sfumato.training.evaluation import Scores, evaluate
from sfumato.training.fixed_rows import release_centre
from sfumato.training.gradient_sums import EngineSum, GradientSum, PlainSum, head_gradients
from sfumato.training.loop import StepRecord, fit, fit_without_privacy
from sfumato.training.optimizers import Schedule


class Observer(Watcher, Protocol):
    """Whoever watches a run: a progress line, a test."""

    def started(self, prepared: Prepared, start_step: int) -> None:
        """All checks passed; steps begin."""

    def stepped(self, record: StepRecord, epsilon: float | None) -> None:
        """A step is done."""

    def scored(self, step: int, scored: ScoredSet, scores: Scores) -> None:
        """An evaluation is done."""


@dataclass
class Run:
    """A run in progress: what ``state/`` holds, in memory."""

    prepared: Prepared
    folder: RunFolder
    average: WeightAverage
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    account: Account
    observer: Observer | None
    metrics: LineLog
    sensitive: LineLog
    max_rows: int
    step: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    evaluations_since_best: int = 0
    stopped_early: bool = False
    lost_steps: int = 0  # begun before an interruption, but not saved
    last_scores: Scores | None = None
    last_save: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(
        cls, prepared: Prepared, folder: RunFolder, *, ledger: Ledger, observer: Observer | None
    ) -> Run:
        """A new run, or the continuation of the one that ``folder`` holds."""
        training, images = prepared.recipe.training, prepared.units.data
        state = load_state(folder.state) if folder.has_state else None
        if state is not None:
            check_identity(state.values, _identity(prepared), folder=folder.path)
        account = ledger.begin(
            fingerprint=images.fingerprint,
            name=images.name,
            plan=prepared.plan,
            folder=folder.state,
            label=folder.path.name,
            releasable=prepared.releasable,
            image_ids=images.content_ids,
            patient_names=prepared.splits.names_of(images),
            saved_steps=-1 if state is None else state.values["step"],
        )
        optimizer = prepared.components.optimizer_of(prepared.recipe, prepared.model)
        schedule = Schedule(
            settings=prepared.recipe.schedule,
            learning_rate=training.learning_rate,
            num_steps=prepared.num_steps,
            steps_per_epoch=prepared.steps_per_epoch,
        )
        run = cls(
            prepared=prepared,
            folder=folder,
            average=WeightAverage.start(prepared.model, decay=training.ema_decay),
            optimizer=optimizer,
            schedule=schedule,
            account=account,
            observer=observer,
            metrics=LineLog(folder.metrics),
            sensitive=LineLog(folder.sensitive),
            max_rows=prepared.max_rows,
        )
        if state is not None:
            run.restore(state)
        else:
            run.release_centre()
            run.commit()
        return run

    def release_centre(self) -> None:
        """The private mean of fixed features: a release of its own, spent before it is used, once per run."""
        prepared = self.prepared
        if prepared.recipe.features is None:
            return
        if prepared.plan is not None:
            self.account.spend(1)
        release_centre(
            prepared.model,
            prepared.views,
            prepared.units,
            settings=prepared.recipe.features,
            source=prepared.source,
            private=prepared.plan is not None,
        )

    def fit(self, interruption: Interruption) -> None:
        """Take the remaining steps."""
        if self.observer is not None:
            self.observer.started(self.prepared, self.step)
            if self.account.copy_of is not None:
                self.observer.noted(_on_its_own(self.account.copy_of))
            elif self.lost_steps:
                self.observer.noted(_done_again(self.lost_steps))
        if self.stopped_early:
            return
        began, before = time.monotonic(), self.seconds
        for record in self._steps():
            self.step = record.step
            self.seconds = before + time.monotonic() - began
            scores = self._record(record)
            overdue = time.monotonic() - self.last_save >= self.prepared.recipe.performance.save_every_seconds
            if overdue or interruption.requested or scores is not None:
                self.commit()
            # Only now: a step whose result was seen may never be taken again with fresh noise.
            if scores is not None and self.observer is not None:
                self.observer.scored(self.step, self.prepared.monitored, scores)
            interruption.raise_if_requested()
            if self.stopped_early:
                break
        self.commit()

    def close_account(self) -> None:
        """Before anything is published: later it would be too late to learn that another copy went on."""
        if not self.account.record.finished:
            if self.prepared.plan is not None:
                self.account.spend(self.prepared.num_steps)  # after early stopping too: see stated_privacy
            self.account.finish()

    def commit(self) -> None:
        """Save where the run stands, confirm it to the ledger, and only then show the new lines of the logs.

        Whatever a crash cuts off, no line can be read whose step might be taken again with fresh noise.
        """
        self._check_finite()
        values = {
            "step": self.step,
            "seconds": self.seconds,
            "max_rows": self.max_rows,
            "schedule": {
                "scale": self.schedule.scale,
                "best": _finite(self.schedule.best),
                "best_step": self.schedule.best_step,
            },
            "best_loss": _finite(self.best_loss),
            "evaluations_since_best": self.evaluations_since_best,
            "stopped_early": self.stopped_early,
            "metrics": self.metrics.pending(),
            "sensitive": self.sensitive.pending(),
            **_identity(self.prepared),
        }
        state = RunState.capture(self.prepared.model, self.average, self.optimizer, values)
        save_state(state, self.folder.state)
        self.account.confirm(self.step)
        self.metrics.write()
        self.sensitive.write()
        self.last_save = time.monotonic()

    def restore(self, state: RunState) -> None:
        """Go back to the saved state, whose identity was checked."""
        saved = state.values
        state.restore(self.prepared.model, self.average, self.optimizer)
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.lost_steps = max(0, self.account.begun_steps - self.step)
        self.stopped_early = saved["stopped_early"]
        self.best_loss = math.inf if saved["best_loss"] is None else saved["best_loss"]
        self.evaluations_since_best = saved["evaluations_since_best"]
        self.schedule.scale = saved["schedule"]["scale"]
        self.schedule.best_step = saved["schedule"]["best_step"]
        self.schedule.best = math.inf if saved["schedule"]["best"] is None else saved["schedule"]["best"]
        if self.prepared.recipe.performance.microbatch_size is None:
            self.max_rows = saved["max_rows"]  # another free memory must not change a seeded run's rounding
        self.metrics.recover(saved["metrics"])
        self.sensitive.recover(saved["sensitive"])

    def _steps(self) -> Iterator[StepRecord]:
        prepared = self.prepared
        if prepared.plan is None:
            return fit_without_privacy(
                prepared.model,
                PlainSum(
                    model=prepared.model,
                    units=prepared.units,
                    inputs=prepared.views,
                    source=prepared.source,
                    max_rows=self.max_rows,
                    loss=prepared.loss,
                ),
                prepared.sampler,
                optimizer=self.optimizer,
                learning_rate=self.schedule,
                average=self.average,
                source=prepared.source,
                start_step=self.step,
            )
        return fit(
            prepared.model,
            gradient_sum(prepared, prepared.plan, max_rows=self.max_rows),
            prepared.plan,
            optimizer=self.optimizer,
            learning_rate=self.schedule,
            average=self.average,
            source=prepared.source,
            spend=self.account.spend,
            normalised_update=prepared.recipe.training.normalised_update,
            start_step=self.step,
        )

    def _record(self, record: StepRecord) -> Scores | None:
        """Score if it is time, then keep the step's line for the next commit."""
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
        scores, monitored = None, self.prepared.monitored
        last = record.step == self.prepared.num_steps
        if monitored is not None and (last or record.step % self._evaluate_every() == 0):
            scores = self._evaluate(self.average.averaged(self.prepared.model), monitored)
            self.last_scores = scores
            target = private if monitored.sensitive else public
            target |= {f"{monitored.split}_accuracy": scores.accuracy}
            target |= {f"{monitored.split}_loss": _finite(scores.loss)}
            self._steer(scores)
        self.metrics.add(public)
        self.sensitive.add(private)
        return scores

    def _steer(self, scores: Scores) -> None:
        """Plateau and early stopping; ``prepare`` has refused both unless the images are public."""
        self.schedule.observe(self.step, scores.loss)
        patience = self.prepared.recipe.training.early_stopping
        if scores.loss < self.best_loss:
            self.best_loss, self.evaluations_since_best = scores.loss, 0
        else:
            self.evaluations_since_best += 1
        self.stopped_early = 0 < patience <= self.evaluations_since_best

    def _evaluate(self, model: nn.Module, scored: ScoredSet) -> Scores:
        views = self.prepared.views
        counter = features_counter(self.observer, scored.split)
        return evaluate(model, scored.images, mean=views.mean, std=views.std, on_progress=counter)

    def _evaluate_every(self) -> int:
        if self.prepared.recipe.training.evaluate_every:
            return self.prepared.recipe.training.evaluate_every
        if self.prepared.recipe.schedule.name == "plateau":
            return max(1, round(self.prepared.steps_per_epoch))
        return max(1, math.ceil(self.prepared.num_steps / 10))

    def _check_finite(self) -> None:
        bad = [name for name, value in self.prepared.model.named_parameters() if not value.isfinite().all()]
        if bad:
            raise RunError(
                "diverged",
                f"after step {self.step} the weights are no longer finite (first: {bad[0]})",
                why="The learning rate is too large for this model and noise.",
                fix="Start anew with a smaller training.learning_rate. What was spent stays spent.",
            )


def gradient_sum(prepared: Prepared, plan: Plan, *, max_rows: int) -> GradientSum:
    """What gives the sums of this run: the closed form where there is one, else the engine."""
    if prepared.in_closed_form:
        found = head_gradients(prepared.model, prepared.views, prepared.units, clip_norm=plan.clip_norm)
        if found is not None:
            return found
    # timing the engine's strategies would make a seeded run round differently each time
    seeded = prepared.recipe.training.seed is not None
    return EngineSum(
        model=prepared.model,
        units=prepared.units,
        inputs=prepared.views,
        clip_norm=plan.clip_norm,
        source=prepared.source,
        max_rows=max_rows,
        loss=prepared.loss,
        clipping=prepared.clipping,
        choices=Choices(deterministic=True) if seeded else None,
    )


def _identity(prepared: Prepared) -> dict[str, Any]:
    """What may not change between start and resume, beside the recipe."""
    seed = prepared.recipe.training.seed
    return {
        "fingerprint": prepared.units.data.fingerprint,
        "plan": plan_values(prepared.plan),
        "source": "the operating system" if seed is None else f"seed {seed}",
        "components": prepared.components.names(),
    }


def _on_its_own(run_id: str) -> str:
    return (
        f"This folder is a copy of run {run_id}, or was restored, and that run went on or ended since. What "
        "both lead to can be seen, so this is now a run of its own, and paid for."
    )


def _done_again(steps: int) -> str:
    many = "1 step is" if steps == 1 else f"{steps:,} steps are"
    return (
        f"{many} done again: begun before the interruption, but not saved. Nobody saw their result, so that "
        "the budget stays as planned."
    )


def _finite(value: float | None) -> float | None:
    """``value`` if JSON can hold it."""
    return value if value is not None and math.isfinite(value) else None
