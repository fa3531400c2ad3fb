"""Which strategy a layer uses: timed at its real shape on the real device, once, then remembered.

A performance question only: all strategies of a layer agree up to rounding.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sfumato.gradients.call import Call, Strategy
from sfumato.gradients.claims import Claim
from sfumato.gradients.memory import bytes_per_row, free_memory, rows_in_memory
from sfumato.gradients.piece import Piece
from sfumato.gradients.stochastic import Layout, Randomness

ROUNDS = 3
BYTES_WORTH_A_SECOND = 2.5e9  # memory kept until the factors are known has its price


@dataclass(frozen=True)
class Learnt:
    """What has been learnt of a model in a certain state."""

    state: tuple[object, ...]
    claims: list[Claim]
    is_random: bool  # its forward pass draws random numbers
    loss: Callable[[], object] = lambda: None  # gives the loss function that was found stateless with it
    is_ordered: bool = False  # its rows keep their order; one row alone does not tell
    plan: tuple[tuple[str, int], ...] = ()  # what its watched parameters meet in a pass of one row


def reference_to(loss: object) -> Callable[[], object]:
    """The loss as long as it lives, so that another at the same address is not taken for it."""
    try:
        return weakref.ref(loss)
    except TypeError:
        return lambda: None


@dataclass
class Choices:
    """What has been learnt of the layers met so far.

    ``deterministic`` chooses by counting operations instead of timing them, so that two runs with the same
    seed round in the same way.
    """

    deterministic: bool = False
    strategies: dict[Hashable, str] = field(default_factory=dict)
    claims: weakref.WeakKeyDictionary[nn.Module, Learnt] = field(default_factory=weakref.WeakKeyDictionary)
    layouts: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Randomness], object, Layout]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    row_bytes: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, ...], int]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def rows_per_pass(self, model: nn.Module, inputs: Tensor) -> int:
        """How many rows fit in memory at a time, from what one row needs; at least one."""
        known = self.row_bytes.setdefault(model, {})
        shape = tuple(inputs.shape[1:])
        if shape not in known:
            known[shape] = bytes_per_row(model, inputs[:1]) if len(inputs) else 1
        accelerated = inputs.device.type != "cpu"
        return rows_in_memory(known[shape], free_memory(inputs.device), on_accelerator=accelerated)

    def needs_outputs(self, key: Hashable) -> bool:
        """Whether the layer's output must be kept for its strategy (or for trying all of them)."""
        return self.strategies.get(key, "gram") == "gram"

    def pieces(self, key: Hashable, strategies: list[Strategy]) -> dict[str, Piece]:
        """The pieces by the remembered strategy, or by the best after trying all."""
        if len(strategies) == 1:
            return strategies[0].pieces()
        by_name = {strategy.name: strategy for strategy in strategies}
        if key not in self.strategies:
            self.strategies[key] = self._best(strategies)
        # A strategy may be missing for this microbatch (its bias has grown too large); the first never is.
        return by_name.get(self.strategies[key], strategies[0]).pieces()

    def _best(self, strategies: list[Strategy]) -> str:
        if self.deterministic:
            return min(strategies, key=lambda strategy: strategy.multiply_adds).name
        seconds = {strategy.name: float("inf") for strategy in strategies}
        for _ in range(ROUNDS):  # interleaved, so that a busy moment does not decide
            for strategy in strategies:
                began = _now()
                pieces = strategy.pieces().values()
                for piece in pieces:
                    piece.weighted_sum(torch.ones_like(piece.squared_norms))
                held = sum(piece.held_bytes for piece in pieces) / BYTES_WORTH_A_SECOND
                seconds[strategy.name] = min(seconds[strategy.name], _now() - began + held)
        return min(seconds, key=seconds.__getitem__)


def shape_key(call: Call, kind: str) -> Hashable:
    """What the choice depends on, ``kind`` being the layer's settings.

    Counts of units are rounded, because Poisson batches differ in size.
    """
    x = call.input
    groups = tuple(
        (group.size, (group.units.stop - group.units.start).bit_length()) for group in call.segments.groups
    )
    return (
        kind,
        call.names,
        tuple(x.shape[1:]),
        _layout(x),
        x.dtype,
        str(x.device),
        groups,
        torch.get_num_threads(),
    )


def _layout(x: Tensor) -> str:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return "channels last" if last and not x.is_contiguous() else "contiguous"


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    # of one thread its own time, which other programs do not lengthen
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
