"""The steps of a run: take one, record it, and save the state when it is due."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from sfumato.gradients import Choices
from sfumato.ledger.ledger import Ledger
from sfumato.models.fixed_features import FixedFeatures
from sfumato.privacy.plan import Plan
from sfumato.release.run_folder import RunFolder
from sfumato.run.canaries import RunCanaries
from sfumato.run.decision import LogitsOf, Released
from sfumato.run.interruption import Interruption
from sfumato.run.monitor import Monitor, Observer
from sfumato.run.persistence import Persistence
from sfumato.run.prepare import Prepared
from sfumato.run.private_releases import private_releases
from sfumato.run.state import RunState
from sfumato.training.averaging import WeightAverage
from sfumato.training.decision import Decision
from sfumato.training.evaluation import logits_of
from sfumato.training.fixed_rows import FeatureViews, release_centre
from sfumato.training.gradient_sums import EngineSum, GradientSum, PlainSum, head_gradients
from sfumato.training.loop import StepRecord, fit, fit_without_privacy
from sfumato.training.private_counts import check_counted


@dataclass
class Run:
    """A run in progress: in memory what ``state/`` holds on disk."""

    prepared: Prepared
    persistence: Persistence
    monitor: Monitor
    average: WeightAverage
    observer: Observer | None
    max_rows: int
    canaries: RunCanaries | None
    released: Released
    step: int = 0
    seconds: float = 0.0
    seconds_before: float = 0.0  # of steps before the interruption
    lost_steps: int = 0  # taken before an interruption, but not saved

    @classmethod
    def begin(
        cls, prepared: Prepared, folder: RunFolder, *, ledger: Ledger, observer: Observer | None
    ) -> Run:
        """A new run, or the continuation of the one in ``folder``."""
        persistence = Persistence.open(prepared, folder, ledger=ledger)
        saved = persistence.saved
        released = Released()
        if saved is None:
            released.release_class_counts(prepared, persistence.account.spend)
        else:
            released = Released.restored(saved.values.get("released"), prepared.recipe)
        prepared = replace(prepared, prior=released.prior(prepared))
        run = cls(
            prepared=prepared,
            persistence=persistence,
            monitor=Monitor(
                prepared=prepared,
                schedule=prepared.resolved.schedule(),
                metrics=persistence.metrics,
                sensitive=persistence.sensitive,
                observer=observer,
            ),
            average=WeightAverage.start(prepared.model, decay=prepared.recipe.training.ema_decay),
            observer=observer,
            max_rows=prepared.max_rows,
            canaries=RunCanaries.begin(prepared, folder),
            released=released,
        )
        if saved is not None:
            run.restore(saved)
        else:
            run.release_centre()
            run.commit()
        return run

    def release_centre(self) -> None:
        """The private mean of fixed features: a separate release, spent before it is used, once per run."""
        prepared, settings = self.prepared, self.prepared.recipe.features
        if settings is None:
            return
        model, views = prepared.model, prepared.views
        assert isinstance(model, FixedFeatures)  # ``prepare`` refuses others with [features]
        assert isinstance(views, FeatureViews)
        if prepared.plan is not None:
            check_counted(prepared.plan, private_releases(prepared.recipe))
            self.persistence.account.spend(1)
        release_centre(
            model,
            views,
            prepared.units,
            settings=settings,
            source=prepared.source,
            private=prepared.plan is not None,
        )

    def fit(self, interruption: Interruption) -> None:
        """Take the remaining steps."""
        self._announce()
        if self.monitor.stopped_early:
            return
        monitored = self.prepared.monitored
        start, earlier_seconds = time.monotonic(), self.seconds
        for record in self._steps():
            self.step = record.step
            self.seconds = earlier_seconds + time.monotonic() - start
            scores = self.monitor.record(record, self.average)
            if self.persistence.is_overdue or interruption.requested or scores is not None:
                self.commit()
            # Only now: a step whose result was seen may never be taken again with fresh noise.
            if scores is not None and monitored is not None and self.observer is not None:
                self.observer.scored(self.step, monitored, scores)
            interruption.raise_if_requested()
            if self.monitor.stopped_early:
                break
        self.commit()

    def decide(self) -> Decision:
        """The decision of the finished model; what it releases is spent, saved and confirmed before its use.

        Call it before the account is closed: afterwards nothing more can be released.
        """
        logits_of = self._logits_of_average()
        had = self.released.score_histogram
        self.released.release_score_histogram(self.prepared, logits_of, self.persistence.account.spend)
        if self.released.score_histogram is not had:
            self.commit()
        return self.released.decision(self.prepared, logits_of)

    def _logits_of_average(self) -> LogitsOf:
        prepared = self.prepared
        model, views = self.average.averaged(prepared.model), prepared.views
        return partial(logits_of, model, mean=views.mean, std=views.std)

    def close_account(self) -> None:
        """See ``Persistence.close_account``."""
        self.persistence.close_account()

    def commit(self) -> None:
        """Save the state; see ``Persistence.commit``."""
        seen, named = (None, {}) if self.canaries is None else self.canaries.saved()
        values = {"seconds": self.seconds, "max_rows": self.max_rows, **named, **self.monitor.values()}
        values["released"] = self.released.values()
        self.persistence.commit(self.step, self.average, values, seen)
        if self.canaries is not None:
            self.canaries.projections.append()

    def restore(self, state: RunState) -> None:
        """Go back to the saved state, whose identity was checked."""
        saved = state.values
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.seconds_before = self.seconds
        self.lost_steps = max(0, self.persistence.account.begun_steps - self.step)
        self.monitor.restore(saved)
        if self.prepared.recipe.performance.microbatch_size is None:
            self.max_rows = saved["max_rows"]  # another free memory must not change a seeded run's rounding
        self.persistence.restore(state, self.average)
        if self.canaries is not None:
            self.canaries.restore(state)

    def _announce(self) -> None:
        if self.observer is None:
            return
        self.observer.started(self.prepared, self.step)
        copy_of = self.persistence.account.copy_of
        if copy_of is not None:
            self.observer.noted(_copied_run_note(copy_of))
        elif self.lost_steps:
            self.observer.noted(_repeated_steps_note(self.lost_steps))

    def _steps(self) -> Iterator[StepRecord]:
        prepared, schedule = self.prepared, self.monitor.schedule
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
                optimizer=prepared.optimizer,
                learning_rate=lambda _: schedule.rate,
                average=self.average,
                source=prepared.source,
                start_step=self.step,
            )
        sum_of = partial(gradient_sum, plan=prepared.plan, max_rows=self.max_rows)
        sums, canaries = sum_of(prepared), self.canaries
        return fit(
            prepared.model,
            sums if canaries is None else canaries.joined_to(sums, prepared, sum_of),
            prepared.plan,
            optimizer=prepared.optimizer,
            learning_rate=lambda _: schedule.rate,
            average=self.average,
            source=prepared.source,
            spend=self.persistence.account.spend,
            normalised_update=prepared.recipe.training.normalised_update,
            kalman=prepared.kalman,
            start_step=self.step,
            on_noisy_sum=None if canaries is None else canaries.observe,
        )


def gradient_sum(prepared: Prepared, plan: Plan, *, max_rows: int) -> GradientSum:
    """Computes the clipped sums of this run: in closed form where there is one, else by the engine."""
    if prepared.in_closed_form:
        closed_form = head_gradients(
            prepared.model,
            prepared.views,
            prepared.units,
            clip_norm=plan.clip_norm,
            loss=prepared.components.loss_of(prepared.recipe),
            class_weights=prepared.class_weights,
        )
        if closed_form is not None:
            return closed_form
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
        in_bfloat16=prepared.recipe.performance.precision == "bfloat16",
    )


def _copied_run_note(run_id: str) -> str:
    return (
        f"This folder is a copy of run {run_id}, or was restored, and that run went on or ended since. What "
        "both lead to can be seen, so this is now a run of its own, and paid for."
    )


def _repeated_steps_note(steps: int) -> str:
    count = "1 step is" if steps == 1 else f"{steps:,} steps are"
    return (
        f"{count} done again: begun before the interruption, but not saved. Nobody saw their result, so that "
        "the budget stays as planned."
    )
