"""A reproduction: every condition of a table trained with the same seeds, and what came of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sfumato.data import KNOWN_SETS, DataSplits
from sfumato.errors import RunError, SfumatoError
from sfumato.files import write_json
from sfumato.ledger.ledger import Ledger
from sfumato.recipes.families import Family
from sfumato.recipes.recipe import DataSettings, with_settings
from sfumato.release.release import load
from sfumato.release.run_folder import describe_environment
from sfumato.run.monitor import Observer
from sfumato.run.publish import RunResult
from sfumato.run.resolve import load_splits
from sfumato.run.session import train
from sfumato.study.comparison import paired_difference, pairs_of, shared_draws, summary
from sfumato.study.conditions import Condition, Scale
from sfumato.study.store import Result, Store, stored_settings
from sfumato.training.evaluation import evaluate

# What only says that something has to be brought: the other conditions go on without it.
_TO_BE_BROUGHT = ("data-not-found", "unknown-data", "missing-folder", "missing-weights")


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A table or figure at one scale, its conditions and seeds, and the folder that keeps their runs."""

    family: Family
    scale: Scale
    conditions: Sequence[Condition]
    seeds: Sequence[int]
    store: Store
    changed: Mapping[str, Any] = field(default_factory=dict)  # settings other than the family's
    replace: bool = False  # run again what was run with other settings than the recipe has now

    def run(
        self,
        *,
        on_start: Callable[[Condition, int], Observer | None] = lambda *_: None,
        on_skip: Callable[[Condition, str], None] = lambda *_: None,
    ) -> None:
        """Train what is missing, seed by seed, so that after each seed all conditions can be compared.

        Guarantee: a run that is finished is kept and never taken again; one that was killed goes on where it
        was. Several processes may share the folder: each takes what no other is at.
        """
        loaded = _LoadedData()
        left_out: set[str] = set()
        self.store.out.mkdir(parents=True, exist_ok=True)
        with Ledger.open(self.store.ledger) as of_public_images, Ledger.open() as of_the_user:
            for seed in self.seeds:
                for condition in self.conditions:
                    if condition.recipe_name in left_out or self.result(condition, seed) is not None:
                        continue
                    equal = self.store.equal(condition, self.scale, seed)
                    if equal is not None:
                        self.store.keep(condition, self.scale, seed, equal)
                        self.write()
                        continue
                    try:
                        splits = loaded.of(condition.recipe.data)
                        # whatever is no known public set may be anybody's: it counts, and caps hold
                        is_public = condition.recipe.data.name in KNOWN_SETS
                        ledger = of_public_images if is_public else of_the_user
                        result = self._train(condition, seed, splits, ledger, on_start(condition, seed))
                    except SfumatoError as error:
                        if error.code == "run-in-use":
                            on_skip(condition, f"another process is at seed {seed}")
                            continue
                        if error.code not in _TO_BE_BROUGHT:
                            raise
                        left_out.add(condition.recipe_name)
                        on_skip(condition, error.what)
                        continue
                    self.store.keep(condition, self.scale, seed, result)
                    self.write()

    def result(self, condition: Condition, seed: int) -> Result | None:
        """The finished run, if it is there."""
        return self.store.find(condition, self.scale, seed, replace=self.replace)

    def values(self, condition: Condition, score: str) -> dict[int, float]:
        """The score in %, by seed, of the runs that are finished."""
        found = {seed: self.result(condition, seed) for seed in self.seeds}
        return {
            seed: 100 * result["scores"][score]
            for seed, result in found.items()
            if result is not None and score in result["scores"]
        }

    def document(self) -> dict[str, Any]:
        """The table and the differences as JSON has them."""
        return {
            "name": self.family.name,
            "paper": self.family.paper,
            "title": self.family.title,
            "claim": self.family.claim,
            "scale": self.scale,
            "note": self.family.mini_note if self.scale == "mini" else None,
            "changed": dict(self.changed),
            "statistic": self.family.statistic,
            "seeds": list(self.seeds),
            "cells": [
                self._cell(condition, score) for condition in self.conditions for score in condition.scores
            ],
            "differences": self._differences(),
        }

    def write(self) -> Path:
        """The document of this table, beside the runs."""
        place = self.store.out / f"{self.family.name.replace('/', '_')}-{self.scale}.json"
        write_json(place, self.document())
        return place

    def _cell(self, condition: Condition, score: str) -> dict[str, Any]:
        values = self.values(condition, score)
        numbers = list(values.values())
        return {
            "row": condition.row,
            "column": condition.column,
            "score": score,
            "recipe": condition.recipe_name,
            "epsilon": condition.recipe.reference.epsilon if condition.recipe.reference else None,
            "published": condition.published.get(score),
            "ours": summary(numbers, self.family.statistic) if numbers else None,
            "lowest": min(numbers, default=None),
            "highest": max(numbers, default=None),
            "n": len(numbers),
            "values": {str(seed): value for seed, value in values.items()},
        }

    def _differences(self) -> list[dict[str, Any]]:
        rows = []
        for one, other in pairs_of(self.conditions, self.family.compare):
            for score in one.scores:
                found = paired_difference(self.values(one, score), self.values(other, score))
                theirs = [condition.published.get(score) for condition in (one, other)]
                rows.append(
                    {
                        "column": one.column,
                        "score": score,
                        "row": one.row,
                        "minus": other.row,
                        "published": _minus(*theirs),
                        "mean": None if found is None else found.mean,
                        "lower": None if found is None else found.lower,
                        "upper": None if found is None else found.upper,
                        "n": 0 if found is None else found.num_pairs,
                        "shared": shared_draws(one.recipe, other.recipe),
                    }
                )
        return rows

    def _train(
        self, condition: Condition, seed: int, splits: DataSplits, ledger: Ledger, observer: Observer | None
    ) -> Result:
        recipe = with_settings(condition.recipe, {"training.seed": seed})
        folder = self.store.folder(condition, self.scale, seed) / "run"
        begun = (folder / "recipe.toml").is_file()
        if folder.exists() and not begun:  # killed while the folder was made
            shutil.rmtree(folder)
        began = time.process_time()
        # the papers' own δ may be above 1/N, which their recipes say
        done = train(
            recipe, out=folder, resume=begun, data=splits, ledger=ledger, observer=observer, force=True
        )
        if done.scores is None:
            raise RunError(
                "nothing-scored",
                f"{condition.recipe_name}: there are no test images",
                fix="Give data with test/ images, or --set data.holdout=0.1.",
            )
        environment = describe_environment()
        return Result(
            recipe=condition.recipe_name,
            scale=self.scale,
            seed=seed,
            data=splits.train.name,
            split=done.scored_split or "",
            num_examples=done.scores.num_examples,
            scores=_scores(condition, done, splits),
            epsilon=done.privacy["epsilon"],
            delta=done.privacy["delta"],
            noise_multiplier=done.privacy["noise_multiplier"],
            num_steps=done.num_steps,
            seconds=done.seconds,
            processor_seconds=None if begun else round(time.process_time() - began, 2),
            hardware=f"{environment['processor']}, {environment['num_threads']} threads",
            version=environment["sfumato"],
            settings=stored_settings(recipe),
        )


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _scores(condition: Condition, done: RunResult, splits: DataSplits) -> dict[str, float]:
    """The scores that the paper gives for this condition, as shares."""
    taken: dict[str, Any] = {} if done.scores is None else done.scores.as_dict()
    if "training_accuracy" in condition.scores:
        released = load(done.folder)
        mean, std = tuple(released.config["mean"]), tuple(released.config["std"])
        taken["training_accuracy"] = evaluate(released.model, splits.train, mean=mean, std=std).accuracy
    return {name: taken[name] for name in condition.scores if taken.get(name) is not None}


class _LoadedData:
    """The data set that was used last: conditions of a table mostly share one."""

    def __init__(self) -> None:
        self._settings: DataSettings | None = None
        self._splits: DataSplits | None = None

    def of(self, settings: DataSettings) -> DataSplits:
        if self._splits is None or settings != self._settings:
            self._splits = None  # before the next is read: two sets may not fit in memory
            self._splits, self._settings = load_splits(settings), settings
        return self._splits
