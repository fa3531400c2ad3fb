"""What a finished run's folder says about it, every type checked: a stranger may have sent it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sfumato.errors import RunError
from sfumato.files import parse_json, read_bytes, read_json
from sfumato.recipes.recipe import Recipe
from sfumato.release.documents import (
    AuditDocument,
    Config,
    Environment,
    MetricsLine,
    Privacy,
    ResolvedDocument,
    ScoresDocument,
)
from sfumato.release.release import read_description
from sfumato.release.run_folder import RunFolder

_MOST_POINTS = 2000  # of a curve on a page: more than its pixels

Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The public files of a run."""

    name: str
    recipe: Recipe
    metrics: list[MetricsLine]
    environment: Environment
    config: Config
    privacy: Privacy
    scores: ScoresDocument | None
    resolved: ResolvedDocument | None = None  # runs of earlier versions have none
    audit: AuditDocument | None = None

    @property
    def model(self) -> str:
        return self.config["model"]["name"] or "own model"

    @property
    def learning_rate(self) -> str:
        """The first one: where the recipe names none, the budget decided."""
        rate = self.recipe.training.learning_rate if self.resolved is None else self.resolved["learning_rate"]
        return "-" if rate is None else f"{rate:g}"

    @property
    def curve(self) -> Points:
        """(step, accuracy) wherever accuracy was measured on images that may be shown."""
        points = []
        for line in self.metrics:
            if "val_accuracy" in line:
                points.append((line["step"], line["val_accuracy"]))
            if "test_accuracy" in line:
                points.append((line["step"], line["test_accuracy"]))
        return _thinned(points)

    @property
    def spending(self) -> Points:
        """(step, epsilon) at the steps for which it was computed; between two the later value is recorded."""
        points = {line["epsilon"]: line["step"] for line in self.metrics if line["epsilon"] is not None}
        return _thinned([(0, 0.0), *((step, epsilon) for epsilon, step in points.items())]) if points else []


def read_run(path: Path) -> RunRecord:
    """Read the public files of a finished run."""
    folder = RunFolder(path)
    if not folder.recipe.is_file():
        raise RunError("no-run", f"{path} is not a run", fix="Give the folder of a run: runs/NAME.")
    recipe = folder.stored_recipe()
    if not folder.release.is_dir():
        raise RunError(
            "not-finished",
            f"{path} is not a finished run",
            fix=f"Finish it: sfumato train --resume --out {path}",
        )
    config, privacy = read_description(folder.release)
    try:
        return RunRecord(
            name=path.resolve().name,
            recipe=recipe,
            metrics=_read_metrics(folder.metrics),
            environment=read_json(folder.environment, Environment),
            config=config,
            privacy=privacy,
            scores=_read_scores(folder.scores(sensitive=False)),
            resolved=read_json(folder.resolved, ResolvedDocument) if folder.resolved.exists() else None,
            audit=read_audit(folder.audit),
        )
    except (OSError, ValueError) as error:
        raise RunError(
            "damaged-run",
            f"{path}: a record cannot be read: {error}",
            fix=f"Restore the file, or write the records anew: sfumato train --resume --out {path}",
        ) from error


def _read_metrics(path: Path) -> list[MetricsLine]:
    if not path.exists():
        return []
    lines = [parse_json(line, MetricsLine) for line in read_bytes(path).splitlines()]
    if any(later["step"] <= line["step"] for line, later in pairwise(lines)):
        raise ValueError(f"the steps in {path.name} are not in order")
    return lines


def _read_scores(path: Path) -> ScoresDocument | None:
    if not path.exists():
        return None
    scores = read_json(path, ScoresDocument)
    if "per_finding" in scores:
        return scores
    classes, confusion = scores.get("per_class", {}), scores.get("confusion", [])
    if len({len(classes), len(confusion), *map(len, confusion)}) != 1:
        raise ValueError(f"{path.name} does not have one row and one column for each class")
    return scores


def read_audit(path: Path) -> AuditDocument | None:
    """What an audit of the run found; None if there was none."""
    if not path.exists():
        return None
    audit = read_json(path, AuditDocument)
    bins = audit["histogram"]
    if bins is not None:
        sides = len(bins["num_in"]), len(bins["num_out"]), len(bins["edges"]) - 1
        if len(set(sides)) != 1 or sides[0] < 1 or sorted(bins["edges"]) != bins["edges"]:
            raise ValueError(f"the histogram in {path.name} does not have one count between two edges")
    return audit


def _thinned(points: Sequence[tuple[float, float]]) -> Points:
    """Every n-th point and the last, if there are more than can be seen."""
    step = -(-len(points) // _MOST_POINTS)
    return list(points) if step <= 1 else [*points[:-1:step], points[-1]]
