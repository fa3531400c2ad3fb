"""TensorBoard and MLflow: what ``metrics.jsonl`` holds, sent on.

Only that file is read, so that nothing leaves which is not public, and no step that could be taken again.
``sensitive`` sends ``state/sensitive.jsonl`` too, and says so in every name. No record carries the time at
which it was made: how long a step takes tells the true batch size, which is private.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sfumato.errors import ConfigError, RunError
from sfumato.files import write_text
from sfumato.release.card import headline
from sfumato.release.run_folder import RunFolder
from sfumato.run.monitor import Observer
from sfumato.run.prepare import Prepared, ScoredSet
from sfumato.run.publish import RunResult
from sfumato.training.evaluation import AnyScores
from sfumato.training.loop import StepRecord

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from torch.utils.tensorboard import SummaryWriter

LogName = Literal["tensorboard", "mlflow"]
PUBLIC = re.compile(r"epsilon|learning_rate|(val|test)_\w+")  # the names that metrics.jsonl may have
SENSITIVE = "sensitive/"  # before every other name
_MLFLOW_FILE = "mlflow-run.txt"
_BEGAN = 1  # milliseconds, for every run; MLflow takes 0 for the present
_USERINFO = re.compile(r"//[^/\s]*@")  # user:password@ of an address
_TAG_LENGTH = 4500  # MLflow's stores cut or refuse longer ones


class MetricLog(Protocol):
    """A place that metrics are sent to."""

    live: bool  # False: only when the run has ended, since whoever is there could take the time of steps

    def reach(self) -> None:
        """Raises if the place cannot be reached, before anything is spent."""

    def begin(self, prepared: Prepared) -> None:
        """Public settings of the run; before its steps if the log is live, else after them."""

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """The values of one step; again after a resumption, for every step."""

    def end(self, result: RunResult) -> None:
        """Guarantee and final scores."""


def open_logs(names: Sequence[str], folder: RunFolder) -> list[MetricLog]:
    """The logs by name, before anything is trained: a missing package is noticed now."""
    found: list[MetricLog] = []
    for name in dict.fromkeys(name.strip() for name in names):
        if name not in ("tensorboard", "mlflow"):
            raise ConfigError(
                "unknown-log", f"there is no log {name[:40]!r}.", fix="Choose of tensorboard and mlflow."
            )
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                "log-not-installed",
                f"--log {name} needs the package {name}, which cannot be imported: {error}",
                fix=f"pip install 'sfumato[{name}]'",
            ) from error
        found.append(TensorBoardLog(folder) if name == "tensorboard" else MlflowLog(folder))
    for log in found:
        log.reach()
    return found


@dataclass
class MirroredMetrics:
    """An observer that tells another everything, and sends the lines of the run's logs on.

    Guarantee: what is sent stands in ``metrics.jsonl`` under a public name, or is named sensitive and was
    asked for.
    """

    observer: Observer
    folder: RunFolder
    logs: Sequence[MetricLog]
    sensitive: bool = False
    sent: dict[str, int] = field(default_factory=dict)  # bytes of each file that every live log has
    prepared: Prepared | None = None  # until ``started``

    def started(self, prepared: Prepared, start_step: int) -> None:
        self.observer.started(prepared, start_step)
        self.prepared = prepared
        for log in self.logs:
            if log.live:
                log.begin(prepared)

    def stepped(self, record: StepRecord, epsilon: float | None) -> None:
        self.observer.stepped(record, epsilon)

    def scored(self, step: int, scored: ScoredSet, scores: AnyScores) -> None:
        self.observer.scored(step, scored, scores)
        self.forward([log for log in self.logs if log.live])

    def noted(self, text: str) -> None:
        self.observer.noted(text)

    def computed(self, what: str, done: int, total: int) -> None:
        self.observer.computed(what, done, total)

    def finish(self, result: RunResult) -> None:
        """Send what is left, and the guarantee."""
        self.forward([log for log in self.logs if log.live])
        self.sent.clear()
        waiting = [log for log in self.logs if not log.live]
        for log in waiting:
            assert self.prepared is not None  # a run that ended was started
            log.begin(self.prepared)
        self.forward(waiting)
        for log in self.logs:
            log.end(result)

    def forward(self, logs: Sequence[MetricLog]) -> None:
        """Send the lines that were committed since the last time."""
        if not logs:
            return
        for line in self._new_lines(self.folder.metrics):
            self._send(logs, line, public=True)
        if self.sensitive:
            for line in self._new_lines(self.folder.sensitive):
                self._send(logs, line, public=False)

    def _new_lines(self, path: Path) -> list[dict[str, Any]]:
        start = self.sent.get(path.name, 0)
        content = path.read_bytes()[start:] if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        self.sent[path.name] = start + len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _send(self, logs: Sequence[MetricLog], line: Mapping[str, Any], *, public: bool) -> None:
        numbers = {key: float(value) for key, value in line.items() if isinstance(value, int | float)}
        step = int(numbers.pop("step", 0))
        if public:
            values = {key: value for key, value in numbers.items() if PUBLIC.fullmatch(key)}
        else:
            values = {f"{SENSITIVE}{key}": value for key, value in numbers.items()}
        for log in logs:
            log.send(step, values)


class TensorBoardLog:
    """Event files in ``tensorboard/`` of the run's folder, written anew when a run is resumed."""

    live = True

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder.path / "tensorboard"
        self.writer: SummaryWriter | None = None

    def reach(self) -> None:
        """It is a folder of the run."""

    def begin(self, prepared: Prepared) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for old in self.folder.glob("events.out.tfevents.*"):
            old.unlink()
        self.writer = SummaryWriter(str(self.folder))

    def send(self, step: int, values: Mapping[str, float]) -> None:
        assert self.writer is not None  # ``begin`` comes first
        for name, value in values.items():
            self.writer.add_scalar(name, value, step, walltime=float(step))
        self.writer.flush()

    def end(self, result: RunResult) -> None:
        assert self.writer is not None
        self.writer.add_text("guarantee", _guarantee(result), result.num_steps, walltime=0.0)
        self.writer.close()


class MlflowLog:
    """A run of MLflow, where ``MLFLOW_TRACKING_URI`` says; by default ``mlruns/`` in the present folder."""

    def __init__(self, folder: RunFolder) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would tell others of every run
        from mlflow.tracking import MlflowClient

        self.folder = folder.path
        self.place = os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").resolve().as_uri()
        if self.place.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # new versions want to be asked
        # Not whatever lacks "://": ``databricks`` alone is a distant store.
        self.live = self.place.startswith(("file:", "sqlite:")) or Path(self.place).is_absolute()
        with self._answering():
            self.client: MlflowClient = MlflowClient(tracking_uri=self.place)
        self.run_id = ""
        self.last_step: dict[str, int] = {}  # of each metric, as the store has it

    def reach(self) -> None:
        with self._answering():
            self.client.get_experiment_by_name("sfumato")

    def begin(self, prepared: Prepared) -> None:
        with self._answering():
            self._open(prepared)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # stores answer with errors of their own, of HTTP, of SQL
            raise RunError(
                "log-not-reached",
                _USERINFO.sub("//", f"MLflow at {self.place} does not answer: {error}")[:400],
                why="The run itself is not harmed: what it has saved is in its folder.",
                fix="Set MLFLOW_TRACKING_URI to a store that can be reached, or leave out --log mlflow.",
            ) from None  # the store's own words may hold a password

    def _open(self, prepared: Prepared) -> None:
        known = self.folder / _MLFLOW_FILE
        if known.is_file():
            self.run_id = known.read_text(encoding="utf-8").strip()
            for key in self.client.get_run(self.run_id).data.metrics:
                history = self.client.get_metric_history(self.run_id, key)
                self.last_step[key] = max(metric.step for metric in history)
            return
        experiment = self.client.get_experiment_by_name("sfumato")
        number = self.client.create_experiment("sfumato") if experiment is None else experiment.experiment_id
        self.run_id = self.client.create_run(number, start_time=_BEGAN, run_name=self.folder.name).info.run_id
        write_text(known, f"{self.run_id}\n")
        document = prepared.resolved.document()
        for key, value in document.items():
            if isinstance(value, str | int | float):
                self.client.log_param(self.run_id, key, value)
        self.client.log_param(self.run_id, "model", prepared.recipe.model.name)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        with self._answering():
            for name, value in values.items():
                if step > self.last_step.get(name, -1):
                    self.client.log_metric(self.run_id, name, value, timestamp=1000 * step, step=step)

    def end(self, result: RunResult) -> None:
        tags = {
            "releasable": str(result.privacy["releasable"]).lower(),
            "guarantee": headline(result.privacy),
            "statement": str(result.privacy["statement"])[:_TAG_LENGTH],
        }
        with self._answering():
            for key, value in tags.items():
                self.client.set_tag(self.run_id, key, value)
            self.client.set_terminated(self.run_id, end_time=1000 * max(result.num_steps, 1))


def _guarantee(result: RunResult) -> str:
    return f"**{headline(result.privacy)}**\n\n{result.privacy['statement']}"
