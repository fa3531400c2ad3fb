"""One run from recipe to release: prepare, fit, evaluate, release, report; resumable at every step.

Nothing is written before every check has passed, and nothing is published before the ledger has agreed.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from torch import nn

from sfumato.data import DataSplits
from sfumato.gradients import Clipping
from sfumato.gradients.memory import keep_freed_memory
from sfumato.ledger.ledger import Ledger
from sfumato.privacy.sampling_schemes import SamplingScheme
from sfumato.recipes.recipe import PretrainingSettings, Recipe, recipe_to_toml
from sfumato.release.run_folder import RunFolder
from sfumato.run.filing import History
from sfumato.run.interruption import deferred_interrupts
from sfumato.run.monitor import Observer
from sfumato.run.networks import training_copy
from sfumato.run.prepare import Prepared, prepare, with_pretrained_weights
from sfumato.run.pretraining import finished_stage, stage_recipe
from sfumato.run.provenance import check_ancestors
from sfumato.run.publish import RunResult, publish
from sfumato.run.steps import Run
from sfumato.training.components import Components, OptimizerFactory, SearchedRun
from sfumato.training.decision import Decision
from sfumato.training.gradient_sums import Loss


def train(
    recipe: Recipe,
    *,
    out: str | Path,
    resume: bool = False,
    force: bool = False,
    data: DataSplits | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    clipping: Clipping | None = None,
    sampling: SamplingScheme | None = None,
    optimizer: OptimizerFactory | None = None,
    searched: SearchedRun | None = None,
    ledger: Ledger | None = None,
    observer: Observer | None = None,
) -> RunResult:
    """Train as the recipe says and leave a finished run in ``out``.

    ``data``, ``model``, ``loss``, ``clipping``, ``sampling`` and ``optimizer`` replace what the recipe names.
    A copy of ``model`` is trained: the object itself gets the released weights at the end, and is unchanged
    if the run is interrupted, since steps that were not saved are taken again. ``searched``: see ``tune``.

    Guarantee: the released model is what ``release/privacy.json`` states, or there is no release. With
    ``resume`` an interrupted run continues under its recipe and plan; a changed one is refused. Spending
    is recorded in ``ledger``, by default the user's, before it is used.
    """
    began = time.monotonic()
    folder = RunFolder(Path(out))
    folder.check_usable(recipe, resume=resume)
    keep_freed_memory()
    pretrained = None if recipe.pretraining is None else finished_stage(folder)
    prepared = prepare(
        recipe,
        data=data,
        model=None if model is None else training_copy(model),
        force=force,
        pretrained=pretrained,
        components=Components(
            loss=loss, clipping=clipping, sampling=sampling, optimizer=optimizer, searched=searched
        ),
        observer=observer,
    )
    if ledger is None:
        ledger = Ledger.open()
    if prepared.plan is not None:
        check_ancestors(prepared.provenance, prepared.units.data, ledger)
    with folder.opened(recipe_to_toml(recipe)), deferred_interrupts() as interruption:
        if recipe.pretraining is not None and pretrained is None and recipe.model.weights is None:
            pretrain(prepared, recipe.pretraining, folder.pretraining, ledger=ledger, observer=observer)
            prepared = with_pretrained_weights(prepared, folder.pretraining.release, observer)
        run = Run.begin(prepared, folder, ledger=ledger, observer=observer)
        run.fit(interruption)
        decision = run.decide()
        run.close_account()
        before = run.seconds_before  # of steps in earlier processes; what they prepared is in the cache
        total_seconds = before + time.monotonic() - began
        result = publish_run(run, folder, decision, ledger, total_seconds=total_seconds)
        if model is not None:
            model.load_state_dict(run.average.averaged(prepared.model).state_dict())
        return result


def publish_run(
    run: Run, folder: RunFolder, decision: Decision, ledger: Ledger, *, total_seconds: float
) -> RunResult:
    """Publish a run whose account is closed."""
    return publish(
        run.prepared,
        folder,
        average=run.average,
        decision=decision,
        num_steps=run.step,
        seconds=run.seconds,
        total_seconds=total_seconds,
        max_rows=run.max_rows,
        observer=run.observer,
        history=History.of(ledger, run.persistence.account.record),
    )


def pretrain(
    prepared: Prepared,
    settings: PretrainingSettings,
    folder: RunFolder,
    *,
    ledger: Ledger,
    observer: Observer | None,
) -> None:
    """Train or continue the first stage of a prepared run: an ordinary run on public images in ``folder``."""
    private = prepared.splits.train
    stage = stage_recipe(prepared.recipe, settings, private)
    if observer is not None:
        observer.noted(f"Stage 1 of 2: pre-training without privacy on {stage.data.name}, public images.")
    if not folder.recipe.is_file():  # killed while the folder was made: nothing in it yet
        shutil.rmtree(folder.path, ignore_errors=True)
    train(stage, out=folder.path, resume=folder.recipe.is_file(), ledger=ledger, observer=observer)
    if observer is not None:
        observer.noted(f"Stage 2 of 2: training on {private.name}.")
