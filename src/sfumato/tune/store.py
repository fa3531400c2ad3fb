"""A search on disk: Optuna's storage of its trials, their folders, and who works on which.

OUT/tune.json              what was asked for: public
OUT/run/                   the run that came out, with its release
OUT/report.html            the page of the search
OUT/state/                 mode 0700: trials, scores, number of trials; what is in it stays in the house
OUT/state/trials/0007/     a trial, a run like any other
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.errors import ConfigError, RunError
from sfumato.files import hold, read_json, replacing, write_json
from sfumato.tune.ranges import Value
from sfumato.tune.settings import TuneSettings

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial, TrialState

_IDENTITY = "sfumato"  # the study's own mark: which search it belongs to


@dataclass(frozen=True)
class TuneFolder:
    """OUT: where each file of a search lies."""

    path: Path

    @property
    def description(self) -> Path:
        return self.path / "tune.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def plan(self) -> Path:
        """How many trials there are, and what was asked for, with the images' fingerprint: sensitive."""
        return self.state / "tune.json"

    def trial(self, number: int) -> Path:
        return self.state / "trials" / f"{number:04d}"

    def score(self, number: int) -> Path:
        """A trial's score, durable before anybody is told."""
        return self.state / "trials" / f"{number:04d}.json"

    @contextlib.contextmanager
    def claimed(self, what: str, *, wait: bool = False) -> Iterator[bool]:
        """Whether this process alone may do ``what`` until the block ends; a dead one holds nothing.

        With ``wait`` it may, once the others are done.
        """
        place = self.state / "locks" / what
        lock = None
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            while lock is None:
                with contextlib.suppress(BlockingIOError):
                    lock = hold(place)
                if lock is None and not wait:
                    break
                if lock is None:
                    time.sleep(0.2)
        except OSError as error:
            raise RunError(
                "cannot-save",
                f"{place} cannot be locked: {error}",
                why="Two workers on one trial would destroy each other's state.",
                fix="Give an --out on a disk that has locks, shared by all workers.",
            ) from error
        if lock is None:
            yield False
            return
        with lock:
            yield True

    def make_room(self) -> None:
        """The folders, ``state`` for its owner only; refused where something else lies."""
        foreign = self.path.exists() and not self.plan.is_file() and not self.state.is_dir()
        if foreign and any(self.path.iterdir()):
            raise RunError(
                "run-exists",
                f"{self.path} already exists, and is no search",
                why="Nothing is ever overwritten.",
                fix="Give another --out.",
            )
        (self.state / "trials").mkdir(parents=True, exist_ok=True)
        os.chmod(self.state, 0o700)  # mkdir's mode is subject to the umask

    def prepare(
        self, settings: TuneSettings, *, fingerprint: str, draw: Callable[[], tuple[int, bytes]]
    ) -> tuple[int, bytes]:
        """Begin, or go on; returns the number of trials and the key of their scores' noise.

        Both are drawn once and durable before any trial begins.

        Guarantee: refused if the folder holds another search.
        """
        asked = json.loads(json.dumps({**settings.identity(), "fingerprint": fingerprint}))
        if self.plan.is_file():
            held = read_json(self.plan, dict)
            num_trials, key = int(held.pop("planned_trials")), bytes.fromhex(held.pop("score_key"))
            _check_same(held, asked, self.path)
            return num_trials, key
        num_trials, key = draw()
        drawn = {"planned_trials": num_trials, "score_key": key.hex()}
        with replacing(self.plan, mode=0o600) as temporary:
            temporary.write_text(json.dumps({**asked, **drawn}), encoding="utf-8")
        write_json(self.description, settings.identity())
        return num_trials, key


def _check_same(held: Mapping[str, Any], asked: Mapping[str, Any], place: Path) -> None:
    changed = [key for key in dict.fromkeys((*held, *asked)) if held.get(key) != asked.get(key)]
    if changed:
        raise RunError(
            "changed-search",
            f"{place} holds a search with other values of {', '.join(changed)}.",
            why="The trials that are done were counted under the old ones.",
            fix="Give the same command to go on, or another --out for another search.",
        )


def open_study(
    settings: TuneSettings, folder: TuneFolder, *, storage: str | None, name: str | None, mark: str
) -> optuna.Study:
    """The Optuna study of this search, made if it is not there.

    ``mark`` says which search it is; a study of the same name that has another one is refused.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = storage or f"sqlite:///{(folder.state / 'study.sqlite').resolve()}"
    seed = settings.recipe.training.seed
    try:
        study = optuna.create_study(
            storage=optuna.storages.RDBStorage(url),
            study_name=name or folder.path.resolve().name,
            direction="maximize",
            sampler=_sampler(settings, seed),
            pruner=_pruner(settings),
            load_if_exists=True,
        )
        if _IDENTITY not in study.user_attrs and not study.trials:
            study.set_user_attr(_IDENTITY, mark)
        held = study.user_attrs.get(_IDENTITY)
    except Exception as error:  # whatever the database's own driver raises
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(
            "no-storage",
            f"the storage cannot be used: {type(error).__name__}: {str(error).splitlines()[0]}",
            fix="Check the URL, for example postgresql+psycopg://user@host/name, its server and its driver.",
        ) from error
    if held != mark:
        raise RunError(
            "other-study",
            f"the study {study.study_name!r} in this storage belongs to another search.",
            why="Trials of two searches must not be mixed: each is counted by itself.",
            fix="Give another --study, or the --out that the study was begun with.",
        )
    return study


def mark_of(settings: TuneSettings, parent: str) -> str:
    """A digest of the search, with the account that pays for it."""
    text = json.dumps({**settings.identity(), "parent": parent}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _sampler(settings: TuneSettings, seed: int | None) -> optuna.samplers.BaseSampler:
    import optuna

    if settings.chosen_sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if settings.chosen_sampler == "grid":
        space: dict[str, list[Value]] = {one.key: list(one.choices) for one in settings.ranges}
        return _endless_grid(space, seed)
    startup = max(2, min(10, settings.num_trials // 2))
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup, multivariate=False)


def _endless_grid(space: dict[str, list[Value]], seed: int | None) -> optuna.samplers.BaseSampler:
    """A grid whose last point does not stop the study: Optuna can stop only loops of its own."""
    import optuna

    class Grid(optuna.samplers.GridSampler):
        def after_trial(
            self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
        ) -> None:
            pass

    return Grid(space, seed=seed)


def _pruner(settings: TuneSettings) -> optuna.pruners.BasePruner:
    import optuna

    if settings.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=3)
    if settings.pruner == "threshold":
        return optuna.pruners.ThresholdPruner(lower=settings.prune_below)
    return optuna.pruners.NopPruner()


def chosen_of(trial: FrozenTrial | optuna.Trial) -> dict[str, Value]:
    """A trial's settings, in the order of their names."""
    return {key: trial.params[key] for key in sorted(trial.params)}
