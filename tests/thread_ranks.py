"""Ranks as threads of one process that meet by gloo: cheap, and faults that are planted reach all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from sfumato.audit.two_ranks import InTurn
from sfumato.training.gradient_sums import GradientSum
from sfumato.training.ranked_sum import RankedSum
from sfumato.training.ranks import Ranks

_TURN = threading.Lock()


def in_turn(own: GradientSum) -> InTurn:
    """The sum, waiting for its turn among all ranks of the tests."""
    return InTurn(own, _TURN)


def together(size: int, work: Callable[[Ranks], object], *, seconds: float = 60.0) -> list[object]:
    """What ``work`` returns, or raises, on each rank."""
    store, results = dist.HashStore(), [None] * size

    def run(number: int) -> None:
        timeout = timedelta(seconds=seconds)
        group = dist.ProcessGroupGloo(store, number, size, timeout) if size > 1 else None
        ranks = Ranks(group, number=number, size=size, size_on_host=size, timeout=timeout)
        del group
        try:
            results[number] = work(ranks)
        except BaseException as error:
            ranks.leave(error)
            results[number] = error
        finally:
            ranks.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def led(ranks: Ranks, sums: RankedSum, lead: Callable[[], object]) -> object:
    """``lead`` on the first rank; the others compute their shares until it is done."""
    ranks.agree()
    ranks.lead()
    if ranks.is_first:
        found = lead()
        with ranks.order("stop"):
            return found
    wrong = None
    while True:
        order = ranks.next_order()
        match order.pop("do"):
            case "sum":
                wrong = sums.take_part(**order)
            case "explain":
                ranks.agree({} if wrong is None else {"failed": str(wrong)})
            case "stop":
                return wrong
