"""The state of an unfinished run: written whole or not at all, read without unpickling anything.

Everything that defines the progress of a run is in ONE file, so that one rename commits it. It also holds the
log lines of its steps, which are written after it: a line that can be read belongs to a step that is never
taken again. On resume the logs are cut to the length that the state recorded and get its lines, so that a
killed run neither loses nor repeats one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypedDict

import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sfumato.errors import PrivacyError, RunError
from sfumato.files import parse_json, replacing, sync, sync_folder
from sfumato.release.run_folder import STATE_FILE
from sfumato.training.averaging import WeightAverage

_FORMAT = "3"
_Count = Annotated[int, Meta(ge=0, le=2**53)]


class _Schedule(TypedDict):
    """The changing part of torch's ``state_dict``, under its names."""

    last_epoch: _Count
    _last_lr: Annotated[list[Annotated[float, Meta(ge=0)]], Meta(min_length=1, max_length=1)]
    best: float | None
    num_bad_epochs: _Count


class _Log(TypedDict):
    length: _Count
    lines: str


class _Released(TypedDict):
    class_counts: list[float] | None
    score_histogram: list[float] | None


class _Values(TypedDict, total=False):
    """The types of the values that a run continues from; what else is saved is only compared."""

    step: _Count
    seconds: Annotated[float, Meta(ge=0)]
    max_rows: Annotated[int, Meta(ge=1, le=2**53)]
    schedule: _Schedule
    best_loss: float | None
    evaluations_since_best: _Count
    stopped_early: bool
    metrics: _Log
    sensitive: _Log
    average_updates: _Count
    optimizer_values: dict[str, Any]
    released: _Released


class SavedValues(dict[str, Any]):
    """The plain values of a state file: a missing key means a damaged file, not a programming error."""

    def __missing__(self, key: str) -> NoReturn:
        raise _unreadable(f"the state has no {key}")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Weights, their average, the optimizer's memory, and the plain values that go with them."""

    tensors: dict[str, Tensor]  # "model.…", "average.…", "optimizer.<parameter number>.<key>", "audit.…"
    values: dict[str, Any]  # step, schedule, log lines, fingerprint, plan, seed: JSON

    @classmethod
    def capture(
        cls,
        model: nn.Module,
        average: WeightAverage,
        optimizer: torch.optim.Optimizer,
        values: Mapping[str, Any],
        further: Mapping[str, Tensor] | None = None,
    ) -> RunState:
        """The present state; tensors are referenced, not copied, so save it before the next step.

        ``further`` are tensors of others, under names of their own.
        """
        tensors = dict(further or {})
        tensors |= {f"model.{name}": value for name, value in model.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in average.weights.items()}
        plain: dict[str, Any] = {}
        for number, memory in optimizer.state_dict()["state"].items():
            for key, value in memory.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{number}.{key}"] = value
                elif value is not None:
                    plain[f"{number}.{key}"] = value
        held = {name: value.detach().to("cpu").contiguous() for name, value in tensors.items()}
        values = {**values, "average_updates": average.num_updates, "optimizer_values": plain}
        return cls(tensors=held, values=values)

    def restore(self, model: nn.Module, average: WeightAverage, optimizer: torch.optim.Optimizer) -> None:
        """Put the captured values back, in place; refuses those of another model or optimizer."""
        try:
            self._check_average(average)
            model.load_state_dict(self._group("model."))
            self._restore_rest(model, average, optimizer)
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise _unreadable(f"the state does not fit the model: {error}") from error

    def _check_average(self, average: WeightAverage) -> None:
        saved = {name: value.shape for name, value in self._group("average.").items()}
        if saved != {name: value.shape for name, value in average.weights.items()}:
            raise ValueError("the averaged weights have other names or shapes")

    def _restore_rest(
        self, model: nn.Module, average: WeightAverage, optimizer: torch.optim.Optimizer
    ) -> None:
        device = next(model.parameters()).device
        average.weights = {name: value.to(device) for name, value in self._group("average.").items()}
        average.num_updates = self.values["average_updates"]
        memory: dict[int, dict[str, Any]] = {}
        for name, value in [*self._group("optimizer.").items(), *self.values["optimizer_values"].items()]:
            number, _, key = name.partition(".")
            memory.setdefault(int(number), {})[key] = value
        parameters = [value for group in optimizer.param_groups for value in group["params"]]
        for number, held in memory.items():
            for key, value in held.items():
                if isinstance(value, Tensor) and value.ndim and value.shape != parameters[number].shape:
                    raise ValueError(f"the optimizer's {key} of parameter {number} has another shape")
        optimizer.load_state_dict({**optimizer.state_dict(), "state": memory})

    def _group(self, prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): value
            for name, value in self.tensors.items()
            if name.startswith(prefix)
        }


def save_state(state: RunState, folder: Path) -> None:
    """Replace the saved state.

    Guarantee: after a crash at any instant the folder holds the old state or the new one, complete.
    """
    metadata = {"format": _FORMAT, "values": json.dumps(state.values)}
    with replacing(folder / STATE_FILE) as temporary:
        save_file(state.tensors, temporary, metadata=metadata)


def load_state(folder: Path) -> RunState:
    """Read what ``save_state`` wrote."""
    path = folder / STATE_FILE
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}, this version reads {_FORMAT!r}")
        return RunState(tensors=tensors, values=SavedValues(parse_json(metadata["values"], _Values)))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise _unreadable(f"{path} cannot be read: {error}") from error


def _unreadable(what: str) -> RunError:
    return RunError(
        "no-state",
        what,
        why="Without it the run cannot go on where it stopped.",
        fix="Start anew with another --out, or restore the file.",
    )


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any], *, folder: Path) -> None:
    """Refuse to continue with other images, labels or units, another plan or random source than the state's.

    Comparing recipes is not enough: recipe.toml can be edited between start and resume.
    """
    if saved["fingerprint"] != now["fingerprint"]:
        raise RunError(
            "changed-data",
            f"{folder}: the training images are not those the run was started with",
            why="Steps already taken were accounted for the other images.",
            fix="Restore the images, or start a new run with another --out.",
        )
    if saved["units"] != now["units"]:
        raise RunError(
            "changed-data",
            f"{folder}: labels, or which images are one patient's, are not as when the run was started",
            why="A unit that was protected in the first steps would be split or joined in the others.",
            fix="Restore the labels and patients, or start a new run with another --out.",
        )
    if saved["plan"] != now["plan"]:
        raise RunError(
            "changed-plan",
            f"{folder}: the plan was {saved['plan']}, now {now['plan']}",
            why="Resuming may not change what was planned; another version of the accountant might.",
            fix="Resume with the version that started the run, or start a new one with another --out.",
        )
    if saved["components"] != now["components"]:
        raise RunError(
            "changed-components",
            f"{folder}: the run was started with {saved['components'] or 'nothing'} of the caller's own, now "
            f"with {now['components'] or 'nothing'}",
            why="Another loss, clipping function, sampling or optimizer would be another training.",
            fix="Resume from Python with the same ones, or start a new run with another --out.",
        )
    if saved["source"] != now["source"]:
        raise PrivacyError(
            "changed-source",
            f"{folder}: the random source was {saved['source']}, now {now['source']}",
            why="Whoever knows a seed can subtract the noise of every step that was taken with it.",
            fix="Resume as the run was begun, or start a new one with another --out.",
        )


@dataclass
class LineLog:
    """A JSON-lines file that grows only after the state that makes its new lines final is saved."""

    path: Path
    length: int = 0  # bytes that belong to the committed state
    waiting: list[str] = field(default_factory=list)  # lines for the next commit

    def add(self, record: Mapping[str, object]) -> None:
        """Keep a line for the next commit."""
        self.waiting.append(json.dumps(record, allow_nan=False) + "\n")

    def pending(self) -> dict[str, Any]:
        """The file's length and the waiting lines, for the state to hold until ``write`` has written them."""
        return {"length": self.length, "lines": "".join(self.waiting)}

    def write(self) -> None:
        """Append the waiting lines, durably; only after a state that holds them is saved and confirmed."""
        if not self.waiting:
            return
        data = "".join(self.waiting).encode()
        try:
            new = not self.path.exists()
            with open(self.path, "wb" if new else "r+b") as file:
                file.seek(self.length)
                file.write(data)  # over the same bytes, if an interrupted write got that far
                file.truncate()
                sync(file)
            if new:
                sync_folder(self.path.parent)
        except OSError as error:
            raise RunError(
                "cannot-save",
                f"{self.path} could not be written: {error}",
                why="The disk may be full or read-only. What was saved before is untouched.",
                fix="Make room, then continue with --resume.",
            ) from error
        self.length += len(data)
        self.waiting.clear()

    def recover(self, saved: Mapping[str, Any]) -> None:
        """Restore the file to what ``pending`` recorded in the state, wherever ``write`` was interrupted."""
        length = saved["length"]
        if length and (not self.path.exists() or self.path.stat().st_size < length):
            raise RunError(
                "damaged-log",
                f"{self.path} is shorter than the saved state says ({length} bytes)",
                fix="Restore the file, or start anew with another --out.",
            )
        self.length, self.waiting = length, [saved["lines"]] if saved["lines"] else []
        if self.waiting:
            self.write()
        elif self.path.exists():
            os.truncate(self.path, length)
