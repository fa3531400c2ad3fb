"""One small private training through the product's own code, watched by an auditor who sees every update.

The images have three channels. All units but the canary live in the first; the canary lives alone in the
second, so that its gradient is orthogonal to everybody else's; nobody lives in the third, whose weights show
the bare noise. Pixels are scaled so that every gradient is far longer than the clip norm: the canary moves
the sum by exactly the clip norm, in a direction that the auditor knows: the worst case of the guarantee.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.data import ImageSet
from sfumato.errors import ConfigError
from sfumato.gradients import ClippedSum
from sfumato.privacy.plan import Plan
from sfumato.randomness import RandomSource, SecureSource
from sfumato.run.state import RunState, load_state, save_state
from sfumato.training.averaging import WeightAverage
from sfumato.training.gradient_sums import EngineSum, GradientSum, head_gradients
from sfumato.training.inputs import Units, Views
from sfumato.training.last_layer import LastLayerViews
from sfumato.training.loop import fit

Part = Literal["views", "patients", "microbatches", "head", "ema", "resume"]
Canary = Literal["input", "gradient"]
PARTS: tuple[Part, ...] = get_args(Part)

NUM_UNITS = 10  # few, so that a divisor or a count that depends on one unit shows
NUM_CLASSES, SIDE = 10, 8
OTHERS, CANARY, SILENT = (slice(channel * SIDE**2, (channel + 1) * SIDE**2) for channel in range(3))
LABEL = 0  # of the canary
STD = 1e-3  # pixels become up to 1,000
LEARNING_RATE = 1e-6  # small: the canary must stay as wrong as it began
EMA_DECAY = 0.9


@dataclass(frozen=True)
class Observation:
    """What the auditor saw of one training, each in units of the clip norm."""

    projections: np.ndarray  # of each step's noisy sum on the canary's clipped gradient
    silent_squares: float  # sum of squares over all silent coordinates and steps
    fingerprints: tuple[int, ...]  # of the silent coordinates, step by step: equal means equal noise
    averaged: float  # the released average's projection


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Trains with the canary or without; ``over`` names the parts of the product that take part.

    Guarantee: every training has its own source of randomness, and its own noise, sampling and state.
    """

    plan: Plan
    over: frozenset[Part] = frozenset()
    canary: Canary = "input"

    def __post_init__(self) -> None:
        if "head" in self.over and self.over & {"views", "patients", "microbatches"}:
            raise ConfigError(
                "audit-parts-exclude",
                "head goes with neither views, patients nor microbatches.",
                why="The closed form is for rows that are units, all at once.",
                fix="Audit the head in a run of its own.",
            )
        if "resume" in self.over and self.plan.num_steps < 2:
            raise ConfigError(
                "audit-needs-steps",
                "a training of 1 step cannot be interrupted in the middle.",
                fix="Give --num-steps 2 or more.",
            )

    def observe(self, *, member: bool) -> Observation:
        """Train once, with the canary among the units or without it."""
        state, start, middle = self._fresh(0), 0, self.plan.num_steps // 2
        if "resume" in self.over:
            self._run(state, member, stop=middle)
            state, start = self._restored(state, step=middle), middle
        self._run(state, member, start=start)
        weights, gradients = (torch.stack(part).double() for part in zip(*state.optimizer.seen, strict=True))
        # the loop divides by the expected size and the clip norm
        gradients *= self.plan.batch_size
        projections = (gradients[:, :, CANARY] * self._directions(weights)).sum((1, 2))
        silent = gradients[:, :, SILENT].contiguous().numpy()
        # weights move against the gradient, from zero
        averaged = -state.average.weights["head.weight"][:, CANARY].double() / LEARNING_RATE
        return Observation(
            projections=projections.numpy(),
            silent_squares=float(np.square(silent).sum()),
            fingerprints=tuple(_fingerprint(step) for step in silent),
            averaged=float((averaged * self._directions(weights[:1])[0]).sum()) * self.plan.batch_size,
        )

    def _directions(self, weights: Tensor) -> Tensor:
        """Unit vectors along the canary's clipped gradient under the weights of each step, in its channel."""
        if self.canary == "gradient":
            directions = torch.zeros(len(weights), NUM_CLASSES, SIDE**2, dtype=torch.float64)
            directions[:, LABEL, 0] = 1.0
            return directions
        row = torch.full((SIDE**2,), 1 / STD, dtype=torch.float64)
        wrong = torch.softmax(weights[:, :, CANARY] @ row, dim=1)
        wrong[:, LABEL] -= 1
        return (wrong / wrong.norm(dim=1, keepdim=True))[:, :, None] * (row / row.norm())

    def _run(self, state: _State, member: bool, *, start: int = 0, stop: int | None = None) -> None:
        source = SecureSource()
        steps = fit(
            state.model,
            self._sum(state.model, source, member),
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
        return _State(model, WeightAverage.start(model, decay=EMA_DECAY), _RecordingSGD(model))

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
    def _models(self) -> tuple[_LinearModel, _LinearModel]:
        """Before an interruption and after it."""
        return _LinearModel(), _LinearModel()

    def _sum(self, model: nn.Module, source: RandomSource, member: bool) -> GradientSum:
        """The clipped sums of the units, with the canary or without."""
        units = self._units[member and self.canary == "input"]
        if "head" in self.over:
            found: GradientSum = self._head_sum(model, member and self.canary == "input")
        else:
            found = EngineSum(
                model=model,
                units=units,
                inputs=self._views,
                clip_norm=self.plan.clip_norm,
                source=source,
                max_rows=2 if "microbatches" in self.over else 4096,
            )
        if self.canary == "gradient" and member:
            return WithGradientCanary(others=found, clip_norm=self.plan.clip_norm)
        return found

    def _head_sum(self, model: nn.Module, member: bool) -> GradientSum:
        """The closed form, built once: its rows never change."""
        key = (self._models.index(model), member)
        if key not in self._head_sums:
            units = self._units[member]
            rows = units.data.images.flatten(1) / (255 * STD)
            inputs = LastLayerViews(images=self._views, features=rows)
            found = head_gradients(model, inputs, units, clip_norm=self.plan.clip_norm)
            if found is None:
                raise AssertionError("the audit's own model has a closed form")
            self._head_sums[key] = found
        return self._head_sums[key]

    @cached_property
    def _head_sums(self) -> dict[tuple[int, bool], GradientSum]:
        return {}

    @cached_property
    def _views(self) -> Views:
        # the canary is of one colour, so that every crop and flip of it is the same
        count, padding = (4, 2) if "views" in self.over else (0, 0)
        return Views(mean=(0.0,), std=(STD,), count=count, padding=padding, flip=bool(count))

    @cached_property
    def _units(self) -> dict[bool, Units]:
        """The units without the canary, and with it as the last."""
        images_each = 3 if "patients" in self.over else 1
        draws = torch.Generator().manual_seed(0)  # public images; nothing rests on which they are
        images = torch.zeros(NUM_UNITS, images_each, 3, SIDE, SIDE, dtype=torch.uint8)
        shape = (NUM_UNITS - 1, images_each, SIDE, SIDE)
        images[:-1, :, 0] = torch.randint(1, 256, shape, generator=draws, dtype=torch.uint8)
        images[-1, :, 1] = 255
        labels = torch.randint(0, NUM_CLASSES, (NUM_UNITS,), generator=draws)
        labels[-1] = LABEL
        numbers = torch.arange(NUM_UNITS).repeat_interleave(images_each)
        data = ImageSet(
            images=images.flatten(0, 1),
            labels=labels[numbers],
            classes=tuple(map(str, range(NUM_CLASSES))),
            patients=numbers,
            name="audit",
        )
        sets = {True: data, False: data.select(numbers < NUM_UNITS - 1)}
        if "patients" in self.over:
            return {key: Units.patients(value, max_images=2) for key, value in sets.items()}
        return {key: Units.images(value) for key, value in sets.items()}


@dataclass(frozen=True, kw_only=True)
class WithGradientCanary:
    """Sums of ``others`` and of one more unit, the last, whose clipped gradient is one coordinate.

    It passes by the clip, so that sampling, noise and loop are audited alone.
    """

    others: GradientSum
    clip_norm: float

    @property
    def num_units(self) -> int:
        return self.others.num_units + 1

    def __call__(self, indices: Tensor, step: int) -> ClippedSum:
        is_canary = indices == self.others.num_units
        total = self.others(indices[~is_canary], step)
        if is_canary.any():
            total.gradients["head.weight"][LABEL, CANARY.start] += self.clip_norm
        return total


class _LinearModel(nn.Sequential):
    """Softmax regression on pixels."""

    head: nn.Linear

    def __init__(self) -> None:
        head = nn.Linear(3 * SIDE**2, NUM_CLASSES)
        super().__init__(OrderedDict[str, nn.Module](flatten=nn.Flatten(), head=head))


class _RecordingSGD(torch.optim.SGD):
    """Ordinary SGD that keeps the weights and the gradient of every step."""

    def __init__(self, model: _LinearModel) -> None:
        super().__init__(model.parameters(), lr=LEARNING_RATE)
        self.weight = model.head.weight
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.register_step_pre_hook(_record_step)


def _record_step(optimizer: torch.optim.Optimizer, _args: object, _options: object) -> None:
    assert isinstance(optimizer, _RecordingSGD)
    gradient = optimizer.weight.grad
    assert gradient is not None  # the loop sets it before each step
    optimizer.seen.append((optimizer.weight.detach().clone(), gradient.clone()))


@dataclass(frozen=True)
class _State:
    model: _LinearModel
    average: WeightAverage
    optimizer: _RecordingSGD


def _fingerprint(values: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(values.tobytes(), digest_size=6).digest())
