"""What comes out of a search: the best trial, or a last run with its settings, scored on test images once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from sfumato.data import DataSplits
from sfumato.errors import RunError
from sfumato.files import put, read_json, workspace, write_json
from sfumato.release.release import load, read_description
from sfumato.release.run_folder import RunFolder
from sfumato.run.session import train
from sfumato.training.components import SearchedRun
from sfumato.training.evaluation import evaluate
from sfumato.tune.page import write_pages
from sfumato.tune.records import Found, TrialRecord, records_of
from sfumato.tune.trials import Trials

_PUBLIC = ("recipe.toml", "resolved.json", "metrics.jsonl", "environment.json")


def finish(trials: Trials, full: DataSplits) -> Found:
    """The outcome of a search whose trials are all finished; made once, read afterwards."""
    folder = trials.folder
    if folder.result.is_file():
        held = read_json(folder.result, dict[str, Any])
        return Found(**{**held, "run": Path(held["run"])})
    records = records_of(trials.study, num_trials=trials.num_trials)
    best = _best(records)
    if trials.budget.settings.has_final_run:
        found = _final_run(trials, best, full)
    else:
        found = _best_trial(trials, best, full)
    if not trials.budget.settings.has_final_run:
        _remove_losers(trials, best)
    write_json(folder.result, found.as_dict())
    write_pages(folder, trials.budget, records, found)
    return found


def _remove_losers(trials: Trials, best: TrialRecord) -> None:
    """Take away the models that lost: ε covers the best alone, and each of them says that it may go out."""
    for number in range(trials.num_trials):
        lost = trials.folder.trial(number) / "release"
        if number != best.number and lost.exists():
            shutil.rmtree(lost)


def _best(records: list[TrialRecord]) -> TrialRecord:
    whole = [record for record in records if record.is_whole and record.score > 0]
    if not whole:
        raise RunError(
            "nothing-found",
            "no trial left a model.",
            why="All of them diverged or were refused. What was spent stays spent.",
            fix="Search over smaller learning rates, in another --out.",
        )
    return max(whole, key=lambda record: record.score)


def _final_run(trials: Trials, best: TrialRecord, full: DataSplits) -> Found:
    """Train on all private units with the best settings; the test images are scored when it is done."""
    budget, place = trials.budget, RunFolder(trials.folder.run)
    searched = None
    if budget.search is not None:
        searched = SearchedRun(search=budget.search, part="final", parent=trials.parent)
    if not place.recipe.is_file():
        shutil.rmtree(place.path, ignore_errors=True)
    result = train(
        budget.final_recipe(best.settings),
        out=place.path,
        resume=place.recipe.is_file(),
        data=full,
        searched=searched,
        ledger=trials.ledger,
        observer=trials.observer,
    )
    public = result.scores is not None and not result.scores_are_sensitive
    return Found(
        strategy=budget.settings.strategy,
        settings=best.settings,
        epsilon=result.privacy["epsilon"],
        delta=result.privacy["delta"],
        releasable=result.privacy["releasable"],
        accuracy=result.scores.accuracy if result.scores is not None and public else None,
        num_examples=result.scores.num_examples if result.scores is not None and public else None,
        run=place.path,
    )


def _best_trial(trials: Trials, best: TrialRecord, full: DataSplits) -> Found:
    """Take the best trial out of ``state``: its release and public records, nothing else of it."""
    source, target = trials.folder.trial(best.number), trials.folder.run
    if not target.exists():
        with workspace(target.parent) as work:
            ready = work / "run"
            shutil.copytree(source / "release", ready / "release")
            for name in _PUBLIC:
                shutil.copy2(source / name, ready / name)
            put(ready, target)
    _, privacy = read_description(target / "release")
    released, scores = load(target / "release"), None
    if full.test is not None:
        config = released.config
        scores = evaluate(
            released.model,
            full.test,
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            decision=released.decision,
        )
        label = {"split": "test", "sensitive": False, "epsilon": privacy["epsilon"]}
        write_json(RunFolder(target).scores(sensitive=False), {**label, **scores.as_dict()})
    epsilon, delta = privacy["epsilon"], privacy["delta"]
    assert epsilon is not None  # of a private run
    assert delta is not None
    return Found(
        strategy=trials.budget.settings.strategy,
        settings=best.settings,
        epsilon=epsilon,
        delta=delta,
        releasable=privacy["releasable"],
        accuracy=None if scores is None else scores.accuracy,
        num_examples=None if scores is None else scores.num_examples,
        run=target,
    )
