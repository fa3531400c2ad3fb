"""The audit of De et al. 2022, appendix A.2: membership inference against LeNet on MNIST.

Phase I finds the z and the hyper-parameters at which models with and without z differ most; phase II trains
fresh models there, chooses a threshold on some of them, and bounds ε from below with the others. All models
start from the same weights. Phase II draws everything from the operating system (or from ``seed``), phase I
from seeds that both sides share: then z is all that tells them apart, and few models show by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch

from sfumato.audit.gaussian import gaussian_total_variation
from sfumato.audit.many_models import losses_of, train_many
from sfumato.audit.paper_settings import (
    CANARIES,
    Experiment,
    Problem,
    Setting,
    all_settings,
    plan_for,
    prepare,
    setting_plan,
)
from sfumato.audit.paper_store import Store
from sfumato.gradients.memory import keep_freed_memory
from sfumato.randomness import SecureSource, SeededSource

# Of so many best settings, so many models a side (the paper: 1,000 of all). The spread of 8 models is off by
# a quarter, and the luckiest of 90 by half, so that the last few are told apart by many more.
PHASE_ONE = ((90, 8), (12, 32), (4, 100))
SEEDS_PER_AUDIT = 1_000_000

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Models to be trained together; ``number`` is what is drawn once only."""

    phase: int
    epsilon: float
    setting: Setting
    member: bool
    count: int
    number: int

    @property
    def group(self) -> str:
        """Under which its scores are kept: models of one distribution."""
        rate, clip, steps = self.setting.training
        side = f"in {self.setting.canary}" if self.member else "out"
        training = f"rate {rate:g} clip {clip:g} steps {steps}"
        return f"phase {self.phase} | epsilon {self.epsilon:g} | {training} | {side}"


@dataclass(frozen=True, kw_only=True)
class PaperAudit:
    """An audit in a folder. Calling a phase again goes on where it was, also after kill -9."""

    problem: Problem
    views: int
    store: Store
    seed: int | None = None
    init_seed: int = 0
    num_workers: int = 1

    def phase_one(
        self,
        epsilon: float,
        *,
        rounds: Sequence[tuple[int, int]] = PHASE_ONE,
        progress: Progress | None = None,
    ) -> list[tuple[Setting, float]]:
        """Settings of the last round with their total variation, best first."""
        ranked = [(setting, 0.0) for setting in all_settings(self.problem)]
        for kept, num_models in rounds:
            settings = [setting for setting, _ in ranked[:kept]]
            self._train(self._tasks(1, epsilon, settings, num_models), progress)
            found = [(setting, self._total_variation(epsilon, setting)) for setting in settings]
            ranked = sorted(found, key=lambda each: -each[1])
        return ranked

    def phase_two(
        self, epsilon: float, setting: Setting, num_models: int, *, progress: Progress | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores of models with z and of models without it: minus their loss on z."""
        self._train(self._tasks(2, epsilon, [setting], num_models), progress)
        return self.scores(2, epsilon, setting)

    def scores(self, phase: int, epsilon: float, setting: Setting) -> tuple[np.ndarray, np.ndarray]:
        """What is kept of this setting, in the order of training."""
        task = Task(phase=phase, epsilon=epsilon, setting=setting, member=True, count=0, number=0)
        others = replace(task, member=False)
        return self._scores_of(task.group, setting), self._scores_of(others.group, setting)

    def _scores_of(self, group: str, setting: Setting) -> np.ndarray:
        losses = self.store.losses(group)
        column = list(CANARIES).index(setting.canary)
        return -losses[:, column] if len(losses) else np.zeros(0)

    def _total_variation(self, epsilon: float, setting: Setting) -> float:
        return gaussian_total_variation(*self.scores(1, epsilon, setting))

    def _tasks(
        self, phase: int, epsilon: float, settings: Sequence[Setting], num_models: int
    ) -> Iterator[Task]:
        """What is still to be trained, both sides in turn so that an audit can be read at any moment."""
        groups: dict[str, Task] = {}
        for setting in settings:
            for member in (True, False):
                task = Task(phase=phase, epsilon=epsilon, setting=setting, member=member, count=0, number=0)
                groups.setdefault(task.group, task)
        done = {group: len(self.store.losses(group)) for group in groups}
        while min(done.values()) < num_models:
            for group, task in groups.items():
                count = min(self.problem.models_at_once, num_models - done[group])
                if count > 0:
                    yield replace(task, count=count, number=done[group])
                    done[group] += count

    def _train(self, tasks: Iterator[Task], progress: Progress | None) -> None:
        """Train in as many threads as there are workers; a finished task is durable at once."""
        waiting = list(tasks)
        total, done = sum(task.count for task in waiting), 0
        if not waiting:
            return
        keep_freed_memory()
        experiment = prepare(self.problem, views=self.views, init_seed=self.init_seed)
        for task in waiting:
            plan_for(
                self.problem, task.epsilon, task.setting.num_steps
            )  # once, before the threads ask for it
        running: dict[Future[np.ndarray], Task] = {}
        with _one_thread_each(self.num_workers) as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < self.num_workers:
                        task = waiting.pop(0)
                        running[pool.submit(self._losses, experiment, task)] = task
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        task = running.pop(future)
                        self.store.add(task.group, task.number, future.result())
                        done += task.count
                        if progress is not None:
                            progress(task.group, done, total)
            finally:
                waiting.clear()

    def _losses(self, experiment: Experiment, task: Task) -> np.ndarray:
        """(models, canaries): the losses of freshly trained models on every z."""
        model = deepcopy(
            experiment.model
        )  # scoring puts weights into it: no other thread may use it meanwhile
        stacked = train_many(
            model,
            setting_plan(self.problem, task.epsilon, task.setting),
            experiment.with_canary(task.setting.canary) if task.member else experiment.examples,
            experiment.views,
            num_models=task.count,
            learning_rate=task.setting.learning_rate,
            source=self._source(task),
        )
        return losses_of(stacked, model, *experiment.rows()).double().numpy()

    def _source(self, task: Task) -> SecureSource | SeededSource:
        if task.phase == 1:  # the same for all groups, members or not: see the module's text
            return SeededSource(task.number)
        if self.seed is None:
            return SecureSource()
        side = SEEDS_PER_AUDIT // 2 if task.member else 0
        return SeededSource((self.seed + 1) * SEEDS_PER_AUDIT + side + task.number)


def _one_thread_each(num_workers: int) -> ThreadPoolExecutor:
    """Small pieces stay in each core's cache: every operation runs in one thread."""
    torch.set_num_threads(1)
    return ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,))
