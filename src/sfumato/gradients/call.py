"""One use of a layer during the forward pass, and the strategies that turn it into pieces."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sfumato.errors import ModelError
from sfumato.gradients.piece import Piece
from sfumato.gradients.segments import Segments


@dataclass
class Call:
    """What went into a layer and the gradient of what came out, all detached from autograd.

    ``names`` are the layer's trained parameters, as the layer calls them.
    """

    module: nn.Module
    path: str  # the layer's name in the model
    names: frozenset[str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    segments: Segments
    versions: tuple[int, ...] = ()
    output_versions: tuple[int, ...] = ()
    padded: bool = False  # the input has its zeros around it already
    outputs: tuple[Tensor, ...] | None = None  # kept only for rules that need them
    shared: frozenset[int | str] = frozenset()  # arguments that are the same for all rows
    gradients: tuple[Tensor | None, ...] = ()  # one per output tensor; None where the loss does not see it
    state: tuple[Tensor, ...] | None = None  # statistics that the forward pass has computed already
    key: Hashable = None  # what the choice of a strategy depends on
    draws: tuple[
        tuple[bool, Tensor], ...
    ] = ()  # random numbers of the pass: whether they have rows, and they

    @property
    def input(self) -> Tensor:
        return tensors_in(self.args, self.kwargs)[0]

    @property
    def gradient(self) -> Tensor:
        gradient = self.gradients[0]
        assert gradient is not None  # a layer of one output is settled when its gradient has arrived
        return gradient

    def release(self) -> None:
        """Forget the tensors; what the pieces still need they hold themselves."""
        self.args, self.kwargs, self.outputs, self.gradients, self.state = (), {}, None, (), None
        self.draws = ()

    def note_versions(self) -> None:
        """Remember the tensors as they are, so that a later change in place is noticed."""
        self.versions = _versions(tensors_in(self.args, self.kwargs))
        self.output_versions = _versions(self.outputs or ())

    def check_unchanged(self) -> None:
        """Refuse to go on if an in-place operation has overwritten what the gradient needs."""
        if self.outputs is not None and _versions(self.outputs) != self.output_versions:
            self.outputs = None  # a strategy less
        if _versions(tensors_in(self.args, self.kwargs)) != self.versions:
            raise ModelError(
                "changed-in-place",
                f"the input of {self.path or 'the model'} ({type(self.module).__name__}) "
                "was overwritten after the layer had used it.",
                why="The gradient of the layer's parameters needs the input as it was.",
                fix="Replace the in-place operation behind this layer (x += y, inplace=True) by x = x + y.",
            )


@dataclass(frozen=True)
class Strategy:
    """One way to a layer's pieces. All strategies of a layer agree up to rounding."""

    name: str
    multiply_adds: float  # per microbatch, for choosing without timing
    pieces: Callable[[], dict[str, Piece]]


# A rule lists its strategies for a call; the first materialises every unit's gradient.
Rule = Callable[[Call], list[Strategy]]

# Some layers find their pieces on the way to their input's gradient: g -> (input gradient, pieces).
BackwardPass = Callable[[Tensor], tuple[Tensor, dict[str, Piece]]]


def _versions(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors)


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among a layer's arguments, in order."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
