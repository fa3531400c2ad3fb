"""One forward pass that remembers each layer's input, and one backward pass for input gradients only.

Parameters are detached for the pass, so autograd computes no weight gradient; each layer's output tells its
gradient when the backward pass comes by, and the layer is settled there and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sfumato.gradients.call import BackwardPass, Call, tensors_in
from sfumato.gradients.choice import Choices, shape_key
from sfumato.gradients.claims import PASSES, Claim, claims_of, hand_up
from sfumato.gradients.fallback import output_tensors
from sfumato.gradients.piece import Materialised, Piece
from sfumato.gradients.segments import Segments

Loss = Callable[..., Tensor]


class Tape:
    """The pieces of one microbatch, gathered while the backward pass runs."""

    def __init__(self, claims: list[Claim], segments: Segments, num_rows: int, choices: Choices) -> None:
        self.claims, self.segments, self.num_rows, self.choices = claims, segments, num_rows, choices
        self.lost: list[Claim] = []  # claims whose layer was called with something else than rows
        self.roots: list[Tensor] = []
        self.uses: dict[str, int] = {}
        self.pieces: dict[str, Piece] = {}
        self.waiting: list[tuple[Claim, Call]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        handles = [
            claim.module.register_forward_hook(partial(self._record, claim), with_kwargs=True)
            for claim in self.claims
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, claim: Claim, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        inputs, outputs = tensors_in(args, kwargs), output_tensors(output)
        if not inputs or not outputs or not all(map(self._has_rows, (inputs[0], *outputs))):
            self.lost.append(claim)
            return None
        call = Call(
            module=module,
            path=claim.path,
            names=frozenset(claim.parameters),
            args=tree_map(_detached, args),
            kwargs=tree_map(_detached, kwargs),
            segments=self.segments,
            state=_saved_statistics(outputs[0]),
            gradients=(None,) * len(outputs),
        )
        call.versions = tuple(tensor._version for tensor in tensors_in(call.args, call.kwargs))
        call.key = shape_key(call, claim.kind)
        if self.choices.needs_outputs(call.key) and getattr(type(module), "keeps_output", False):
            call.outputs = tuple(_detached(value) for value in outputs)
        for name in claim.parameters.values():
            self.uses[name] = self.uses.get(name, 0) + 1
        backward = PASSES[claim.rule](call) if claim.rule in PASSES and inputs[0].requires_grad else None
        if backward is not None:
            passed = partial(self._passed, claim, call, backward)
            return _OnePass.apply(inputs[0], (outputs[0].detach(), passed))
        if len(outputs) > 1:
            self.waiting.append((claim, call))
        leaves, tree = tree_flatten(output)
        index = 0
        for position, value in enumerate(leaves):
            if isinstance(value, Tensor) and value.is_floating_point():
                leaves[position] = self._watched(value, partial(self._arrived, claim, call, index))
                index += 1
        return tree_unflatten(leaves, tree)

    def _has_rows(self, value: Tensor) -> bool:
        return value.dim() > 0 and len(value) == self.num_rows

    def _watched(self, value: Tensor, arrived: Callable[[Tensor], None]) -> Tensor:
        """The output with a listener; where autograd has not begun yet, it begins here."""
        if not value.requires_grad:
            self.roots.append(value.new_empty(0, requires_grad=True))
            value = _Begun.apply(self.roots[-1], (value.detach(),))
        value.register_hook(arrived)
        return value

    def _arrived(self, claim: Claim, call: Call, index: int, gradient: Tensor) -> None:
        gradients = list(call.gradients)
        gradients[index] = gradient.detach()
        call.gradients = tuple(gradients)
        if len(gradients) == 1:
            self._settle(claim, call)

    def _passed(self, claim: Claim, call: Call, backward: BackwardPass, gradient: Tensor) -> Tensor:
        """The layer's own backward pass: its input gradient, and its pieces beside it."""
        call.check_unchanged()
        with torch.autocast(call.input.device.type, enabled=False):
            result, pieces = backward(gradient)
        self._keep(claim, pieces, once=self._used_once(claim))
        call.let_go()
        return result

    def _settle(self, claim: Claim, call: Call) -> None:
        """Turn a layer's input and output gradient into pieces, and let go of what they do not need."""
        call.check_unchanged()
        once = self._used_once(claim)
        with torch.autocast(call.input.device.type, enabled=False):
            strategies = claim.rule(call)
            pieces = self.choices.pieces(call.key, strategies) if once else strategies[0].pieces()
            self._keep(claim, pieces, once=once)
        call.let_go()

    def _used_once(self, claim: Claim) -> bool:
        return all(self.uses[name] == 1 for name in claim.parameters.values())

    def _keep(self, claim: Claim, pieces: dict[str, Piece], *, once: bool) -> None:
        for name, piece in pieces.items():
            if once:
                self.pieces[claim.parameters[name]] = piece
            else:  # used more than once: the uses are added before the norm is taken
                self._add(claim.parameters[name], piece.per_unit())

    def _add(self, name: str, gradients: Tensor) -> None:
        if name in self.pieces:
            gradients = gradients + self.pieces[name].gradients
        self.pieces[name] = Materialised(gradients)

    def backward(self, total: Tensor) -> None:
        """Input gradients only, down to the first trained layer and not beyond."""
        if self.roots and total.requires_grad:
            torch.autograd.grad(total, self.roots, allow_unused=True)
        for claim, call in self.waiting:
            if any(g is not None for g in call.gradients):
                self._settle(claim, call)


def record(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, segments: Segments, choices: Choices
) -> tuple[dict[str, Piece], Tensor]:
    """Pieces of every trained parameter that the loss sees, and each unit's loss."""
    detached = {name: value.detach() for name, value in model.named_parameters()}
    known = choices.claims.get(model)
    claims = known if known is not None and _still_current(model, known) else claims_of(model)
    while True:
        tape = Tape(claims, segments, len(inputs), choices)
        with torch.enable_grad():
            with tape.recording():
                outputs = functional_call(model, detached, (inputs,))
            lost = {claim.path: claim for claim in tape.lost}
            if claims is not known:
                lost |= _used_around(model, claims, inputs[:1], targets[:1], loss)
            if lost:
                claims = hand_up(model, claims, lost.values())
                continue
            per_unit = segments.sum(row_losses(loss, outputs, targets)) / segments.sizes
            tape.backward(per_unit.sum())
        choices.claims[model] = claims
        return tape.pieces, per_unit.detach()


def _still_current(model: nn.Module, claims: list[Claim]) -> bool:
    """Whether the claims cover just the parameters that are trained now, by the layers that are there now."""
    claimed = {target for claim in claims for target in claim.parameters.values()}
    modules = dict(model.named_modules())
    return claimed == {name for name, value in model.named_parameters() if value.requires_grad} and all(
        modules.get(claim.path) is claim.module for claim in claims
    )


def _used_around(
    model: nn.Module, claims: list[Claim], inputs: Tensor, targets: Tensor, loss: Loss
) -> dict[str, Claim]:
    """Claims whose parameters the loss sees otherwise than through a call of their layer.

    One row is sent through with every layer's own parameters detached while the layer runs: a parameter
    that has a gradient all the same is used around its layer.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in model.named_parameters()}
    outside: list[list[tuple[nn.Module, str, Tensor]]] = []

    def enter(claim: Claim, module: nn.Module, _args: object) -> None:
        owners = [
            (module.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in claim.parameters
        ]
        outside.append([(owner, last, owner._parameters[last]) for owner, last in owners])
        for owner, last, value in outside[-1]:
            owner._parameters[last] = value.detach()

    def leave(_module: nn.Module, _args: object, _output: object) -> None:
        for owner, last, value in outside.pop():
            owner._parameters[last] = value

    handles = [claim.module.register_forward_pre_hook(partial(enter, claim)) for claim in claims]
    handles += [claim.module.register_forward_hook(leave) for claim in claims]
    try:
        value = row_losses(loss, functional_call(model, leaves, (inputs,)), targets).sum()
    finally:
        for handle in handles:
            handle.remove()
    if not value.requires_grad:
        return {}
    wanted = [target for claim in claims for target in claim.parameters.values()]
    found = torch.autograd.grad(value, [leaves[name] for name in wanted], allow_unused=True)
    used = {name for name, gradient in zip(wanted, found, strict=True) if gradient is not None}
    return {claim.path: claim for claim in claims if used & set(claim.parameters.values())}


def row_losses(loss: Loss, outputs: Any, targets: Tensor) -> Tensor:
    """The loss of each row on its own, whatever the loss function does with a batch."""
    if loss is cross_entropy:
        return cross_entropy(outputs, targets, reduction="none")
    rows = len(targets)

    def one(output: Any, target: Tensor) -> Tensor:
        value = loss(tree_map(lambda v: v.unsqueeze(0), output), target.unsqueeze(0))
        return value.reshape(())

    try:
        return vmap(one)(outputs, targets)
    except RuntimeError:  # the loss looks at values, which vmap does not allow
        return torch.stack([one(tree_map(lambda v, i=i: v[i], outputs), targets[i]) for i in range(rows)])


class _Begun(torch.autograd.Function):
    """A layer's output as it is, from which on gradients are wanted; nothing is asked of its root."""

    @staticmethod
    def forward(ctx: Any, _root: Tensor, layer: tuple[Tensor]) -> Tensor:
        return layer[0]  # in a tuple: to autograd the output is new, and may be written into

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


class _OnePass(torch.autograd.Function):
    """A layer's output as it is, with a backward pass of the layer's own."""

    @staticmethod
    def forward(ctx: Any, _inputs: Tensor, layer: tuple[Tensor, Callable[[Tensor], Tensor]]) -> Tensor:
        output, ctx.passed = layer
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.passed(gradient.detach()), None


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _saved_statistics(output: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean and inverse deviation that a group norm has just computed, where autograd keeps them."""
    if type(output.grad_fn).__name__ != "NativeGroupNormBackward0":
        return None
    return output.grad_fn._saved_result1.detach(), output.grad_fn._saved_result2.detach()
