"""Processes that train side by side, and end with the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor


def worker_pool(num_workers: int) -> ProcessPoolExecutor:
    """A pool whose processes end when this one does, kill -9 included."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small sums gain nothing from threads
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(num_workers, mp_context=spawn, initializer=_end_with_the_parent)


def _end_with_the_parent() -> None:
    """A worker whose parent was killed would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
