"""One pass over a microbatch: what the engine knows of the model, the forward and the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from sfumato.errors import ModelError
from sfumato.gradients.choice import Choices, Learnt, reference_to
from sfumato.gradients.claims import Claim, claims_of, passed_on, watched_names
from sfumato.gradients.contents import modules_of, parameters_of
from sfumato.gradients.piece import Piece
from sfumato.gradients.probe import probed, state_of
from sfumato.gradients.random_operations import RandomOperations
from sfumato.gradients.row_losses import Loss, check_stateless, compare_losses, row_losses
from sfumato.gradients.row_order import may_reorder
from sfumato.gradients.segments import Segments
from sfumato.gradients.stochastic import (
    AllShared,
    Drawn,
    Generators,
    RowDraws,
    drawing,
    first_random_layer,
    layout_of,
    refuse_foreign_randomness,
    refuse_random,
)
from sfumato.gradients.suitability import check_untouched, contents_of
from sfumato.gradients.swapping import swapped
from sfumato.gradients.tape import Tape
from sfumato.gradients.uses import watched_places


def record(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    segments: Segments,
    choices: Choices,
    draws: RowDraws | None = None,
) -> tuple[dict[str, Piece], Tensor]:
    """Pieces of every trained parameter that the loss sees, and each unit's loss."""
    state = state_of(model)
    known = choices.claims.get(model)
    if known is None or known.state != state:
        claims, probed_well = claims_of(model), False
        is_random = _draws(model, inputs[:1])
    else:
        claims, probed_well, is_random = known.claims, True, known.is_random
    plan: Sequence[tuple[str, int]] = known.plan if known is not None else ()
    while True:
        if not probed_well:
            claims, lost, plan = _probed_with(model, claims, inputs, targets, loss, draws, is_random)
            if lost:
                claims = passed_on(model, claims, lost)
                continue
            probed_well = True
        before, generators = contents_of(model), Generators(inputs.device)
        tape = Tape(claims, segments, len(inputs), choices, plan)
        places = watched_places(tape.watch, model, watched_names(claims), _detached_by_id(model))
        tape.drawn = _drawn(model, inputs, draws, state, choices) if is_random else None
        with torch.enable_grad(), _plain_recurrence(model):
            with tape.recording(model), swapped(model, places), drawing(tape.drawn):
                outputs = model(inputs)
            if lost := tape.lost_claims():
                claims, probed_well = passed_on(model, claims, lost), False
                continue
            if known is None or known.loss() is not loss:
                check_stateless(loss, outputs, targets)
            per_row = row_losses(loss, outputs, targets)
            compare_losses(loss, outputs, targets, per_row)
            is_ordered = known is not None and known.state == state and known.is_ordered
            if not is_ordered or may_reorder(per_row):
                with _no_checkpoints():
                    tape.check_order(per_row)
            per_unit = segments.sum(per_row) / segments.sizes
            with _no_checkpoints():
                tape.backward(per_unit.sum())
        if lost := tape.lost_claims():
            claims, probed_well = passed_on(model, claims, lost), False
            continue
        check_untouched(model, before)
        if _disturbed(model, inputs, generators):  # p has been raised since, for instance
            if is_random:
                raise refuse_random(model, "")
            is_random = True
            continue
        is_ordered = is_ordered or len(inputs) > 1
        choices.claims[model] = Learnt(state, claims, is_random, reference_to(loss), is_ordered, tuple(plan))
        return tape.pieces, per_unit.detach()


@contextmanager
def _no_checkpoints() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise ModelError(
            "checkpointed-model",
            "the model recomputes parts of its forward pass (torch.utils.checkpoint).",
            why="The layers inside would be seen twice. Only input gradients are kept here, so that it saves "
            "little memory anyway.",
            fix="Switch checkpointing off, and use a smaller microbatch_size.",
        ) from error


@contextmanager
def _plain_recurrence(model: nn.Module) -> Iterator[None]:
    """The library's fused LSTM keeps nothing for its backward pass if only the input wants a gradient."""
    enabled = torch._C._get_mkldnn_enabled()
    recurrent = any(isinstance(module, nn.RNNBase) for _, module in modules_of(model))
    torch._C._set_mkldnn_enabled(enabled and not recurrent)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _draws(model: nn.Module, inputs: Tensor) -> bool:
    return first_random_layer(model, inputs) is not None


def _probed_with(
    model: nn.Module,
    claims: list[Claim],
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    draws: RowDraws | None,
    is_random: bool,
) -> tuple[list[Claim], list[Claim], Sequence[tuple[str, int]]]:
    """``probed``, under random numbers of the step where the model draws any."""
    if not is_random:
        return probed(model, claims, inputs[:1], targets[:1], loss)
    if draws is None:
        raise refuse_random(model, first_random_layer(model, inputs[:1]) or "")
    with RandomOperations(AllShared(draws.randomness).uniform):
        return probed(model, claims, inputs[:1], targets[:1], loss)


def _drawn(
    model: nn.Module, inputs: Tensor, draws: RowDraws | None, state: tuple[object, ...], choices: Choices
) -> Drawn:
    """What supplies this pass's draws; their layout is found once for each step."""
    if draws is None:
        raise refuse_random(model, first_random_layer(model, inputs[:1]) or "")
    known = choices.layouts.get(model)
    if known is None or known[0]() is not draws.randomness or known[1] != state:
        known = (weakref.ref(draws.randomness), state, layout_of(model, inputs, draws.randomness))
        choices.layouts[model] = known
    return Drawn(draws, known[2])


def _disturbed(model: nn.Module, inputs: Tensor, generators: Generators) -> bool:
    """Whether the pass has drawn from PyTorch's generators; and not another thread."""
    has_drawn = generators.torch_moved()  # asked first: the pass below may draw, too
    if generators.others_moved():
        again = Generators(inputs.device)
        with torch.no_grad():
            model(inputs[:1].clone())
        if again.others_moved():
            raise refuse_foreign_randomness()
    return has_drawn and first_random_layer(model, inputs[:1]) is not None


def _detached_by_id(model: nn.Module) -> dict[int, Tensor]:
    return {id(value): value.detach() for _, value in parameters_of(model)}
