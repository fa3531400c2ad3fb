"""A run on several ranks: how processes that torchrun started meet, and what all but the first do.

The first rank runs ``session.lead`` as a process alone would. The others prepare the same images and network,
prove that they are the same, and compute their share of what the first rank orders.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from torch import nn

from sfumato.data import DataSplits
from sfumato.errors import ConfigError, PrivacyError, RunError
from sfumato.recipes.recipe import Recipe, recipe_from_toml, recipe_to_toml
from sfumato.run.interruption import deferred_interrupts
from sfumato.run.networks import training_copy
from sfumato.run.prepare import Prepared, prepare, with_last_layer_rows
from sfumato.run.scoring import answer_logits, share_scored_features
from sfumato.run.sums import ranked_sum
from sfumato.training.components import Components
from sfumato.training.inputs import Units
from sfumato.training.ranked_sum import RankedSum
from sfumato.training.ranks import ALONE, Ranks, reason_of

ECHO_SECONDS = 5.0  # torchrun hands on a Ctrl-C that the terminal has sent to every process already
TIMEOUT = "SFUMATO_RANK_TIMEOUT"  # seconds of silence after which a rank is given up
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAST_WORDS_SECONDS = 1.0  # so that the first rank can say why before torchrun ends everybody


def under_torchrun() -> bool:
    """Whether this process is one of several that train together."""
    return all(name in os.environ for name in _VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """This process among those that torchrun started, until the end of the block; alone without torchrun.

    However the block ends, the other ranks learn of it. What the first one knows, it alone says.
    """
    if not under_torchrun():
        yield ALONE
        return
    ranks = _join(timedelta(seconds=_timeout_seconds()))
    try:
        yield ranks
    except BaseException as error:
        known = ranks.leave(error)
        if known and not ranks.is_first and isinstance(error, Exception):
            raise _stopped() from error
        raise
    finally:
        ranks.close()


def _timeout_seconds() -> float:
    text = os.environ.get(TIMEOUT, "1800")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= 1e7:
        raise ConfigError("bad-rank-timeout", f"{TIMEOUT} is {text!r}.", fix="Give seconds, such as 1800.")
    return seconds


def _stopped() -> RunError:
    return RunError("run-stopped", "the first rank has ended the run.", fix="Rank 0 says why; see there.")


@cache
def _meeting_place(process: int, *address: str) -> tuple[dist.Store, int, int]:
    """Where this process meets the others, as long as it lives.

    The first rank serves the others there. Were it closed after a training, a rank that is early for the
    next one would find the old server, and lose it while it waits.
    """
    return next(dist.rendezvous("env://", timeout=timedelta(seconds=_timeout_seconds())))


def _join(timeout: timedelta) -> Ranks:
    try:
        store, number, size = _meeting_place(os.getpid(), *(os.environ[name] for name in _VARIABLES))
        # a program may train several times: each time is a meeting of its own
        meeting = store.add(f"sfumato/meetings/{number}", 1)
        store = dist.PrefixStore(f"sfumato/{meeting}", store)
        group = dist.ProcessGroupGloo(store, number, size, timeout)
    except (RuntimeError, ValueError, StopIteration) as error:
        raise RunError(
            "no-ranks",
            f"the processes could not meet: {reason_of(error)}",
            why="WORLD_SIZE says that there are several, so that this one may not train alone.",
            fix="Start them with torchrun, and check its --rdzv-endpoint and the network between the hosts.",
        ) from error
    return Ranks(
        group,
        number=number,
        size=size,
        number_on_host=int(os.environ.get("LOCAL_RANK", "0")),
        size_on_host=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        store=store,
        timeout=timeout,
    )


def announce(ranks: Ranks, recipe: Recipe) -> None:
    """The first rank's recipe, for all; refuses what ranks cannot do."""
    if ranks.size > 1 and not recipe.privacy.enabled:
        raise ConfigError(
            "not-over-ranks",
            "a training without privacy is wanted on several ranks.",
            why="Layers such as batch normalisation see the whole batch there, which no rank has.",
            fix="Leave out torchrun, or use another program for ordinary training.",
        )
    ranks.agree({"recipe": recipe_to_toml(recipe)})


def check_alike(ranks: Ranks, prepared: Prepared) -> None:
    """Refuse ranks whose units, network or program are not the same, then lead.

    Guarantee: a unit has the same number on every rank. Otherwise two ranks could take the same unit into
    one step, and it would move the sum twice.
    """
    mine = {} if ranks.size == 1 else identity(prepared)
    said = ranks.agree(mine)
    for number, each in enumerate(said):
        different = [what for what, value in mine.items() if each.get(what) != value]
        if different:
            raise PrivacyError(
                "ranks-differ",
                f"ranks {ranks.number} and {number} do not have the same {' and '.join(different)}.",
                why="Ranks name units by their numbers: a unit that two ranks take counts twice.",
                fix="Give every host the same files in the same folder, and the same version of sfumato.",
            )
    ranks.lead()


def identity(prepared: Prepared) -> dict[str, str]:
    """What must be the same on every rank, by names and checksums."""
    parts = [
        f"{name} {tuple(value.shape)} {value.dtype} {getattr(value, 'requires_grad', False)}"
        for name, value in (*prepared.model.named_parameters(), *prepared.model.named_buffers())
    ]
    scored = [images for images in (prepared.splits.val, prepared.splits.test) if images is not None]
    return {
        "version": version("sfumato"),
        "training images, labels or patients": ordered_checksum(prepared.units),
        "images to score": " ".join(ordered_checksum(Units.images(images)) for images in scored),
        "network": hashlib.sha256("\n".join(parts).encode()).hexdigest(),
        "components": str(prepared.components.names()),
    }


def ordered_checksum(units: Units) -> str:
    """SHA-256 of the images, labels and groups in the order of their numbers, unlike ``Units.checksum``."""
    digest = hashlib.sha256(f"sfumato ranks 1 {tuple(units.data.images.shape)} {units.max_images} ".encode())
    for column in (units.data.known_ids, units.data.labels, units.rows, units.offsets):
        digest.update(f"{tuple(column.shape)} {column.dtype} ".encode())
        digest.update(column.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def begin_steps(prepared: Prepared, *, max_rows: int) -> None:
    """Give the other ranks the network as it is before the next step, and what else their sums need."""
    ranks, prior = prepared.ranks, prepared.prior
    with ranks.order("begin", max_rows=max_rows, prior=None if prior is None else list(prior)):
        if ranks.size > 1:
            ranks.broadcast_tensors(prepared.model.state_dict())


def finish(ranks: Ranks, result: Mapping[str, Any], model: nn.Module | None) -> None:
    """The run is over: tell the other ranks its result, and a caller's network its weights."""
    with ranks.order("done", result=dict(result)):
        if ranks.size > 1 and model is not None:
            ranks.broadcast_tensors(model.state_dict())


def take_part(
    ranks: Ranks,
    *,
    force: bool = False,
    data: DataSplits | None = None,
    model: nn.Module | None = None,
    components: Components | None = None,
) -> dict[str, Any]:
    """All that ranks but the first do in a run; returns what ``finish`` was given."""
    with deferred_interrupts(echo_seconds=ECHO_SECONDS) as interruption:
        ranks.stop_wanted = lambda: interruption.requested
        recipe = recipe_from_toml(ranks.agree()[0]["recipe"], origin="rank 0")
        prepared = prepare(
            recipe,
            data=data,
            model=None if model is None else training_copy(model),
            force=force,
            components=components or Components(),
            ranks=ranks,
        )
        share_scored_features(prepared, None)
        check_alike(ranks, prepared)
        return _obey(prepared, model)


def _obey(prepared: Prepared, model: nn.Module | None) -> dict[str, Any]:
    """Do what the first rank orders, until it is done."""
    ranks, sums, wrong = prepared.ranks, None, None
    while True:
        order = ranks.next_order()
        match order.pop("do"):
            case "begin":
                sums = _begun(prepared, **order)
            case "sum":
                assert isinstance(sums, RankedSum)  # begun before
                wrong = sums.take_part(**order)
            case "logits":
                wrong = answer_logits(prepared, **order)
            case "explain":
                ranks.agree({} if wrong is None else {"failed": str(wrong) or type(wrong).__name__})
            case "done":
                if model is not None:
                    ranks.broadcast_tensors(model.state_dict())
                return order["result"]
            case "stop":
                time.sleep(_LAST_WORDS_SECONDS)
                if order["exit_code"] == 130:
                    raise KeyboardInterrupt
                raise _stopped()
            case unknown:
                raise AssertionError(f"the first rank orders {unknown!r}, which this version does not know")


def _begun(prepared: Prepared, *, max_rows: int, prior: list[float] | None) -> RankedSum | None:
    prepared.ranks.broadcast_tensors(prepared.model.state_dict())
    prepared = replace(prepared, prior=None if prior is None else tuple(prior))
    prepared = with_last_layer_rows(prepared, None)  # of the weights that came just now
    assert prepared.plan is not None  # ``announce`` refuses others
    found = ranked_sum(prepared, prepared.plan, max_rows=max_rows)
    assert isinstance(found, RankedSum)
    return found
