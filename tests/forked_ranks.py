"""Ranks as forks of this process, as torchrun would start them: whole runs, with what is imported shared."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def forked(size: int, work: Callable[[int], object], place: Path, *, seconds: float = 180.0) -> list[object]:
    """What ``work(rank)`` gives, as JSON, on each rank; a coded error is {"code": …}."""
    port = free_port()
    children = [_fork(rank, size, port, work, place) for rank in range(size)]
    deadline = time.monotonic() + seconds
    for child in children:
        while not os.waitpid(child, os.WNOHANG)[0]:
            assert time.monotonic() < deadline, "a rank did not end"
            time.sleep(0.01)
    return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(size)]


def _fork(rank: int, size: int, port: int, work: Callable[[int], object], place: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)  # threads of the parent do not survive the fork
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), SFUMATO_RANK_TIMEOUT="60")
        try:
            found = work(rank)
        except BaseException as error:
            found = {"code": getattr(error, "code", type(error).__name__), "text": str(error)}
        (place / f"rank{rank}.json").write_text(json.dumps(found))
    finally:
        os._exit(0)
