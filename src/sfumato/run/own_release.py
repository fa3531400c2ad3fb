"""From a loop of one's own to a release: model, plan and account in, a checked ``release/`` out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfumato.data.augmentation import check_normalisation
from sfumato.data.readers.decode import Fit
from sfumato.doctor import check_forward, check_model
from sfumato.errors import ConfigError, PrivacyError, RunError
from sfumato.ledger.ledger import Account, Ledger
from sfumato.ledger.receipt import plan_values
from sfumato.privacy.plan import Plan
from sfumato.randomness import RandomSource
from sfumato.release.card import headline, model_card
from sfumato.release.documents import Config, Filing, ModelDescription
from sfumato.release.release import FORMAT, load
from sfumato.release.release import write_release as write_folder
from sfumato.run.filing import History, date_of_today
from sfumato.run.publish import CUSTOM_MODEL

OWN_LOOP = (
    "The training loop was written by whoever trained the model. That it drew its batches from the plan's "
    "sampler, clipped as planned, added the plan's noise once to every step and used nothing else of the "
    "images is their word: the checks behind this release saw the model, the plan and the account."
)


def write_release(
    folder: str | Path,
    *,
    model: nn.Module,
    plan: Plan,
    account: Account,
    source: RandomSource,
    classes: Sequence[str],
    image_size: int,
    channels: int,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
    fit: Fit = "crop",
    data: str | None = None,
    units_from: str = "each image is a unit",
) -> Path:
    """Check what a loop of one's own leaves, finish its account, and write ``folder``; returns its path.

    ``model`` sees pixels from 0 to 1, minus ``mean`` over ``std``: public constants. ``units_from`` says how
    units were recognised, for whoever files the release. ``data`` is the name that ``Ledger.begin`` was
    given: runs on data of that name are what the statement counts as earlier ones.

    Guarantee: refused, with nothing written, unless the account holds this very plan and has spent all of it,
    ``source`` is the kind of randomness that the account was begun with, and the model passes the doctor.
    What the loop did is the caller's word, and the statement says so.
    """
    place = Path(folder)
    config = Config(
        format=FORMAT,
        model=ModelDescription(name=None, options={}),
        classes=list(classes),
        image_size=image_size,
        channels=channels,
        mean=list(mean) * (channels if len(mean) == 1 else 1),
        std=list(std) * (channels if len(std) == 1 else 1),
        fit=fit,
        data=account.record.name if data is None else data,
    )
    _check_account(plan, account, source)
    _check_name(account, config["data"])
    _check_units(plan, units_from)
    _check_model(model, config)
    _check_free(place)
    account.finish()  # before anything is published: refused if another process has the run
    assert isinstance(account.ledger, Ledger)  # what ``begin`` gives
    history = History.of(account.ledger, account.record)
    privacy = _statement(plan, history, units_from=units_from, releasable=source.releasable)
    labelled = {**config, "releasable": source.releasable, "guarantee": headline(privacy)}
    card = model_card(config=config, privacy=privacy, scores=None, recipe=None)
    write_folder(place, model=model, config=labelled, privacy=privacy, card=card)
    load(place, model=model)  # what was written can be read
    return place


def _statement(plan: Plan, history: History, *, units_from: str, releasable: bool) -> dict[str, Any]:
    earlier = history.earlier(plan)
    statement = plan.statement(releasable=releasable, earlier=earlier)
    filing = Filing(
        date=date_of_today(),
        run_id=history.run_id,
        units_from=units_from,
        earlier_runs=0 if earlier is None else earlier.num_runs,
        total_epsilon=None if earlier is None else earlier.finite_epsilon,
    )
    sentences = [statement.text, CUSTOM_MODEL, OWN_LOOP]
    return {**statement.as_dict(), "filing": filing, "statement": "\n".join(sentences)}


def _check_account(plan: Plan, account: Account, source: RandomSource) -> None:
    record = account.record
    if plan_values(record.plan) != plan_values(plan):
        raise PrivacyError(
            "other-plan",
            f"the account of run {record.run_id} was begun with another plan.",
            why="The ledger counts that one; the release would state this one.",
            fix="Give the plan that Ledger.begin was given.",
        )
    if record.reserved_steps < plan.num_steps:
        raise PrivacyError(
            "plan-not-spent",
            f"run {record.run_id} has spent {record.reserved_steps:,} of {plan.num_steps:,} planned steps.",
            why="The release states the whole plan; stopping early was decided by looking at the model.",
            fix="Call account.spend(step + 1) in every step, and account.spend(plan.num_steps) at the end.",
        )
    if record.releasable != source.releasable:
        raise PrivacyError(
            "changed-source",
            f"run {record.run_id} was begun as {_kind(record.releasable)}, and its source is "
            f"{_kind(source.releasable)}.",
            why="Whoever knows a seed can subtract the noise.",
            fix="Begin the account with releasable=source.releasable, and draw everything from that source.",
        )


def _check_name(account: Account, data: str) -> None:
    known = account.record.name
    if known not in ("", data):  # empty: not known, and every run counts as an earlier one
        raise PrivacyError(
            "other-name",
            f"data is {data!r}, and the account of run {account.record.run_id} was begun with {known!r}.",
            why="Earlier runs are counted by the name in the ledger; the release would show another.",
            fix="Leave data out, or give the name that Ledger.begin was given.",
        )


def _check_units(plan: Plan, units_from: str) -> None:
    if plan.unit == "patient" and units_from == "each image is a unit":
        raise ConfigError(
            "units-not-said",
            "the plan protects patients, and units_from does not say how they were recognised.",
            why="Whoever files the release must be able to see whose images count together.",
            fix="For example units_from='the patient column of manifest.csv'.",
        )


def _check_free(place: Path) -> None:
    if place.exists():
        raise RunError(
            "run-exists",
            f"{place} already exists",
            why="A release is never overwritten.",
            fix="Give another folder.",
        )


def _check_model(model: nn.Module, config: Config) -> None:
    """Refuse what cannot be fed, is not finite, or could not have been trained with a bound."""
    channels, size = config["channels"], config["image_size"]
    check_normalisation(config["mean"], config["std"], channels=channels)
    bad = [name for name, value in model.state_dict().items() if not value.isfinite().all()]
    if bad:
        raise RunError(
            "diverged",
            f"the weights are not finite (first: {bad[0]})",
            why="The learning rate is too large for this model and noise.",
            fix="Train again with a smaller one. What was spent stays spent.",
        )
    check_forward(model, (channels, size, size), num_classes=len(config["classes"]))
    device = next((value.device for value in model.parameters()), torch.device("cpu"))
    check_model(model, torch.randn(4, channels, size, size, device=device))


def _kind(releasable: bool) -> str:
    return "secure" if releasable else "seeded"
