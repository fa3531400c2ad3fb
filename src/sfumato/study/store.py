"""Finished runs of reproductions on disk: one document each, whole or not there, so that none is run twice.

OUT/SCALE/RECIPE/seedN/result.json     a finished run
OUT/SCALE/RECIPE/seedN/run             one in progress; removed when the result is there
OUT/results.csv                        all of them, one row per run and score
"""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from sfumato.errors import RunError
from sfumato.files import read_json, write_json, write_text
from sfumato.recipes.recipe import Recipe, differences
from sfumato.recipes.settings import from_table, to_table
from sfumato.study.conditions import Condition, Scale

COLUMNS = [
    *("recipe", "scale", "data", "seed", "metric", "value"),
    *("epsilon", "delta", "num_steps", "minutes", "hardware", "version"),
]
_RESULT = "result.json"


class Result(TypedDict):
    """result.json of one run."""

    recipe: str
    scale: str
    seed: int
    data: str
    split: str
    num_examples: int
    scores: dict[str, float]  # shares, 0 to 1
    epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    num_steps: int
    seconds: float  # elapsed, over all processes that were at it
    processor_seconds: NotRequired[float | None]  # None: went on in another process, which did not count them
    hardware: str
    version: str
    settings: dict[str, Any]
    taken_from: NotRequired[str]  # the recipe under which it was run: its settings and seed are these


@dataclass(frozen=True)
class Store:
    """The folder of all reproductions."""

    out: Path

    @property
    def ledger(self) -> Path:
        """Of runs on known public sets, which spend nothing of the user's; others are in the user's own."""
        return self.out / "ledger.sqlite"

    def folder(self, condition: Condition, scale: Scale, seed: int) -> Path:
        return self.out / scale / condition.recipe_name.replace("/", "_") / f"seed{seed}"

    def find(self, condition: Condition, scale: Scale, seed: int, *, replace: bool = False) -> Result | None:
        """The finished run of this condition and seed.

        One with other settings is refused; with ``replace`` it counts as not there, so that it is run again.
        """
        place = self.folder(condition, scale, seed) / _RESULT
        if not place.exists():
            return None
        result = _read(place)
        before = from_table(Recipe, result["settings"], origin=str(place))
        changed = differences(before, condition.recipe)
        changed.pop("training.seed", None)
        if changed and replace:
            return None
        if changed:
            listed = ", ".join(f"{key} was {old!r}, now {new!r}" for key, (old, new) in changed.items())
            raise RunError(
                "other-settings",
                f"{place} was run with other settings: {listed}",
                why="Runs of one condition are averaged and compared; mixed settings would mean nothing.",
                fix="Use the same settings, another --out, or --replace to run these again as it is now.",
            )
        return result

    def equal(self, condition: Condition, scale: Scale, seed: int) -> Result | None:
        """A finished run with this seed and the same settings under another recipe's name."""
        for place in sorted(self.out.glob(f"{scale}/*/seed{seed}/{_RESULT}")):
            result = _read(place)
            before = from_table(Recipe, result["settings"], origin=str(place))
            same = set(differences(before, condition.recipe)) <= {"training.seed"}
            if same and set(condition.scores) <= set(result["scores"]):
                taken = result.copy()
                taken["recipe"] = condition.recipe_name
                taken["taken_from"] = result.get("taken_from", result["recipe"])
                return taken
        return None

    def keep(self, condition: Condition, scale: Scale, seed: int, result: Result) -> None:
        """Write the result, durably, then remove the run's folder and bring results.csv up to date."""
        folder = self.folder(condition, scale, seed)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / _RESULT, result)
        shutil.rmtree(folder / "run", ignore_errors=True)
        self.write_table()

    def results(self) -> Iterator[Result]:
        """All finished runs, sorted by place."""
        for place in sorted(self.out.glob(f"*/*/seed*/{_RESULT}")):
            yield _read(place)

    def seeds(self) -> list[int]:
        """All seeds that any finished run has."""
        return sorted({result["seed"] for result in self.results()})

    def write_table(self) -> None:
        """results.csv, anew and whole: it holds exactly what the folder holds, whatever was killed before."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for result in self.results():
            for metric, value in result["scores"].items():
                known: dict[str, Any] = {**result, "metric": metric, "value": f"{value:.4f}"}
                known["minutes"] = f"{result['seconds'] / 60:.1f}"
                writer.writerow("" if known[name] is None else known[name] for name in COLUMNS)
        write_text(self.out / "results.csv", text.getvalue())


def stored_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings as result.json keeps them: whatever can change a run."""
    return {name: part for name, part in to_table(recipe).items() if name not in ("reference", "performance")}


def _read(place: Path) -> Result:
    try:
        return read_json(place, Result)
    except (OSError, ValueError) as error:
        raise RunError(
            "damaged-run",
            f"{place} cannot be read: {error}",
            fix="Remove its folder: the run is then taken again.",
        ) from error
