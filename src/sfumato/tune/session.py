"""A search from settings to the run that comes out: budget, account, trials, the last run.

Nothing is paid for before the data, the ranges and the model have passed every check, and no trial begins
before the whole search is on record in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sfumato.data import DataSplits, carve_validation
from sfumato.data.overlap import shared_images
from sfumato.errors import ConfigError, PrivacyError
from sfumato.features.cache import keep_rows
from sfumato.ledger.ledger import Ledger
from sfumato.ledger.receipt import read_receipt
from sfumato.models.fixed_features import FixedFeatures
from sfumato.randomness import RandomSource, SecureSource, SeededSource
from sfumato.recipes.recipe import with_settings
from sfumato.run.monitor import Observer
from sfumato.run.planning import build_plan, check_holdout, default_delta
from sfumato.run.prepare import prepare
from sfumato.run.ranks import under_torchrun
from sfumato.run.resolve import group_units, load_splits
from sfumato.training.components import Components, SearchedRun
from sfumato.training.fixed_rows import FeatureViews
from sfumato.tune.budget import Budget, plan_search
from sfumato.tune.outcome import finish
from sfumato.tune.records import Found
from sfumato.tune.settings import TuneSettings
from sfumato.tune.stopping import draw_trials
from sfumato.tune.store import TuneFolder, mark_of, open_study
from sfumato.tune.trials import Trials

AT_THE_END = 1_000_000  # steps between evaluations: none but the last


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What a call of ``tune`` left: the outcome, or None while other workers have trials to finish."""

    folder: Path
    budget: Budget
    found: Found | None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A search that has passed every check and has not begun."""

    settings: TuneSettings
    full: DataSplits
    trial: DataSplits
    budget: Budget


def plan_tuning(settings: TuneSettings, *, data: DataSplits | None = None) -> Planned:
    """Load the data, calibrate the search, and examine a trial; nothing is spent or written."""
    recipe = settings.recipe
    full = data if data is not None else load_splits(recipe.data)
    if full.train.multi_label:
        raise ConfigError(
            "search-needs-classes",
            "the images have findings, and trials are compared by the share of units that is right.",
            why="Of rare findings that share says nothing, and noisy areas under curves are not there yet.",
            fix="Choose settings on public images, or train with settings of your own.",
        )
    if settings.strategy != "public" and not settings.scores_are_public:
        check_holdout(recipe, settings.holdout)
    trial = trial_splits(settings, full)
    num_units = len(group_units(recipe, full.train))
    budget = plan_search(
        settings,
        num_trial_units=len(group_units(recipe, trial.train)),
        num_final_units=num_units,
        delta=recipe.privacy.delta if recipe.privacy.delta is not None else default_delta(num_units),
    )
    every = {} if settings.pruner != "none" else {"training.evaluate_every": AT_THE_END}
    budget = replace(budget, base=with_settings(budget.base, every))
    return Planned(settings=settings, full=full, trial=trial, budget=budget)


def trial_splits(settings: TuneSettings, full: DataSplits) -> DataSplits:
    """What trials train on and, as ``val``, are scored on; test images are no part of it."""
    if settings.strategy == "public":
        assert settings.search_data is not None  # ``TuneSettings`` refuses a public search without
        public = load_splits(replace(type(settings.recipe.data)(), name=settings.search_data))
        if len(shared_images(full.train, public.train)):
            raise PrivacyError(
                "private-search-data",
                f"{settings.search_data} and {full.train.name} have images in common.",
                why="Trials on private images cost something, and this search would state that it is free.",
                fix="Search on images that are public and apart, or use --strategy scaled.",
            )
        splits = replace(public, val=None, test=None)
        return carve_validation(splits, fraction=settings.holdout, public=True)
    if settings.recipe.data.val_is_public:
        if full.val is None:
            raise ConfigError(
                "no-public-validation",
                "data.val_is_public is true, and there are no validation images.",
                fix="Put public images in val/, or leave data.val_is_public out.",
            )
        return replace(full, test=None)
    return carve_validation(replace(full, val=None, test=None), fraction=settings.holdout)


def check_trial(planned: Planned, observer: Observer | None) -> None:
    """Refuse what the doctor refuses, before anything is paid for."""
    _share_features(planned, observer)
    search = planned.budget.search
    searched = None if search is None or not search.is_counted else SearchedRun(search=search)
    prepare(
        planned.budget.trial_recipe({}),
        data=planned.trial,
        components=Components(searched=searched),
        observer=observer,
    )


def _share_features(planned: Planned, observer: Observer | None) -> None:
    """Fixed features of all images, computed once: those of the trials are rows of them."""
    if planned.budget.base.features is None or planned.settings.strategy == "public":
        return
    prepared = prepare(planned.budget.base, data=planned.full, observer=observer)
    model, views = prepared.model, prepared.views
    assert isinstance(model, FixedFeatures)  # ``prepare`` refuses others with [features]
    assert isinstance(views, FeatureViews)
    for part in (planned.trial.train, planned.trial.val):
        if part is not None and part is not planned.full.val:
            chosen = torch.isin(planned.full.train.known_ids, part.known_ids)
            keep_rows(model.extractor, part.images, views.features[chosen])


def tune(
    settings: TuneSettings,
    *,
    out: str | Path,
    storage: str | None = None,
    study: str | None = None,
    data: DataSplits | None = None,
    ledger: Ledger | None = None,
    observer: Observer | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> TuneResult:
    """Search as the settings say and leave the run that comes out in ``out/run``.

    The same call goes on after an interruption, and several at once share the trials. ``storage`` is a URL of
    Optuna's, by default a file in ``out/state``: as sensitive as that folder, unless trials are public.

    Guarantee: of what the search lets out (see ``privacy.search.Search``) the statement in ``out/run`` holds,
    and the ledger has the whole search before its first trial.
    """
    if under_torchrun():
        raise ConfigError(
            "not-over-ranks",
            "a search was started by several processes of torchrun.",
            why="All of them would be ranks of one trial, and each would score it as a trial of its own.",
            fix="Start it without torchrun; several workers share a search by the same command.",
        )
    planned = plan_tuning(settings, data=data)
    folder, ledger = TuneFolder(Path(out)), ledger or Ledger.open()
    seed = settings.recipe.training.seed
    source: RandomSource = SecureSource() if seed is None else SeededSource(seed)
    begun = folder.plan.is_file()
    if not begun:
        check_trial(planned, observer)
    folder.make_room()
    with folder.claimed("preparing", wait=True):
        num_trials, score_key = folder.prepare(
            settings, fingerprint=planned.full.train.fingerprint, draw=lambda: _drawn(settings, source)
        )
        parent = pay(planned, folder, ledger)
    opened = open_study(settings, folder, storage=storage, name=study, mark=mark_of(settings, parent))
    trials = Trials(
        folder=folder,
        study=opened,
        budget=planned.budget,
        num_trials=num_trials,
        splits=planned.trial,
        parent=parent,
        ledger=ledger,
        score_key=score_key,
        observer=observer,
        tell=tell,
    )
    found = None
    if trials.work():
        with folder.claimed("finishing", wait=True):
            found = finish(trials, planned.full)
    return TuneResult(folder=folder.path, budget=planned.budget, found=found)


def _drawn(settings: TuneSettings, source: RandomSource) -> tuple[int, bytes]:
    """The number of trials, and the secret from which the noise of their scores follows."""
    key = source.random_bytes(32, purpose="key of scores", step=0).tobytes()
    if settings.strategy != "random-stopping":
        return settings.num_trials, key
    return draw_trials(float(settings.num_trials), settings.shape, source), key


def pay(planned: Planned, folder: TuneFolder, ledger: Ledger) -> str:
    """Put the whole search on record, once; returns the account's id, empty if trials pay for themselves.

    Guarantee: on return the search is in the ledger, whole, or was refused by a cap with nothing recorded.
    """
    budget, full = planned.budget, planned.full
    if budget.search is None or not budget.search.is_counted:
        return ""
    held = read_receipt(folder.state)
    if held is not None and held.record.finished:
        ledger.import_folder(folder.state)  # another machine's ledger, or a new one, may not have it
        return held.record.run_id
    final = planned.settings.has_final_run
    recipe = budget.final_recipe({}) if final else budget.reference_recipe()
    plan = build_plan(
        recipe,
        num_units=budget.num_final_units if final else budget.num_trial_units,
        searched=SearchedRun(search=budget.search, part="final" if final else "trial"),
    )
    assert plan is not None  # a search without privacy is refused
    values: dict[str, Any] = {
        "fingerprint": full.train.fingerprint,
        "name": full.train.name,
        "image_ids": full.train.content_ids,
        "patient_names": full.names_of(full.train),
    }
    account = ledger.begin(
        plan=plan,
        folder=folder.state,
        label=folder.path.resolve().name,
        releasable=planned.settings.recipe.training.seed is None,
        **values,
    )
    account.spend(plan.num_steps)
    account.finish()
    return account.record.run_id
