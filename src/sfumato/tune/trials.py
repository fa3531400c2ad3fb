"""The trials of a search: claim one, train it, score it, tell; whatever was killed goes on where it was."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.data import DataSplits, ImageSet
from sfumato.errors import ConfigError, ModelError, RunError
from sfumato.files import read_json, replacing
from sfumato.ledger.ledger import Ledger
from sfumato.release.release import WEIGHTS, load
from sfumato.release.run_folder import RunFolder
from sfumato.run.monitor import Observer
from sfumato.run.resolve import group_units
from sfumato.run.session import train
from sfumato.training.components import SearchedRun
from sfumato.training.inputs import Units
from sfumato.tune.budget import Budget
from sfumato.tune.pruning import PruningObserver
from sfumato.tune.ranges import Value
from sfumato.tune.scoring import noisy_score, right_units, score_source
from sfumato.tune.store import TuneFolder, chosen_of

if TYPE_CHECKING:
    import optuna

WORST = 0.0  # the score of a trial that left no model


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Everything that a worker needs to take part in a search."""

    folder: TuneFolder
    study: optuna.Study
    budget: Budget
    num_trials: int
    splits: DataSplits  # what trials train on, and ``val``, what they are scored on
    parent: str  # the account that pays; empty if each trial pays for itself
    ledger: Ledger
    score_key: bytes  # secret
    observer: Observer | None
    tell: Callable[[str], None]

    def work(self) -> bool:
        """Run trials until none is left to begin; whether all of them are finished."""
        while self._resume_one() or self._begin_one():
            pass
        from optuna.trial import TrialState

        counted = [trial for trial in self.study.get_trials(deepcopy=False) if trial.number < self.num_trials]
        return len(counted) == self.num_trials and all(trial.state != TrialState.RUNNING for trial in counted)

    def _resume_one(self) -> bool:
        """Go on with a trial whose worker is gone."""
        from optuna.trial import TrialState

        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.number >= self.num_trials:
                continue
            with self.folder.claimed(f"trial-{trial.number:04d}") as mine:
                if mine and self._is_running(trial.number):
                    self._run(trial.number, chosen_of(trial))
                    return True
        return False

    def _is_running(self, number: int) -> bool:
        from optuna.trial import TrialState

        return self.study.get_trials(deepcopy=False)[number].state == TrialState.RUNNING

    def _begin_one(self) -> bool:
        """Ask for a new trial; its number says whether it is still one of the search."""
        from optuna.trial import TrialState

        with contextlib.ExitStack() as until_told:
            with self.folder.claimed("asking") as mine:  # else two workers could each take one too many
                if not mine:
                    return self._wait()
                if len(self.study.get_trials(deepcopy=False)) >= self.num_trials:
                    return False
                ranges = {one.key: one.distribution() for one in self.budget.settings.ranges}
                trial = self.study.ask(fixed_distributions=ranges)
                mine = until_told.enter_context(self.folder.claimed(f"trial-{trial.number:04d}"))
            if trial.number >= self.num_trials:  # a worker that does not see our locks took the last one
                self.study.tell(trial.number, state=TrialState.FAIL)
                return False
            if mine:
                self._run(trial.number, chosen_of(trial), trial)
            return True

    @staticmethod
    def _wait() -> bool:
        time.sleep(0.05)
        return True

    def _run(self, number: int, chosen: dict[str, Value], trial: optuna.Trial | None = None) -> None:
        """Train and score one trial; told only once its score is on the disk."""
        from optuna.trial import TrialState

        place = self.folder.score(number)
        if not place.is_file():
            found = {**self._score(number, chosen, trial), "settings": chosen}
            with replacing(place, mode=0o600) as temporary:
                temporary.write_text(json.dumps(found), encoding="utf-8")
        found = read_json(place, dict[str, Any])
        if found.get("settings") != chosen:
            raise RunError(
                "changed-search",
                f"trial {number} in {self.folder.path} was trained with other settings than the study says.",
                why="Its score would stand beside settings that nobody tried.",
                fix="Go on with the --storage and --study of before, or give another --out.",
            )
        pruned = bool(found.get("pruned"))
        self.study.tell(
            number, float(found["score"]), state=TrialState.PRUNED if pruned else TrialState.COMPLETE
        )
        words = ", ".join(f"{key.rpartition('.')[2]} {_short(value)}" for key, value in chosen.items())
        marked = "" if self.budget.settings.strategy != "random-stopping" else " (sensitive)"
        line = f"trial {number}: {words}: score {100 * found['score']:.2f} %{marked} {found['note']}"
        self.tell(line.rstrip())

    def _score(self, number: int, chosen: dict[str, Value], trial: optuna.Trial | None) -> dict[str, Any]:
        settings = self.budget.settings
        try:
            recipe = self.budget.trial_recipe(chosen)
            folder = RunFolder(self.folder.trial(number))
            if not folder.recipe.is_file():  # killed while the folder was made: nothing in it yet
                shutil.rmtree(folder.path, ignore_errors=True)
            observer = PruningObserver.around(self.observer, trial if settings.pruner != "none" else None)
            result = train(
                recipe,
                out=folder.path,
                resume=folder.recipe.is_file(),
                data=self.splits,
                searched=self._searched(),
                ledger=self.ledger,
                observer=observer,
            )
        except PruningObserver.Pruned as pruned:
            self._close(number)
            return {"score": pruned.score, "pruned": True, "note": "(pruned)"}
        except (RunError, ConfigError, ModelError) as error:
            if error.code not in _OF_SETTINGS and isinstance(error, RunError):
                raise  # of the disk, the ledger or the folder: the trial can go on later
            return {"score": WORST, "note": f"({error.code})"}
        images = self._scored()
        release, units = result.folder / "release", group_units(recipe, images)
        return {
            "score": self._released(right_units(load(release), images, units), units, release),
            "note": "",
        }

    def _released(self, right: float, units: Units, release: Path) -> float:
        """The score as it is used: noisy if the images are private and the search is counted."""
        search, noise = self.budget.search, self.budget.score_noise
        if search is None or noise is None:
            return right / len(units)
        source = score_source(self.score_key, release / WEIGHTS)
        return noisy_score(right, len(units), search=search, noise_multiplier=noise, source=source)

    def _scored(self) -> ImageSet:
        assert self.splits.val is not None  # ``tune`` sets some aside
        return self.splits.val

    def _searched(self) -> SearchedRun | None:
        search = self.budget.search
        if search is None or not search.is_counted:
            return None
        return SearchedRun(search=search, part="trial", parent=self.parent)

    def _close(self, number: int) -> None:
        """A pruned trial that pays for itself gives back what it did not use."""
        from sfumato.ledger.receipt import read_receipt

        held = read_receipt(self.folder.trial(number) / "state")
        if held is not None and not self.parent:
            self.ledger.close_run(held.record.run_id)


_OF_SETTINGS = ("diverged",)


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
