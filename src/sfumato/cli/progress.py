"""How a run looks while it runs: a live line on a terminal, plain lines elsewhere. All on standard error."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from sfumato.recipes.recipe import Recipe
    from sfumato.run.prepare import Prepared, ScoredSet
    from sfumato.training.evaluation import AnyScores
    from sfumato.training.loop import StepRecord

_PLAIN_SECONDS = 10.0  # between plain lines


class PlainProgress:
    """A line every few seconds, for log files and pipes; ``quiet`` keeps only what is worth a sentence."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.num_steps = 0
        self.batch_size = 0.0
        self.unit = "image"
        self.clock = Clock()
        self.last_line = 0.0
        self.scored_text = ""

    def started(self, prepared: Prepared, start_step: int) -> None:
        self.num_steps, self.batch_size = prepared.num_steps, prepared.batch_size
        self.unit = prepared.recipe.privacy.unit
        self.clock = Clock(start_step)
        echo_start(prepared, start_step)

    def stepped(self, record: StepRecord, epsilon: float | None) -> None:
        if not self._due(last=record.step == self.num_steps):
            return
        speed, left = self.clock.speed_and_left(record.step, self.num_steps)
        budget = "no privacy" if epsilon is None else _spent(epsilon)
        rate = f"{speed * self.batch_size:,.0f} {self.unit}s/s"
        click.echo(f"step {record.step}/{self.num_steps}  {budget}  {rate}  {duration(left)} left", err=True)

    def scored(self, step: int, scored: ScoredSet, scores: AnyScores) -> None:
        if not self.quiet:
            click.echo(f"step {step}/{self.num_steps}  {scored_line(scored, scores)}", err=True)

    def noted(self, text: str) -> None:
        click.echo(text, err=True)

    def computed(self, what: str, done: int, total: int) -> None:
        if self._due(last=done == total):
            click.echo(f"{what}  {_of(done, total)}", err=True)

    def _due(self, *, last: bool) -> bool:
        """Whether it is time for a line; the last one always comes."""
        now = time.monotonic()
        if self.quiet or (now - self.last_line < _PLAIN_SECONDS and not last):
            return False
        self.last_line = now
        return True

    def close(self) -> None:
        """Nothing to put away."""


class LiveProgress:
    """One line that is redrawn, with a bar."""

    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.task: TaskID  # of the bar
        self.waiting: Progress | None = None  # before the steps: the bar of what is computed …
        self.waiting_for = ""  # … and what that is
        self.batch_size = 0.0
        self.unit = "image"
        self.clock = Clock()
        self.num_steps = 0

    def started(self, prepared: Prepared, start_step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.close()
        self.num_steps, self.batch_size = prepared.num_steps, prepared.batch_size
        self.unit, self.clock = prepared.recipe.privacy.unit, Clock(start_step)
        echo_start(prepared, start_step)
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[budget]}"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[left]} left"),
            TextColumn("{task.fields[score]}"),
            console=Console(stderr=True),
        )
        self.task = self.bar.add_task(
            "", total=prepared.num_steps, completed=start_step, budget="", speed="", left="…", score=""
        )
        self.bar.start()

    def stepped(self, record: StepRecord, epsilon: float | None) -> None:
        if self.bar is None:
            return
        speed, left = self.clock.speed_and_left(record.step, self.num_steps)
        self.bar.update(
            self.task,
            completed=record.step,
            budget="[bold red]NO PRIVACY" if epsilon is None else _spent(epsilon),
            speed=f"{speed * self.batch_size:,.0f} {self.unit}s/s",
            left=duration(left),
        )

    def scored(self, step: int, scored: ScoredSet, scores: AnyScores) -> None:
        if self.bar is not None:
            self.bar.update(self.task, score=scored_line(scored, scores))

    def noted(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text)
        else:
            click.echo(text, err=True)

    def computed(self, what: str, done: int, total: int) -> None:
        if self.bar is not None:  # between steps: one terminal shows one bar
            self.bar.update(self.task, score="" if done == total else f"{what} {_of(done, total)}")
            return
        if what != self.waiting_for:  # such as listing, whose end nobody tells
            self.close()
        if self.waiting is None:
            self.waiting, self.waiting_for = _computation_bar(what, total), what
        self.waiting.update(self.waiting.task_ids[0], completed=done)
        if done == total:
            self.close()

    def close(self) -> None:
        """Leave the terminal as it was, also after an error."""
        for bar in (self.bar, self.waiting):
            if bar is not None:
                bar.stop()
        self.waiting, self.waiting_for = None, ""


class Clock:
    """Steps per second since the start, and what is left."""

    def __init__(self, start_step: int = 0) -> None:
        self.start_step, self.began = start_step, time.monotonic()

    def speed_and_left(self, step: int, num_steps: int) -> tuple[float, float]:
        speed = (step - self.start_step) / max(time.monotonic() - self.began, 1e-9)
        return speed, (num_steps - step) / max(speed, 1e-9)


class CountLines:
    """A line every few seconds for work that is counted in ``things``; ``quiet`` shows none.

    Speed is measured from the first call on: starting processes takes its time.
    """

    def __init__(self, things: str, *, quiet: bool) -> None:
        self.things, self.quiet = things, quiet
        self.clock: Clock | None = None
        self.last_line = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if self.clock is None:
            self.clock, self.last_line = Clock(done), now
        if self.quiet or (now - self.last_line < _PLAIN_SECONDS and done < total):
            return
        self.last_line = now
        speed, left = self.clock.speed_and_left(done, total)
        counted = f"{done:,}/{total:,} {self.things}   {speed:.2f} {self.things}/s"
        click.echo(f"{what}   {counted}   {duration(left)} left", err=True)


def make_progress(*, quiet: bool = False) -> PlainProgress | LiveProgress:
    """What fits the place that standard error goes to; ``quiet`` for callers that read JSON."""
    return LiveProgress() if sys.stderr.isatty() and not quiet else PlainProgress(quiet=quiet)


def _computation_bar(what: str, total: int) -> Progress:
    """A running bar with the time that is left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(bar_width=None), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    bar.add_task("", total=total or None)  # a bar without a total runs to and fro
    bar.start()
    return bar


def _of(done: int, total: int) -> str:
    """How much is done; of a total of 0 that is all that is known."""
    return f"{done:,}/{total:,}" if total else f"{done:,}"


def echo_start(prepared: Prepared, start_step: int) -> None:
    """What is about to happen, in two lines."""
    from sfumato.privacy.statement import round_up

    train, unit = prepared.splits.train, prepared.recipe.privacy.unit
    parameters = sum(value.numel() for value in prepared.model.parameters() if value.requires_grad)
    units = f"{len(prepared.units):,} {unit}s"
    if unit == "patient":
        units += f" with {len(train):,} images"
    name, kind = prepared.recipe.model.name, "findings" if train.multi_label else "classes"
    click.echo(
        f"{name}, {parameters:,} trained parameters, on {train.name}: {units}, {len(train.classes)} {kind}; "
        f"{prepared.num_steps:,} steps of {prepared.batch_size:,.0f} {unit}s expected.",
        err=True,
    )
    plan = prepared.plan
    if plan is None:
        click.secho("NO PRIVACY: this run gives no guarantee to anybody.", fg="red", bold=True, err=True)
    else:
        click.echo(
            f"Budget for each {unit}: ε = {round_up(plan.epsilon)}, δ = {plan.delta:g}; noise multiplier "
            f"{plan.noise_multiplier:.4g}, clip norm {plan.clip_norm:g}, {plan.accountant} accountant.",
            err=True,
        )
        if not prepared.source.releasable:
            click.secho(
                "NOT RELEASABLE: with a seed, whoever knows it can subtract the noise.", fg="red", err=True
            )
    for note in prepared.splits.notes:
        click.echo(note, err=True)
    for finding in prepared.findings:
        click.echo(f"{finding.severity}{finding.mark}: {finding.what} {finding.cure}", err=True)
    if start_step:
        click.echo(f"Resumed after step {start_step}.", err=True)


def scored_line(scored: ScoredSet, scores: AnyScores) -> str:
    """An evaluation in a few words."""
    note = " (sensitive)" if scored.sensitive else ""
    mean_auc = getattr(scores, "mean_auc", None)
    if mean_auc is not None:  # of several findings: accuracy says little where most are rare
        return f"{scored.split} mean AUC {mean_auc:.3f}{note}"
    return f"{scored.split} accuracy {100 * scores.accuracy:.1f} %{note}"


def _spent(epsilon: float) -> str:
    from sfumato.privacy.statement import round_up

    return f"ε {round_up(epsilon)}"


def duration(seconds: float) -> str:
    """Time for people: 0:42, 12:05, 3:10:00."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def note_busy_cores(recipe: Recipe) -> None:
    """Take fewer threads on a busy machine, and say so; with a seed sums must be rounded as they were."""
    if recipe.training.seed is not None:
        return
    from sfumato.run.devices import spare_busy_cores

    note = spare_busy_cores()
    if note is not None:
        click.echo(note, err=True)
