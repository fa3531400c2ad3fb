"""Models that draw at random in their forward pass: each unit's numbers are its own, wherever it stands.

Dropout takes its mask from PyTorch's generator, row after row: remove a unit and everybody behind it has
another mask, so that the sum moves by far more than one clipped gradient. Here the numbers of a row are a
function of its unit and of the step alone (``Randomness``), and what all share is the same in every pass.

Which of a model's draws have rows is found out by sending two and then three rows through: a draw whose first
dimension follows the rows belongs to them, one whose shape stays is shared, and anything else is refused.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.errors import ConfigError, PrivacyError
from sfumato.gradients.random_operations import RandomOperations
from sfumato.gradients.segments import Group, Segments

Layout = tuple[
    tuple[bool, tuple[int, ...]], ...
]  # of each draw: whether it has rows, and its other dimensions


@runtime_checkable
class Randomness(Protocol):
    """A keyed source of random words for one step, as ``sfumato.randomness.UnitRandomness`` is."""

    def words(self, units: np.ndarray, rows: np.ndarray, count: int, *, stream: int) -> np.ndarray:
        """(len(units), count) uint32, a function of unit, row within the unit, and ``stream`` alone."""
        ...

    def shared_words(self, count: int, *, stream: int) -> np.ndarray:
        """(count,) uint32 that belong to no unit."""
        ...


@dataclass(frozen=True)
class RowDraws:
    """The rows of one pass and where their numbers come from."""

    randomness: Randomness
    units: np.ndarray  # of each row, its unit's number in the data set
    rows: np.ndarray  # of each row, its number within the unit

    @classmethod
    def of(cls, randomness: Randomness, unit_ids: Tensor, segments: Segments) -> RowDraws:
        """``unit_ids`` are those of the segments' units, in their order."""
        sizes = segments.sizes.cpu().numpy()
        ends = np.cumsum(sizes)
        rows = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - sizes, sizes)
        return cls(randomness, np.repeat(unit_ids.cpu().numpy(), sizes), rows)

    def uniform(self, stream: int, shape: tuple[int, ...], wide: bool, device: torch.device) -> Tensor:
        count = math.prod(shape[1:]) * (2 if wide else 1)
        words = self.randomness.words(self.units, self.rows, count, stream=stream)
        return _unit_interval(words, wide).reshape(shape).to(device)


def shared_uniform(
    randomness: Randomness, stream: int, shape: tuple[int, ...], wide: bool, device: torch.device
) -> Tensor:
    words = randomness.shared_words(math.prod(shape) * (2 if wide else 1), stream=stream)
    return _unit_interval(words[None], wide).reshape(shape).to(device)


def _unit_interval(words: np.ndarray, wide: bool) -> Tensor:
    if wide:
        words = np.ascontiguousarray(words).view(np.uint64)
        return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)
    return torch.from_numpy((words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24))


@dataclass
class Drawn:
    """Supplies the draws of one pass, and keeps those that a module's repeated forward pass needs again."""

    draws: RowDraws
    layout: Layout
    number: int = 0
    kept: list[tuple[bool, Tensor]] = field(default_factory=list)
    num_keeping: int = 0  # running modules that need them again

    def uniform(self, shape: tuple[int, ...], wide: bool, device: torch.device) -> Tensor:
        stream, self.number = self.number, self.number + 1
        num_rows = len(self.draws.units)
        has_rows, rest = self.layout[stream] if stream < len(self.layout) else (False, (-1,))
        if shape != ((num_rows, *rest) if has_rows else rest):
            raise _unclear(shape, "differs from what it was for fewer rows")
        if has_rows:
            values = self.draws.uniform(stream, shape, wide, device)
        else:
            values = shared_uniform(self.draws.randomness, stream, shape, wide, device)
        if self.num_keeping:
            self.kept.append((has_rows, values))
        return values


@contextmanager
def drawing(drawn: Drawn | None) -> Iterator[None]:
    """The forward pass, its random numbers as ``drawn`` has them; as it is without."""
    if drawn is None:
        yield
        return
    with RandomOperations(drawn.uniform):
        yield


class Replay:
    """The draws of a module's forward pass once more, for the units of one group or for one of them."""

    def __init__(self, kept: Sequence[tuple[bool, Tensor]], group: Group, unit: int | None = None) -> None:
        self.values = []
        for has_rows, values in kept:
            if has_rows:
                split = group.split(values)
                self.values.append(split if unit is None else split[unit])
            else:
                units = group.units.stop - group.units.start
                self.values.append(values.expand(units, *values.shape) if unit is None else values)

    def uniform(self, shape: tuple[int, ...], _wide: bool, _device: torch.device) -> Tensor:
        if not self.values or tuple(self.values[0].shape) != tuple(shape):
            raise RuntimeError(f"a draw of shape {tuple(shape)} was not made in the forward pass")
        return self.values.pop(0)


def layout_of(model: nn.Module, inputs: Tensor, randomness: Randomness) -> Layout:
    """Which of the model's draws have rows; empty if it draws nothing.

    Guarantee: a draw is taken for a row's only if its first dimension, and no other, follows the number of
    rows, and for shared only if no dimension does.
    """
    two, three = (_shapes(model, inputs[:1].expand(rows, *inputs.shape[1:]), randomness) for rows in (2, 3))
    if len(two) != len(three):
        raise _unclear((), "is made or not depending on how many rows there are")
    layout = []
    for first, second in zip(two, three, strict=True):
        if first == second:
            layout.append((False, first))
        elif first[:1] == (2,) and second[:1] == (3,) and first[1:] == second[1:]:
            layout.append((True, first[1:]))
        else:
            raise _unclear(first, f"for 2 rows becomes {second} for 3")
    return tuple(layout)


def _shapes(model: nn.Module, inputs: Tensor, randomness: Randomness) -> list[tuple[int, ...]]:
    """Shapes of all draws."""
    draws = AllShared(randomness)
    with torch.no_grad(), RandomOperations(draws.uniform):
        model(inputs.clone())
    return draws.shapes


class AllShared:
    """Supplies every draw as if all rows shared it, so that shared decisions are those of the step."""

    def __init__(self, randomness: Randomness) -> None:
        self.randomness = randomness
        self.shapes: list[tuple[int, ...]] = []

    def uniform(self, shape: tuple[int, ...], wide: bool, device: torch.device) -> Tensor:
        self.shapes.append(tuple(shape))
        return shared_uniform(self.randomness, len(self.shapes) - 1, shape, wide, device)


class _Drawn(Exception):
    """A draw was made."""


def first_random_layer(model: nn.Module, inputs: Tensor) -> str | None:
    """The innermost layer that draws first ("" for the model itself), or None if nothing is drawn."""
    running: list[str] = []
    innermost: list[str] = []

    def stop(*_: Any) -> Tensor:
        innermost.append(running[-1] if running else "")
        raise _Drawn

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, path=path: running.append(path)))
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
    try:
        with torch.no_grad(), RandomOperations(stop):
            model(inputs.clone())
    except _Drawn:
        return innermost[0]
    finally:
        for handle in handles:
            handle.remove()
    return None


def refuse_random(model: nn.Module, path: str) -> PrivacyError:
    """A model that draws, and no source that it may draw from."""
    kind = type(model.get_submodule(path)).__name__
    return PrivacyError(
        "random-model",
        f"{path or 'the model'} ({kind}) draws random numbers, and clipped_sum was given none.",
        why="From PyTorch's generator they depend on a unit's place in the batch, after torch.manual_seed "
        "in a way that everybody knows: removing one unit would change every other unit's gradient.",
        fix="Pass randomness=UnitRandomness(source, purpose='model', step=step) and unit_ids=, or set the "
        "layer's p to 0, or put it into eval mode.",
    )


def check_unit_ids(unit_ids: Tensor | None, num_units: int) -> None:
    """Refuse numbers that do not tell the units apart."""
    good = isinstance(unit_ids, Tensor) and unit_ids.shape == (num_units,) and unit_ids.dtype == torch.int64
    if not good or len(torch.unique(unit_ids)) != num_units:
        raise ConfigError(
            "bad-unit-ids",
            f"randomness needs unit_ids, {num_units} different int64 numbers.",
            why="What a unit draws belongs to its number in the data set, not to its place in the batch.",
            fix="Pass unit_ids=indices, as the sampler drew them.",
        )


def _unclear(shape: tuple[int, ...], what: str) -> PrivacyError:
    return PrivacyError(
        "random-layout",
        f"a random draw of shape {tuple(shape)} in the model {what}.",
        why="Only a draw with one entry per row, rows first, or one that all rows share, is independent of "
        "a unit's place in the batch.",
        fix="Draw with rows first (batch_first=True, need_weights=False), or set the layer's p to 0.",
    )


class Generators:
    """The global generators as they are now: PyTorch's, Python's and NumPy's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.torch, self.others = self._torch(), self._others()

    def _torch(self) -> list[Tensor]:
        states = [torch.default_generator.get_state()]
        if self.device.type != "cpu":
            states.append(torch.get_device_module(self.device).get_rng_state(self.device))
        return states

    @staticmethod
    def _others() -> tuple[object, ...]:
        numpy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
        values = (v.tobytes() if isinstance(v, np.ndarray) else v for v in numpy.values())
        return random.getstate(), tuple(values)

    def torch_moved(self) -> bool:
        return not all(torch.equal(*pair) for pair in zip(self.torch, self._torch(), strict=True))

    def others_moved(self) -> bool:
        return self.others != self._others()

    def restore(self) -> None:
        """PyTorch's as they were."""
        if self.torch_moved():
            torch.default_generator.set_state(self.torch[0])
            if self.device.type != "cpu":
                torch.get_device_module(self.device).set_rng_state(self.torch[1], self.device)


def refuse_foreign_randomness() -> PrivacyError:
    return PrivacyError(
        "random-operation",
        "the model's forward pass draws from Python's or NumPy's random numbers.",
        why="They cannot be drawn for each unit on its own, and a seed makes them public.",
        fix="Draw with torch (torch.rand and the like), or put the layer into eval mode.",
    )
