"""The outputs of a run's network on images that are scored, computed by all ranks together."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn

from sfumato.data import ImageSet
from sfumato.errors import RunError
from sfumato.features.cache import OnProgress
from sfumato.models.fixed_features import FixedFeatures
from sfumato.run.features import share_features
from sfumato.run.prepare import Prepared, ScoredSet
from sfumato.run.progress import ProgressObserver, features_counter
from sfumato.training.evaluation import logits_of
from sfumato.training.ranks import Ranks, cut_evenly, stretch

Split = Literal["test", "val"]
_ROWS_AT_ONCE = 256  # shares are whole batches, so that the number of ranks changes no rounding


def scored_logits(
    prepared: Prepared, model: nn.Module, scored: ScoredSet, *, on_progress: OnProgress | None = None
) -> Tensor:
    """Logits (N, classes) of the averaged ``model``; those of fixed features by this rank alone."""
    views, ranks = prepared.views, prepared.ranks
    if ranks.size == 1 or isinstance(model, FixedFeatures):
        images = scored.images.images
        return logits_of(model, images, mean=views.mean, std=views.std, on_progress=on_progress)
    with ranks.order("logits", split=scored.split):
        ranks.broadcast_tensors(model.state_dict())
        part, error = _part(prepared, model, scored.images)
        total = ranks.add_up(part)
    if error is not None:
        raise error
    if total[-1]:
        with ranks.order("explain"):
            ranks.agree()
    return total[:-1].view(len(scored.images), -1).float()


def share_scored_features(prepared: Prepared, observer: ProgressObserver | None) -> None:
    """Let all ranks compute the fixed features of the images to score, which the first one looks up later."""
    model, sets = prepared.model, (prepared.monitored, prepared.final)
    if prepared.ranks.size > 1 and isinstance(model, FixedFeatures):
        for scored in {each.split: each for each in sets if each is not None}.values():
            counter = features_counter(observer, scored.split)
            share_features(model.extractor, scored.images.images, prepared.ranks, on_progress=counter)


def answer_logits(prepared: Prepared, *, split: Split) -> Exception | None:
    """What the other ranks do on that order; returns what went wrong, which the first rank knows too."""
    images = prepared.splits.test if split == "test" else prepared.splits.val
    assert images is not None  # all ranks have the same
    model = copy.deepcopy(prepared.model).eval()
    prepared.ranks.broadcast_tensors(model.state_dict())
    part, error = _part(prepared, model, images)
    prepared.ranks.add_up(part)
    return error


def _part(prepared: Prepared, model: nn.Module, data: ImageSet) -> tuple[Tensor, Exception | None]:
    """This rank's rows of the logits among zeros, and whether it failed, in float64."""
    views, width = prepared.views, len(data.classes)
    part = torch.zeros(len(data) * width + 1, dtype=torch.float64)
    share = _share(prepared.ranks, len(data))
    try:
        if share.stop > share.start:
            found = logits_of(
                model, data.images[share], mean=views.mean, std=views.std, batch_size=_ROWS_AT_ONCE
            )
            part[:-1].view(len(data), width)[share] = found.double()
    except (RuntimeError, ValueError, MemoryError, RunError) as error:
        part.zero_()
        part[-1] = 1.0
        return part, error
    return part, None


def _share(ranks: Ranks, count: int) -> slice:
    batches = -(-count // _ROWS_AT_ONCE)
    mine = stretch(cut_evenly(torch.ones(batches), ranks.size), ranks.number)
    return slice(min(count, mine.start * _ROWS_AT_ONCE), min(count, mine.stop * _ROWS_AT_ONCE))
