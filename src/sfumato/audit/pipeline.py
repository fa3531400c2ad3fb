"""One small private training through the product's own code, watched by an auditor who sees every update.

The images have a channel for each canary, one for all other units, and silent ones. A canary lives alone in
its channel, so that its gradient is orthogonal to everybody else's; nobody lives in the silent ones, whose
weights show the bare noise. Pixels are scaled so that every gradient is far longer than the clip norm: a
canary moves the sum by exactly the clip norm, in a direction that the auditor knows: the worst case of the
guarantee. Canaries are the first units, so that the number of every other unit depends on who is there.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from scipy.special import softmax
from torch import nn

from sfumato.audit.two_ranks import over_two_ranks
from sfumato.audit.watched import FIRST_CANARY, OTHERS, SIDE, RecordingSGD, WatchedModel, WithGradientCanaries
from sfumato.data import ImageSet
from sfumato.errors import ConfigError
from sfumato.privacy.plan import Plan
from sfumato.randomness import RandomSource, SecureSource
from sfumato.run.state import RunState, load_state, save_state
from sfumato.training.averaging import WeightAverage
from sfumato.training.gradient_sums import EngineSum, GradientSum, head_gradients
from sfumato.training.inputs import Units, Views
from sfumato.training.last_layer import LastLayerViews
from sfumato.training.loop import fit

Part = Literal["views", "patients", "microbatches", "dropout", "head", "ema", "resume", "ranks"]
Canary = Literal["input", "gradient"]
PARTS: tuple[Part, ...] = get_args(Part)
Present = Sequence[bool] | np.ndarray  # which canaries are there

NUM_OTHERS = 9  # few, so that a divisor or a count that depends on one unit shows
NUM_CLASSES = 10
LABEL = 0  # of the canaries
BRIGHT = 0.25  # share of the other units' pixels
STD = 1e-3  # pixels become up to 1,000
LEARNING_RATE = 1e-6  # small: the canaries must stay as wrong as they began
EMA_DECAY = 0.9


@dataclass(frozen=True)
class Observation:
    """What the auditor saw of one training, each in units of the clip norm."""

    projections: np.ndarray  # (steps, canaries): of each noisy sum on the canary's clipped gradient
    averaged: np.ndarray  # (canaries,): the released average's projection, less half of what a canary adds
    silent_squares: float  # sum of squares over all silent coordinates and steps
    fingerprints: tuple[int, ...]  # of the silent coordinates, step by step: equal means equal noise
    others: np.ndarray  # (classes, pixels): the first noisy sum where the other units live


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Trains with some of its canaries; ``over`` names the parts of the product that take part.

    Guarantee: every training has its own source of randomness, and its own noise, sampling and state.
    """

    plan: Plan
    over: frozenset[Part] = frozenset()
    canary: Canary = "input"
    num_canaries: int = 1

    def __post_init__(self) -> None:
        if "head" in self.over and self.over & {"views", "patients", "microbatches", "dropout"}:
            raise ConfigError(
                "audit-parts-exclude",
                "head goes with neither views, patients, microbatches nor dropout.",
                why="The closed form is for fixed rows that are units, all at once.",
                fix="Audit the head in a run of its own.",
            )
        if "resume" in self.over and self.plan.num_steps < 2:
            raise ConfigError(
                "audit-needs-steps",
                "a training of 1 step cannot be interrupted in the middle.",
                fix="Give --num-steps 2 or more.",
            )

    def observe(self, present: Present, *, num_steps: int | None = None) -> Observation:
        """Train once with the canaries that are ``present``, and look at all steps or the first ones."""
        num_steps = num_steps or self.plan.num_steps
        units, middle = self.units(present), num_steps // 2
        state, start = self._fresh(0), 0
        if "resume" in self.over:
            self._run(state, units, present, stop=middle)
            state, start = self._restored(state, step=middle), middle
        self._run(state, units, present, start=start, stop=num_steps)
        seen = state.optimizer.seen
        # the loop divides by the expected size and the clip norm
        size = self.plan.batch_size
        silent = [step.silent * size for step in seen]
        return Observation(
            projections=np.stack([self._projections(step.weights, step.gradient) for step in seen]) * size,
            averaged=self._averaged(state, seen[0].weights, num_steps) * size,
            silent_squares=float(np.square(silent).sum()),
            fingerprints=tuple(_fingerprint(step) for step in silent),
            others=seen[0].others * size,
        )

    def replayed_others(self, present: Present) -> np.ndarray:
        """The first step's sum where the other units live, before noise: full batches, its own randomness."""
        state, units = self._fresh(0), self.units(present)
        with self._sum(state.model, units, SecureSource(), present) as gradient_sum:
            total = gradient_sum(torch.arange(gradient_sum.num_units), 0).gradients["head.weight"]
        blocks = total.double().reshape(NUM_CLASSES, -1, SIDE**2)
        return (blocks[:, OTHERS] / self.plan.clip_norm).numpy()

    def _projections(self, weights: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """Of one gradient on the canaries' clipped gradients; shapes as in ``Watched``."""
        if self.canary == "gradient":
            return gradient[LABEL, :, 0]
        wrong = softmax(weights / STD, axis=0)
        wrong[LABEL] -= 1
        # without a clip a canary may be learnt in one step, and have no gradient after it
        wrong /= np.maximum(np.linalg.norm(wrong, axis=0), 1e-300)
        # all pixels of a canary are equal, so that its row has the direction of ones
        return (wrong * gradient.sum(-1)).sum(0) / SIDE

    def _averaged(self, state: _State, weights: np.ndarray, num_steps: int) -> np.ndarray:
        moved = state.average.weights["head.weight"].double().reshape(NUM_CLASSES, -1, SIDE**2)
        # weights move against the gradient, from zero
        found = self._projections(weights, -moved[:, FIRST_CANARY:].numpy() / LEARNING_RATE)
        weight, average = 0.0, 0.0
        for step in range(num_steps):
            decay = min(EMA_DECAY, (1 + step) / (10 + step))
            weight += self.plan.sampling_rate / self.plan.batch_size
            average = decay * average + (1 - decay) * weight
        return found - average / 2

    def _run(
        self,
        state: _State,
        units: Units,
        present: Present,
        *,
        start: int = 0,
        stop: int,
    ) -> None:
        source = SecureSource()
        with self._sum(state.model, units, source, present) as gradient_sum:
            steps = fit(
                state.model,
                gradient_sum,
                self.plan,
                optimizer=state.optimizer,
                learning_rate=lambda step: LEARNING_RATE,
                average=state.average,
                source=source,
                spend=lambda steps: None,
                start_step=start,
            )
            for record in steps:
                if record.step == stop:
                    break

    def _fresh(self, number: int) -> _State:
        """The state before the first step."""
        model = self._models[number]  # checking a new model takes longer than a step
        nn.init.zeros_(model.head.weight)
        nn.init.zeros_(model.head.bias)
        average = WeightAverage.start(model, decay=EMA_DECAY)
        return _State(model, average, RecordingSGD(model, learning_rate=LEARNING_RATE))

    def _restored(self, state: _State, *, step: int) -> _State:
        """Saved to a file, and read back by a program that knows nothing else."""
        fresh = self._fresh(1)
        with tempfile.TemporaryDirectory() as folder:
            saved = RunState.capture(state.model, state.average, state.optimizer, {"step": step})
            save_state(saved, Path(folder))
            load_state(Path(folder)).restore(fresh.model, fresh.average, fresh.optimizer)
        fresh.optimizer.seen = state.optimizer.seen  # what the auditor has seen stays seen
        return fresh

    @cached_property
    def _models(self) -> tuple[WatchedModel, ...]:
        """Before an interruption, after it, and the second rank's."""
        return tuple(
            WatchedModel(self.num_canaries, num_classes=NUM_CLASSES, dropout="dropout" in self.over)
            for _ in range(3)
        )

    @contextmanager
    def _sum(
        self, model: nn.Module, units: Units, source: RandomSource, present: Present
    ) -> Iterator[GradientSum]:
        """The clipped sums of the units and the canaries in gradient space, inside the block."""
        if "ranks" in self.over:
            sizes = units.offsets.diff().clamp(max=units.max_images)
            with over_two_ranks(
                partial(self._own_sum, units), (model, self._models[2]), unit_sizes=sizes, source=source
            ) as ranked:
                yield self._with_canaries(ranked, present)
        else:
            yield self._with_canaries(self._own_sum(units, model, source), present)

    def _with_canaries(self, found: GradientSum, present: Present) -> GradientSum:
        if self.canary == "input":
            return found
        return WithGradientCanaries(
            others=found, present=np.flatnonzero(present), label=LABEL, clip_norm=self.plan.clip_norm
        )

    def _own_sum(self, units: Units, model: nn.Module, source: RandomSource) -> GradientSum:
        """The clipped sums of the units, by one process."""
        clip_norm = self.plan.clip_norm
        if "head" in self.over:
            rows = units.data.images[:].flatten(1) / (255 * STD)
            inputs = LastLayerViews(images=self._views, features=rows)
            closed = head_gradients(model, inputs, units, clip_norm=clip_norm)
            if closed is None:
                raise AssertionError("the audit's own model has a closed form")
            return closed
        return EngineSum(
            model=model,
            units=units,
            inputs=self._views,
            clip_norm=clip_norm,
            source=source,
            max_rows=2 if "microbatches" in self.over else 4096,
        )

    @cached_property
    def _views(self) -> Views:
        # a canary is of one colour, so that every crop and flip of it is the same
        count, padding = (4, 1) if "views" in self.over else (0, 0)
        return Views(mean=(0.0,), std=(STD,), count=count, padding=padding, flip=bool(count))

    def units(self, present: Present) -> Units:
        """The canaries that are there, and all others; canaries in gradient space have no images."""
        kept = np.ones(self.num_canaries + NUM_OTHERS, dtype=bool)
        kept[: self.num_canaries] = np.asarray(present) & (self.canary == "input")
        data = self._everybody.select(torch.from_numpy(kept)[self._everybody.patients])
        return Units.patients(data, max_images=2) if "patients" in self.over else Units.images(data)

    @cached_property
    def _everybody(self) -> ImageSet:
        images_each, num_units = 6 if "patients" in self.over else 1, self.num_canaries + NUM_OTHERS
        draws = torch.Generator().manual_seed(0)  # public images; nothing rests on which they are
        shape = (num_units, images_each, FIRST_CANARY + self.num_canaries, SIDE, SIDE)
        images, canaries = torch.zeros(shape, dtype=torch.uint8), torch.arange(self.num_canaries)
        # few bright pixels, so that other views of an image or other dropped pixels change its direction
        bright = torch.rand(NUM_OTHERS, images_each, SIDE, SIDE, generator=draws) < BRIGHT
        images[self.num_canaries :, :, OTHERS] = 255 * bright.byte()
        images[canaries, :, FIRST_CANARY + canaries] = 255
        labels = torch.randint(0, NUM_CLASSES, (num_units,), generator=draws)
        labels[canaries] = LABEL
        numbers = torch.arange(num_units).repeat_interleave(images_each)
        data = ImageSet(
            images=images.flatten(0, 1),
            labels=labels[numbers],
            classes=tuple(map(str, range(NUM_CLASSES))),
            patients=numbers,
            name="audit",
        )
        return data.select(numbers >= 0)  # one that knows its images' checksums


@dataclass(frozen=True)
class _State:
    model: WatchedModel
    average: WeightAverage
    optimizer: RecordingSGD


def _fingerprint(values: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(values.tobytes(), digest_size=6).digest())
