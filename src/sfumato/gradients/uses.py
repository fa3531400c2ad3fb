"""Parameters that are watched where they are used, by whatever function, in whatever module.

A layer without a rule of its own has its parameters replaced by ``Watched`` tensors for the pass. Every
function that is given one asks its ``Watch``. What is made of parameters alone is watched in turn; where such
a value meets the rows, the function is one that has a rule (``functions``), or the value is handed out as one
copy for each row, whose gradient is that of the row. Either way the parameter itself is cut off: a gradient
that reaches it all the same shows a use that was not understood, and the module around it answers for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sfumato.gradients.call import BackwardPass, Call, Rule
from sfumato.gradients.contents import parameters_of

RESHAPES = frozenset({"reshape", "reshape_as", "view", "view_as", "flatten"})  # values in the same order
LARGEST_DERIVED = 16_384  # values; the units' gradients of a larger one cost less in a second forward pass


class Watched(Tensor):
    """A trained parameter, or a value made of such alone."""

    watch: Watch
    made_of: frozenset[str]  # the names of parameters
    parameter: str | None  # that it is, unchanged
    multiple: tuple[Watched, float] | None  # a parameter and a number of which it is the product, reshaped
    standardised: Standardised | None  # that it is, reshaped
    version: int  # of its values when these were true; a change in place makes another

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            values = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            watch = next(value.watch for value in values if isinstance(value, Watched))
            return watch.called(func, args, kwargs, values)


@dataclass(frozen=True)
class Standardised:
    """Filters of mean 0 and variance 1, but for ``eps``; times ``factor * gain`` where there is a gain."""

    weight: Watched  # a parameter, filters first
    gain: Tensor | None
    factor: float
    eps: float


@dataclass(frozen=True)
class Meeting:
    """A function of rows and watched values that has a rule, as a layer would have it."""

    function: str
    rule: Rule
    rows: Tensor
    operands: Mapping[str, Tensor]  # by the names that the rule has for them
    settings: object  # what the rule reads of a layer, the operands' values included
    output: Tensor
    times: int  # how many neighbouring entries of ``rows`` belong to one row of the batch
    backward: Callable[[Call], BackwardPass | None] | None = None

    @property
    def watched(self) -> dict[str, Watched]:
        return {name: value for name, value in self.operands.items() if isinstance(value, Watched)}


class Recorder(Protocol):
    """What is told of each place where watched values meet the rows."""

    def met(self, meeting: Meeting) -> Tensor:
        """The meeting's output, as the pass goes on with it."""
        ...

    def copied(self, value: Watched, copies: Tensor, times: int) -> Tensor:
        """One copy of the value for each row, as the pass goes on with them."""
        ...


@dataclass
class Watch:
    """The watched parameters of one pass.

    ``plan`` is what a pass of one row has met, function by function, with the length that its rows had: in a
    batch that length is as many times as large, or the values are no rows. Without a plan this is that pass.
    """

    functions: Mapping[str, Callable[..., Tensor | None]]
    num_rows: int
    plan: Sequence[tuple[str, int]] | None = None
    recorder: Recorder | None = None
    seen: list[tuple[str, int]] = field(default_factory=list)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)  # parameters that are used in a way that is not understood

    def watched(self, name: str, value: Tensor) -> Tensor:
        """The parameter, watched."""
        self.leaves[name] = value.detach().requires_grad_()
        return self.made(self.leaves[name], frozenset({name}), name)

    def made(self, value: Tensor, names: frozenset[str], name: str | None = None) -> Watched:
        """A value that is made of these parameters, watched."""
        with torch.enable_grad():  # else it would be apart from its parameter
            result = value.as_subclass(Watched)
        result.watch, result.made_of, result.parameter = self, names, name
        result.multiple = result.standardised = None
        result.version = result._version
        return result

    def called(self, func: Any, args: tuple, kwargs: dict, values: list[Tensor]) -> Any:
        """The result of a function that has been given a watched value."""
        function = self.functions.get(getattr(func, "__name__", "")) if torch.is_grad_enabled() else None
        if function is not None:
            result = function(self, func, *args, **kwargs)
            if result is not None:
                return result
        result = func(*args, **kwargs)
        if any(value.requires_grad and not isinstance(value, Watched) for value in values):
            return result  # of rows, and not understood: its gradient will show at the parameter
        names = frozenset().union(*(value.made_of for value in values if isinstance(value, Watched)))
        result = tree_map(
            lambda value: (
                self.made(value, names) if isinstance(value, Tensor) and value.requires_grad else value
            ),
            result,
        )
        if isinstance(result, Watched):
            _remember_origin(result, getattr(func, "__name__", ""), args)
        return result

    def derived(self, func: Callable[[Tensor], Tensor], value: Watched) -> Watched:
        """What ``func`` makes of a watched value."""
        return self.made(func(value), value.made_of)

    def times(self, function: str, length: int, values: Sequence[Tensor | None]) -> int | None:
        """How many of ``length`` entries belong to one row; None where they are not rows at all."""
        self.seen.append((function, length))
        if self.plan is None:
            return length
        place = len(self.seen) - 1
        planned = self.plan[place] if place < len(self.plan) else ("", 0)
        if planned[0] == function and length == planned[1] * self.num_rows:
            return planned[1]
        if planned != (function, length):
            self.lost |= {name for value in values if isinstance(value, Watched) for name in value.made_of}
        return None

    def meet(
        self,
        function: str,
        rule: Rule,
        rows: Tensor,
        operands: Mapping[str, Tensor | None],
        apply: Callable[[dict[str, Tensor | None]], Tensor],
        settings: Callable[[dict[str, Tensor | None]], object],
        backward: Callable[[Call], BackwardPass | None] | None = None,
    ) -> Tensor | None:
        """The output of a function that has a rule; None where its rows are none."""
        if isinstance(rows, Watched) or rows.dim() == 0 or any(map(_large, operands.values())):
            return None
        times = self.times(function, len(rows), list(operands.values()))
        if times is None:
            return None
        plain = {name: None if value is None else value.detach() for name, value in operands.items()}
        output = apply(plain)
        if self.recorder is None:
            return output
        given = {name: value for name, value in operands.items() if value is not None}
        return self.recorder.met(
            Meeting(function, rule, rows, given, settings(plain), output, times, backward)
        )

    def copies(self, function: str, value: Watched, length: int, dims: int) -> Tensor | None:
        """``value`` once for each of ``length`` rows of so many dimensions; None where they are none."""
        if value.dim() > dims or (value.dim() == dims and len(value) != 1):
            return None
        times = self.times(function, length, [value])
        if times is None:
            return None
        one = value.detach().reshape((1,) * (dims - value.dim()) + tuple(value.shape))
        copies = one.expand(length, *one.shape[1:])
        return copies if self.recorder is None else self.recorder.copied(value, copies, times)


def multiple_of(value: Tensor | None) -> tuple[Watched, float] | None:
    """The parameter and the number whose product ``value`` is, in whatever shape; None if it is none."""
    if not isinstance(value, Watched):
        return None
    if value.parameter is not None:
        return value, 1.0
    return value.multiple if value._version == value.version else None


def standardised_of(value: Tensor | None) -> Standardised | None:
    """The standardised filters that ``value`` is, in whatever shape; None if it is none."""
    is_as_made = isinstance(value, Watched) and value._version == value.version
    return value.standardised if is_as_made else None  # type: ignore[union-attr]


def _remember_origin(result: Watched, function: str, args: tuple) -> None:
    """What a reshaped value is made of, or one that was multiplied by a number."""
    first = args[0] if args else None
    if function in RESHAPES and isinstance(first, Watched):
        result.multiple, result.standardised = multiple_of(first), standardised_of(first)
    elif function in ("mul", "__mul__", "__rmul__") and len(args) == 2:
        value, number = args if isinstance(first, Watched) else reversed(args)
        origin = multiple_of(value) if isinstance(number, int | float) else None
        if origin is not None:
            result.multiple = (origin[0], origin[1] * number)


def _large(value: Tensor | None) -> bool:
    return isinstance(value, Watched) and value.parameter is None and value.numel() > LARGEST_DERIVED


def pulled_back(value: Watched, gradients: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From units' gradients of a watched value, (units, ...), to those of the parameters it is made of."""
    names = sorted(value.made_of)
    sources = [leaves[name] for name in names]
    gradients = gradients.reshape(len(gradients), *value.shape).to(value.dtype)
    if _is_reshaped(value, sources):
        return {names[0]: gradients.reshape(len(gradients), *sources[0].shape)}
    options = {"retain_graph": True, "allow_unused": True}
    plain = value.as_subclass(Tensor)
    try:
        found = torch.autograd.grad(plain, sources, gradients, is_grads_batched=True, **options)
    except RuntimeError:  # not every operation has a batching rule
        each = [torch.autograd.grad(plain, sources, gradient, **options) for gradient in gradients]
        found = tuple(
            None if values[0] is None else torch.stack(values)  # type: ignore[misc]
            for values in zip(*each, strict=True)
        )
    return {name: g for name, g in zip(names, found, strict=True) if g is not None}


def _is_reshaped(value: Watched, sources: Sequence[Tensor]) -> bool:
    """Whether a value is a parameter's own memory, all of it and in its order."""
    if len(sources) != 1 or value.numel() != sources[0].numel():
        return False
    same = value.data_ptr() == sources[0].data_ptr()
    return same and value.is_contiguous() and sources[0].is_contiguous()


def watched_places(
    watch: Watch, model: nn.Module, names: frozenset[str], others: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """What takes the parameters' places for the pass: watched ones for ``names``, else ``others``."""
    parameters = dict(parameters_of(model))
    return {**others, **{id(parameters[name]): watch.watched(name, parameters[name]) for name in names}}
