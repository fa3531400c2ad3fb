"""Learning rates over time: torch's schedules give exactly the rates of the formulas, also after a resume."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfumato.recipes.recipe import ScheduleSettings
from sfumato.training.optimizers import Schedule


@dataclass
class Formulas:
    """The oracle: the rate of every step written out, and a plateau that counts steps instead of scores."""

    settings: ScheduleSettings
    learning_rate: float
    num_steps: int
    steps_per_epoch: float
    scale: float = 1.0
    best: float = math.inf
    best_step: int = 0

    def rate(self, step: int) -> float:
        kind = self.settings
        if kind.name == "step":
            changes = int(step / (kind.every_epochs * self.steps_per_epoch))
            return self.learning_rate * kind.factor**changes
        if kind.name == "cosine":
            wave = 0.5 * (1 + math.cos(math.pi * step / self.num_steps))
            return self.learning_rate * (kind.final + (1 - kind.final) * wave)
        return self.learning_rate * self.scale

    def observe(self, step: int, loss: float) -> None:
        if self.settings.name != "plateau":
            return
        if loss < self.best:
            self.best, self.best_step = loss, step
        elif step - self.best_step > self.settings.patience_epochs * self.steps_per_epoch:
            self.scale *= self.settings.factor
            self.best_step = step  # the lower rate gets its own time


@st.composite
def runs(draw):
    """Settings of a run, and the loss at each evaluation: falling, stagnating, or no number at all."""
    share = st.floats(0, 1)
    form = ScheduleSettings(
        name=draw(st.sampled_from(("constant", "step", "cosine", "plateau"))),
        factor=draw(share),
        every_epochs=draw(st.floats(0.05, 20)),
        patience_epochs=draw(st.sampled_from((0.0, 0.7, 1.0, 3.0))),
        final=draw(share),
    )
    num_steps, every = draw(st.integers(1, 120)), draw(st.integers(1, 12))
    loss = st.one_of(st.sampled_from((1.0, 2.0, math.inf, math.nan)), st.floats(0, 3))
    count = num_steps // every + 1
    return {
        "settings": form,
        "learning_rate": draw(st.floats(1e-6, 50)),
        "num_steps": num_steps,
        "steps_per_epoch": draw(st.one_of(st.floats(0.5, 40), st.integers(1, 20).map(float))),
        "evaluate_every": every,
    }, draw(st.lists(loss, min_size=count, max_size=count))


def rates(run: dict, losses: list[float], *, resume_at: int | None = None) -> list[float]:
    schedule, used = Schedule(**run), []
    every = run["evaluate_every"]
    for step in range(run["num_steps"]):
        if step == resume_at:
            saved = json.loads(json.dumps(schedule.state_dict(), allow_nan=False))
            schedule = Schedule(**run)
            schedule.load_state_dict(saved)
        used.append(schedule.rate)
        schedule.advance()
        if (step + 1) % every == 0:
            schedule.observe(losses[(step + 1) // every - 1])
    return used


def expected(run: dict, losses: list[float]) -> list[float]:
    every = run["evaluate_every"]
    formulas = Formulas(**{key: value for key, value in run.items() if key != "evaluate_every"})
    used = []
    for step in range(run["num_steps"]):
        used.append(formulas.rate(step))
        if (step + 1) % every == 0:
            formulas.observe(step + 1, losses[(step + 1) // every - 1])
    return used


@settings(max_examples=400, deadline=None)
@given(runs(), st.integers(0, 120))
def test_every_rate_is_that_of_the_formulas_to_the_last_bit(case, resume_at):
    run, losses = case
    assert rates(run, losses) == expected(run, losses)
    assert rates(run, losses, resume_at=resume_at) == expected(run, losses)


def schedule(**changes) -> Schedule:
    values = {"learning_rate": 2.0, "num_steps": 100, "steps_per_epoch": 10.0, "evaluate_every": 10}
    return Schedule(ScheduleSettings(**changes), **values)


def test_schedules_have_their_stated_form():
    def all_rates(**changes) -> list[float]:
        one, found = schedule(**changes), []
        for _ in range(101):
            found.append(one.rate)
            one.advance()
        return found

    assert set(all_rates()) == {2.0}
    steps = all_rates(name="step", factor=0.5, every_epochs=2)
    assert [steps[step] for step in (0, 19, 20, 40)] == [2.0, 2.0, 1.0, 0.5]
    cosine = all_rates(name="cosine", final=0.1)
    assert cosine[0] == 2.0
    assert [cosine[50], cosine[100]] == pytest.approx([1.1, 0.2])


def test_a_plateau_halves_the_rate_only_after_its_patience():
    """Klause et al. 2022: when the loss stagnates for more than three epochs."""
    plateau = schedule(name="plateau", factor=0.5, patience_epochs=3)
    for loss, rate in ((1.0, 2.0), (1.1, 2.0), (1.1, 2.0), (1.1, 2.0), (1.1, 1.0), (0.5, 1.0)):
        plateau.observe(loss)
        assert plateau.rate == rate


def test_a_forgotten_state_is_seen():
    """The control of resuming: a schedule that begins anew has other rates."""
    fresh, later = schedule(name="cosine"), schedule(name="cosine")
    for _ in range(30):
        later.advance()
    assert fresh.rate != later.rate
    fresh.load_state_dict(later.state_dict())
    assert fresh.rate == later.rate
