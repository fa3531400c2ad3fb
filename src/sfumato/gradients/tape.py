"""One forward pass that remembers each layer's input, and one backward pass for input gradients only.

Parameters are detached for the pass, so autograd computes no weight gradient. When the backward pass comes by
a layer it is settled there and then: its output tells the gradient, or it has a backward pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sfumato.errors import ModelError, PrivacyError
from sfumato.gradients.call import BackwardPass, Call, tensors_in
from sfumato.gradients.choice import Choices, shape_key
from sfumato.gradients.claims import Claim, holders
from sfumato.gradients.fallback import fallback_rule, output_tensors
from sfumato.gradients.functions import FUNCTIONS
from sfumato.gradients.nodes import OnePass, Start, padded_input, saved_statistics
from sfumato.gradients.piece import Materialised, Piece, UnitGradients, working_dtype
from sfumato.gradients.probe import has_rows
from sfumato.gradients.row_order import check_row_order, row_norms, row_weights
from sfumato.gradients.segments import Segments
from sfumato.gradients.stochastic import Drawn
from sfumato.gradients.uses import Meeting, Watch, Watched, multiple_of, pulled_back


class Tape:
    """The pieces of one microbatch, gathered while the backward pass runs."""

    def __init__(
        self,
        claims: list[Claim],
        segments: Segments,
        num_rows: int,
        choices: Choices,
        plan: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.watch = Watch(FUNCTIONS, num_rows, plan, self)
        self.pulls: list[tuple[Watched, Tensor]] = []  # units' gradients of values made of parameters
        self.claims, self.segments, self.num_rows, self.choices = claims, segments, num_rows, choices
        self.lost: list[Claim] = []  # claims whose layer was called with something else than rows
        self.roots: list[Tensor] = []
        self.uses: dict[str, int] = {}
        self.pieces: dict[str, Piece] = {}
        self.waiting: list[tuple[Claim, Call]] = []
        self.drawn: Drawn | None = None  # the random numbers of the pass, if the model draws
        self.order: dict[tuple[Any, int, int], Tensor] | None = None  # norms, while the order is checked
        self.starts: list[int] = []  # of the modules under way: how many draws were kept before

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for claim in self.claims:
            if claim.watched:
                continue
            module = model.get_submodule(claim.path)
            if self._repeats(claim):
                handles.append(module.register_forward_pre_hook(self._keep_draws))
            handles.append(module.register_forward_hook(partial(self._record, claim), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _repeats(self, claim: Claim) -> bool:
        """Whether the forward pass will be repeated, with the random numbers that it draws now."""
        return self.drawn is not None and claim.rule is fallback_rule

    def _keep_draws(self, _module: nn.Module, _args: object) -> None:
        assert self.drawn is not None  # the hook is set only then
        self.starts.append(len(self.drawn.kept))
        self.drawn.num_keeping += 1

    def _record(self, claim: Claim, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        inputs, outputs = tensors_in(args, kwargs), output_tensors(output)
        kept: tuple[tuple[bool, Tensor], ...] = ()
        if self.drawn is not None and self._repeats(claim):
            kept = tuple(self.drawn.kept[self.starts.pop() :])
            self.drawn.num_keeping -= 1
        if not has_rows(inputs, outputs, self.num_rows):
            self.lost.append(claim)
            return None
        call = Call(
            module=module,
            path=claim.path,
            names=frozenset(claim.parameters),
            args=tuple(_apart(value) for value in args),
            kwargs={name: _apart(value) for name, value in kwargs.items()},
            segments=self.segments,
            shared=claim.shared,
            state=saved_statistics(outputs[0]),
            gradients=(None,) * len(outputs),
            draws=kept,
        )
        if getattr(type(module), "pads_input", False):
            padded = padded_input(outputs[0], inputs[0])
            if padded is not None:  # instead of the input as it was: autograd keeps this one in any case
                call.args, call.kwargs, call.padded = (padded,), {}, True
        call.key = shape_key(call, claim.kind)
        if self.choices.needs_outputs(call.key) and getattr(type(module), "keeps_output", False):
            call.outputs = tuple(_detached(value) for value in outputs)
        call.note_versions()
        for name in claim.parameters.values():
            self.uses[name] = self.uses.get(name, 0) + 1
        backward = claim.backward(call) if claim.backward and inputs[0].requires_grad else None
        if backward is not None:
            passed = partial(self._passed, claim, call, backward)
            return OnePass.apply(inputs[0], (outputs[0].detach(), passed))
        if len(outputs) > 1:
            self.waiting.append((claim, call))
        leaves, tree = ([output], None) if isinstance(output, Tensor) else tree_flatten(output)
        index = 0
        for position, value in enumerate(leaves):
            if isinstance(value, Tensor) and value.is_floating_point():
                if not torch.is_grad_enabled():
                    raise _hidden_gradient(claim, module)
                arrived = partial(self._arrived, claim, call, index)
                leaves[position] = self._watched(value, arrived, alone=len(outputs) == 1)
                index += 1
        return leaves[0] if tree is None else tree_unflatten(leaves, tree)

    def lost_claims(self) -> list[Claim]:
        """Claims that this pass has shown to be wrong."""
        lost = {claim.path: claim for claim in self.lost}
        return [*lost.values(), *holders(self.claims, self.watch.lost)]

    def met(self, meeting: Meeting) -> Tensor:
        """``Recorder.met``: the function is settled as a layer would be."""
        watched, output = meeting.watched, meeting.output
        call = Call(
            module=cast(nn.Module, meeting.settings),
            path=", ".join(sorted(_names(watched))),
            names=frozenset(watched),
            args=(meeting.rows.detach(),),
            kwargs={},
            segments=self.segments.repeated(meeting.times),
            state=saved_statistics(output),
            gradients=(None,),
        )
        shapes = {name: tuple(value.shape) for name, value in watched.items()}
        call.key = shape_key(call, f"{meeting.function} {shapes}")
        if self.choices.needs_outputs(call.key) and getattr(meeting.settings, "keeps_output", False):
            call.outputs = (output.detach(),)
        call.note_versions()
        for name in _names(watched):
            self.uses[name] = self.uses.get(name, 0) + 1
        backward = meeting.backward(call) if meeting.backward and meeting.rows.requires_grad else None
        if backward is not None:
            passed = partial(self._met_backward, watched, call, backward)
            return OnePass.apply(meeting.rows, (output.detach(), passed))
        return self._watched(output, partial(self._met_arrived, watched, call, meeting), alone=True)

    def copied(self, value: Watched, copies: Tensor, times: int) -> Tensor:
        """``Recorder.copied``: the gradient of the copies is that of the rows."""
        segments = self.segments.repeated(times)
        for name in value.made_of:
            self.uses[name] = self.uses.get(name, 0) + 1

        def arrived(gradient: Tensor) -> None:
            if self.order is not None:
                self._note_order(value.made_of, copies, gradient)
                return
            self._gain(value, segments.sum(gradient.detach().to(working_dtype(gradient.dtype))))

        return self._watched(copies, arrived, alone=True)

    def _met_arrived(self, watched: dict[str, Watched], call: Call, meeting: Meeting, g: Tensor) -> None:
        if self.order is not None:
            self._note_order(_names(watched), call, g)
            return
        call.gradients = (g.detach(),)
        call.check_unchanged()
        with torch.autocast(g.device.type, enabled=False):
            strategies = meeting.rule(call)
            once = all(
                value.parameter is not None and self.uses[value.parameter] == 1 for value in watched.values()
            )
            pieces = self.choices.pieces(call.key, strategies) if once else strategies[0].pieces()
            self._meet_pieces(watched, pieces)
        call.release()

    def _met_backward(
        self, watched: dict[str, Watched], call: Call, backward: BackwardPass, g: Tensor
    ) -> Tensor:
        call.check_unchanged()
        with torch.autocast(g.device.type, enabled=False):
            result, pieces = backward(g)
            if self.order is not None:
                self._note_order(_names(watched), call, g)
                return result
            self._meet_pieces(watched, pieces)
        call.release()
        return result

    def _meet_pieces(self, watched: dict[str, Watched], pieces: dict[str, Piece]) -> None:
        for operand, piece in pieces.items():
            value = watched[operand]
            if value.parameter is not None and self._is_sole_use(value):
                self.pieces[value.parameter] = piece
            else:
                self._gain(value, cast(UnitGradients, piece).per_unit())

    def _is_sole_use(self, value: Watched) -> bool:
        return value.parameter is not None and self.uses[value.parameter] == 1

    def _gain(self, value: Watched, gradients: Tensor) -> None:
        """Units' gradients of a watched value, for the parameters that it is made of."""
        origin = multiple_of(value)
        if origin is None:
            self.pulls.append((value, gradients))
            return
        parameter, factor = origin
        assert parameter.parameter is not None  # it is one
        scaled = gradients if factor == 1 else gradients * factor
        self._add(parameter.parameter, scaled.reshape(len(gradients), *parameter.shape))

    def _note_order(self, names: Any, use: object, gradient: Tensor) -> None:
        assert self.order is not None  # asked only while the order is checked
        self.order[names, id(use), 0] = row_norms(gradient.unflatten(0, (self.num_rows, -1)))

    def _watched(self, value: Tensor, arrived: Callable[[Tensor], None], *, alone: bool) -> Tensor:
        """The output with a listener; where autograd has not begun yet, it begins here."""
        if not value.requires_grad:
            self.roots.append(value.new_empty(0, requires_grad=True))
            value = Start.apply(self.roots[-1], (value.detach(),))
        elif value._is_view() or not alone:
            # A view written into in place would leave its listener behind. An output of which another is made
            # would hear of that one's gradient too, which has a listener of its own.
            value = OnePass.apply(value, (value.detach(), lambda gradient: gradient))
        value.register_hook(arrived)
        return value

    def _arrived(self, claim: Claim, call: Call, index: int, gradient: Tensor) -> None:
        if self.order is not None:
            self.order[claim.path, id(call), index] = row_norms(gradient)
            return
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
        if self.order is not None:
            self.order[claim.path, id(call), 0] = row_norms(gradient)
            return result
        self._keep(claim, pieces, once=self._used_once(claim))
        call.release()
        return result

    def _settle(self, claim: Claim, call: Call) -> None:
        """Turn a layer's input and output gradient into pieces, and let go of what they do not need."""
        call.check_unchanged()
        once = self._used_once(claim)
        with torch.autocast(call.input.device.type, enabled=False):
            strategies = claim.rule(call)
            pieces = self.choices.pieces(call.key, strategies) if once else strategies[0].pieces()
            self._keep(claim, pieces, once=once)
        call.release()

    def _used_once(self, claim: Claim) -> bool:
        return all(self.uses[name] == 1 for name in claim.parameters.values())

    def _keep(self, claim: Claim, pieces: dict[str, Piece], *, once: bool) -> None:
        for name, piece in pieces.items():
            if once:
                self.pieces[claim.parameters[name]] = piece
            else:  # used more than once: the uses are added before the norm is taken
                self._add(claim.parameters[name], cast(UnitGradients, piece).per_unit())

    def _add(self, name: str, gradients: Tensor) -> None:
        if name in self.pieces:
            gradients = gradients + cast(Materialised, self.pieces[name]).gradients  # of an earlier use
        self.pieces[name] = Materialised(gradients)

    def check_order(self, losses: Tensor) -> None:
        """Refuse a model in which row k of some layer is not row k of the batch; keeps the graph."""
        if not self.roots or not losses.requires_grad:
            return
        plain = self._norms(losses.sum())
        for weights in row_weights(len(losses), losses.dtype, losses.device):
            weighted = self._norms((losses * weights.to(losses.dtype)).sum())
            for key, norms in plain.items():
                try:
                    check_row_order(str(key[0]) or "the model", norms, weighted[key], weights)
                except PrivacyError:
                    if not isinstance(key[0], frozenset):
                        raise
                    self.watch.lost |= key[0]  # its entries are not in the order of the rows

    def _norms(self, total: Tensor) -> dict[tuple[Any, int, int], Tensor]:
        """The norm of each row's gradient at each layer's output, by a backward pass that settles nothing."""
        self.order = {}
        try:
            torch.autograd.grad(total, self.roots, allow_unused=True, retain_graph=True)
            return self.order
        finally:
            self.order = None

    def backward(self, total: Tensor) -> None:
        """Input gradients only, down to the first trained layer and not beyond."""
        leaves = self.watch.leaves
        if (self.roots or leaves) and total.requires_grad:
            found = torch.autograd.grad(total, [*self.roots, *leaves.values()], allow_unused=True)
            reached = zip(leaves, found[len(self.roots) :], strict=True)
            self.watch.lost |= {name for name, gradient in reached if gradient is not None}
        for claim, call in self.waiting:
            if any(g is not None for g in call.gradients):
                self._settle(claim, call)
        for value, gradients in self.pulls:
            for name, each in pulled_back(value, gradients, leaves).items():
                self._add(name, each)


def _hidden_gradient(claim: Claim, module: nn.Module) -> ModelError:
    return ModelError(
        "hidden-gradient",
        f"{claim.path} ({type(module).__name__}) is to be trained, but called under torch.no_grad().",
        why="No gradient reaches its parameters.",
        fix="Freeze it (requires_grad_(False)), or call it without no_grad().",
    )


def _names(watched: dict[str, Watched]) -> frozenset[str]:
    return frozenset().union(*(value.made_of for value in watched.values()))


def _apart(value: Any) -> Any:
    """The same with all its tensors detached; most arguments are one."""
    return value.detach() if isinstance(value, Tensor) else tree_map(_detached, value)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
