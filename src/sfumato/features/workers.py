"""One single-threaded worker per core: small pieces stay in each core's cache, and no core waits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def one_per_core() -> Iterator[Executor]:
    """A pool with as many workers as torch has threads; meanwhile each operation runs in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # before the workers start: each takes this over
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)
