"""Two ranks in one process: the first is the caller, the second a thread that meets it by gloo.

They talk as processes do (orders, indices, weights, keys, shares); only the computing is in turn, since the
engine is for one thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor, nn

from sfumato.errors import RunError
from sfumato.gradients import ClippedSum
from sfumato.randomness import RandomSource
from sfumato.training.gradient_sums import GradientSum
from sfumato.training.ranked_sum import RankedSum, StepKeys
from sfumato.training.ranks import STOP, Ranks

SIZE = 2
TIMEOUT = timedelta(minutes=5)

SumOf = Callable[[nn.Module, RandomSource], GradientSum]  # of a rank's own model, with draws from there


@contextmanager
def over_two_ranks(
    sum_of: SumOf, models: tuple[nn.Module, nn.Module], *, unit_sizes: Tensor, source: RandomSource
) -> Iterator[RankedSum]:
    """The sums of the first model over two ranks; the second has the second model, and ends with the block.

    Guarantee: each rank has its own model and keys, and computes its share alone.
    """
    store, turn = dist.HashStore(), threading.Lock()

    def ranked(number: int) -> RankedSum:
        group = dist.ProcessGroupGloo(store, number, SIZE, TIMEOUT)
        keys = StepKeys()
        return RankedSum(
            ranks=Ranks(group, number=number, size=SIZE, size_on_host=SIZE, timeout=TIMEOUT),
            own=InTurn(sum_of(models[number], keys), turn),
            keys=keys,
            model=models[number],
            source=source,
            unit_sizes=unit_sizes,
        )

    second = threading.Thread(target=lambda: _obey(ranked(1)), daemon=True)
    second.start()
    first = ranked(0)
    try:
        yield first
    finally:
        if not first.ranks.broken:  # else nobody listens; the closed connection ends the other
            with suppress(RunError), first.ranks.order(STOP):
                pass
        first.ranks.close()
        second.join()


class InTurn:
    """A sum that waits for its turn: one process computes one at a time, as every rank's process does."""

    def __init__(self, own: GradientSum, turn: threading.Lock) -> None:
        self._own, self._turn = own, turn

    @property
    def num_units(self) -> int:
        return self._own.num_units

    def __call__(self, indices: Tensor, step: int) -> ClippedSum:
        with self._turn:
            return self._own(indices, step)


def _obey(sums: RankedSum) -> None:
    """Do what the first rank orders, until it stops or is gone; what goes wrong here is raised there."""
    ranks, wrong = sums.ranks, None
    with suppress(RunError):
        while True:
            order = ranks.next_order()
            match order.pop("do"):
                case "sum":
                    wrong = sums.take_part(**order)
                case "explain":
                    ranks.agree({} if wrong is None else {"failed": str(wrong) or type(wrong).__name__})
                case _:
                    break
    ranks.close()
