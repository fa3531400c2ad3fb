"""One run from recipe to release: prepare, fit, evaluate, release, report; resumable at every step.

Nothing is written before every check has passed, and nothing is published before the ledger has agreed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from sfumato.data import DataSplits
from sfumato.gradients import Clipping
from sfumato.gradients.memory import keep_freed_memory
from sfumato.ledger.ledger import Ledger
from sfumato.privacy.sampling_schemes import SamplingScheme
from sfumato.recipes.recipe import Recipe, recipe_to_toml
from sfumato.release.run_folder import RunFolder
from sfumato.run.interruption import deferred_interrupts
from sfumato.run.monitor import Observer
from sfumato.run.networks import own_copy
from sfumato.run.prepare import Prepared, prepare, with_first_stage
from sfumato.run.pretraining import finished_stage, stage_recipe
from sfumato.run.provenance import check_apart
from sfumato.run.publish import RunResult, publish
from sfumato.run.steps import Run
from sfumato.training.components import Components, OptimizerFactory
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
    ledger: Ledger | None = None,
    observer: Observer | None = None,
) -> RunResult:
    """Train as the recipe says and leave a finished run in ``out``.

    ``data``, ``model``, ``loss``, ``clipping``, ``sampling`` and ``optimizer`` replace what the recipe names,
    for callers with their own. A copy of ``model`` is trained: the object itself gets the released weights at
    the very end, and is as it was if the run is broken off. Steps that were not saved are taken again, so
    that whoever kept their weights (through ``Prepared.model`` in an observer, too) would see both.

    Guarantee: the released model is what ``release/privacy.json`` states, or there is no release. With
    ``resume`` an interrupted run goes on under its own recipe and plan; a changed one is refused. Spending
    is recorded in ``ledger``, by default the user's own, before it is used.
    """
    folder = RunFolder(Path(out))
    folder.check_usable(recipe, resume=resume)
    keep_freed_memory()
    first = None if recipe.pretraining is None else finished_stage(folder)
    brought = Components(loss=loss, clipping=clipping, sampling=sampling, optimizer=optimizer)
    prepared = prepare(
        recipe,
        data=data,
        model=None if model is None else own_copy(model),
        force=force,
        pretrained=first,
        components=brought,
        watcher=observer,
    )
    book = ledger if ledger is not None else Ledger.open()
    if prepared.plan is not None:
        check_apart(prepared.beginning, prepared.units.data, book)
    with folder.opened(recipe_to_toml(recipe)), deferred_interrupts() as interruption:
        if recipe.pretraining is not None and first is None and recipe.model.weights is None:
            first = pretrain(prepared, folder, ledger=book, observer=observer)
            prepared = with_first_stage(prepared, first, observer)
        run = Run.begin(prepared, folder, ledger=book, observer=observer)
        run.fit(interruption)
        run.close_account()
        result = publish(
            prepared,
            folder,
            average=run.average,
            num_steps=run.step,
            seconds=run.seconds,
            max_rows=run.max_rows,
            scores=run.monitor.last_scores if prepared.monitored == prepared.final else None,
            watcher=observer,
        )
        if model is not None:
            model.load_state_dict(run.average.averaged(prepared.model).state_dict())
        return result


def pretrain(prepared: Prepared, folder: RunFolder, *, ledger: Ledger, observer: Observer | None) -> Path:
    """Take, or go on with, the first stage: an ordinary run on public images in a folder of its own."""
    stage = stage_recipe(prepared.recipe, prepared.splits.train)
    if observer is not None:
        observer.noted(f"Stage 1 of 2: pre-training without privacy on {stage.data.name}, public images.")
    inner = folder.pretraining
    if not inner.recipe.is_file():  # killed while the folder was made: nothing in it yet
        shutil.rmtree(inner.path, ignore_errors=True)
    train(stage, out=inner.path, resume=inner.recipe.is_file(), ledger=ledger, observer=observer)
    if observer is not None:
        observer.noted(f"Stage 2 of 2: training on {prepared.splits.train.name}.")
    return inner.release
