"""What comes next is made while the model computes: images on a disk are read before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")

AHEAD = 2  # items: one that is ready, and one that is being made


def made_ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """The same items in the same order, made by a thread of its own, at most ``AHEAD`` before they are used.

    Guarantee: every item is given once, as it was made. What fails in the thread is raised here, at its
    place; the thread has ended when this generator has, also if it is left early.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="sfumato-ahead") as one_thread:
        made: deque[Future[tuple[Item, ...]]] = deque()  # an empty tuple after the last item

        def make() -> tuple[Item, ...]:
            for item in items:
                return (item,)
            return ()

        try:
            made.extend(one_thread.submit(make) for _ in range(AHEAD))
            while found := made.popleft().result():
                made.append(one_thread.submit(make))
                yield found[0]
        finally:
            for future in made:
                future.cancel()
