"""One forward pass that remembers each layer's input, and one backward pass for input gradients only.

Parameters are detached for the pass, so autograd computes no weight gradient. When the backward pass comes by
a layer it is settled there and then: its output tells the gradient, or it has a backward pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sfumato.errors import ModelError
from sfumato.gradients.call import BackwardPass, Call, tensors_in
from sfumato.gradients.choice import Choices, shape_key
from sfumato.gradients.claims import Claim, claims_of, hand_up
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
    def recording(self, model: nn.Module) -> Iterator[None]:
        handles = [
            model.get_submodule(claim.path).register_forward_hook(
                partial(self._record, claim), with_kwargs=True
            )
            for claim in self.claims
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, claim: Claim, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        inputs, outputs = tensors_in(args, kwargs), output_tensors(output)
        if not has_rows(inputs, outputs, self.num_rows):
            self.lost.append(claim)
            return None
        call = Call(
            module=module,
            path=claim.path,
            names=frozenset(claim.parameters),
            args=tree_map(_detached, args),
            kwargs=tree_map(_detached, kwargs),
            segments=self.segments,
            shared=claim.shared,
            state=_saved_statistics(outputs[0]),
            gradients=(None,) * len(outputs),
        )
        call.key = shape_key(call, claim.kind)
        if self.choices.needs_outputs(call.key) and getattr(type(module), "keeps_output", False):
            call.outputs = tuple(_detached(value) for value in outputs)
        call.note_versions()
        for name in claim.parameters.values():
            self.uses[name] = self.uses.get(name, 0) + 1
        backward = claim.backward(call) if claim.backward and inputs[0].requires_grad else None
        if backward is not None:
            passed = partial(self._passed, claim, call, backward)
            return _OnePass.apply(inputs[0], (outputs[0].detach(), passed))
        if len(outputs) > 1:
            self.waiting.append((claim, call))
        leaves, tree = tree_flatten(output)
        index = 0
        for position, value in enumerate(leaves):
            if isinstance(value, Tensor) and value.is_floating_point():
                if not torch.is_grad_enabled():
                    raise _hidden_gradient(claim, module)
                leaves[position] = self._watched(value, partial(self._arrived, claim, call, index))
                index += 1
        return tree_unflatten(leaves, tree)

    def _watched(self, value: Tensor, arrived: Callable[[Tensor], None]) -> Tensor:
        """The output with a listener; where autograd has not begun yet, it begins here."""
        if not value.requires_grad:
            self.roots.append(value.new_empty(0, requires_grad=True))
            value = _Begun.apply(self.roots[-1], (value.detach(),))
        elif value._is_view():  # written into in place, it would leave its listener behind
            value = _OnePass.apply(value, (value.detach(), lambda gradient: gradient))
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
    state = _state_of(model)
    known_state, claims = choices.claims.get(model, (None, []))
    probed = known_state == state
    if not probed:
        claims = claims_of(model)
    while True:
        if not probed:
            claims, lost = _probed(model, claims, inputs[:1], targets[:1], loss)
            if lost:
                claims = hand_up(model, claims, lost)
                continue
            probed = True
        tape = Tape(claims, segments, len(inputs), choices)
        with torch.enable_grad():
            with tape.recording(model):
                outputs = functional_call(model, detached, (inputs,))
            if tape.lost:
                claims = hand_up(model, claims, {claim.path: claim for claim in tape.lost}.values())
                probed = False
                continue
            per_unit = segments.sum(row_losses(loss, outputs, targets)) / segments.sizes
            tape.backward(per_unit.sum())
        choices.claims[model] = (state, claims)
        return tape.pieces, per_unit.detach()


def _state_of(model: nn.Module) -> tuple[object, ...]:
    """What the claims depend on: which parameters are trained, by which layers, in which mode and hooks."""
    layers = [
        (path, id(module), module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
        for path, module in model.named_modules()
    ]
    return (*layers, *(name for name, value in model.named_parameters() if value.requires_grad))


def _probed(
    model: nn.Module, claims: list[Claim], inputs: Tensor, targets: Tensor, loss: Loss
) -> tuple[list[Claim], list[Claim]]:
    """The claims, with the arguments that all rows share; and those that cannot stand.

    One row is sent through with every layer's own parameters detached while the layer runs. A layer that
    meets anything but one row does not have rows first, whatever lengths happen to be equal in a batch. A
    parameter that has a gradient all the same is used around its layer.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in model.named_parameters()}
    outside: list[list[tuple[nn.Module, str, Tensor]]] = []
    shared: dict[str, set[int | str]] = {claim.path: set() for claim in claims}
    lost: dict[str, Claim] = {}

    def enter(claim: Claim, module: nn.Module, _args: object) -> None:
        owners = [
            (module.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in claim.parameters
        ]
        outside.append([(owner, last, owner._parameters[last]) for owner, last in owners])
        for owner, last, value in outside[-1]:
            owner._parameters[last] = value.detach()

    def leave(claim: Claim, _module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        for owner, last, value in outside.pop():
            owner._parameters[last] = value
        if not has_rows(tensors_in(args, kwargs), output_tensors(output), 1):
            lost[claim.path] = claim
        for key, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, Tensor) and (value.dim() == 0 or len(value) != 1):
                shared[claim.path].add(key)

    handles = []
    for claim in claims:
        module = model.get_submodule(claim.path)
        handles.append(module.register_forward_pre_hook(partial(enter, claim)))
        handles.append(module.register_forward_hook(partial(leave, claim), with_kwargs=True))
    try:
        with torch.enable_grad():
            value = row_losses(loss, functional_call(model, leaves, (inputs.clone(),)), targets).sum()
    finally:
        for handle in handles:
            handle.remove()
    claims = [replace(claim, shared=frozenset(shared[claim.path])) for claim in claims]
    if value.requires_grad:
        wanted = [target for claim in claims for target in claim.parameters.values()]
        found = torch.autograd.grad(value, [leaves[name] for name in wanted], allow_unused=True)
        used = {name for name, gradient in zip(wanted, found, strict=True) if gradient is not None}
        lost |= {claim.path: claim for claim in claims if used & set(claim.parameters.values())}
    return claims, list(lost.values())


def has_rows(inputs: list[Tensor], outputs: tuple[Tensor, ...], rows: int) -> bool:
    """Whether a layer's input and its outputs have one entry for each row."""
    if not inputs or not outputs:
        return False
    return all(value.dim() > 0 and len(value) == rows for value in (inputs[0], *outputs))


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


def _hidden_gradient(claim: Claim, module: nn.Module) -> ModelError:
    return ModelError(
        "hidden-gradient",
        f"{claim.path} ({type(module).__name__}) is to be trained, but called under torch.no_grad().",
        why="No gradient reaches its parameters.",
        fix="Freeze it (requires_grad_(False)), or call it without no_grad().",
    )


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
