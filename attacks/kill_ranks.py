"""kill -9 of ranks at random instants, a full disk, a signal to one: nothing is lost or spent twice.

    python attacks/kill_ranks.py --rounds 20

Each round starts or resumes a training on 1, 2 or 4 processes that meet by gloo, and does one thing to it:
kills a rank other than the first, the first rank, or all; lets the disk of the first rank be full; or sends
SIGTERM to the last rank alone. Then every process that was left must end by itself, in time, and with an
error; the ledger may not show less than was used, nor a second run; scores that were seen once may never
change. In the end the run is finished and whole. Needs a system that can fork.
"""

from __future__ import annotations

import argparse
import errno
import mmap
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch
from kill_training import (
    NUM_STEPS,
    SETTINGS,
    Witness,
    check_finished,
    check_record,
    check_seen,
    images,
    used_steps,
)

import sfumato.run.state
from sfumato.ledger.ledger import Ledger
from sfumato.recipes.recipe import Recipe, with_settings
from sfumato.run.prepare import prepare
from sfumato.run.session import train
from sfumato.run.state import load_state

LONGEST_END = 60.0  # seconds that the others may take to notice, on a busy machine
WAYS = ("a rank", "the first rank", "all ranks", "full disk", "SIGTERM to one")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def fill_disk() -> None:
    """From now on this process cannot save."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sfumato.run.state.save_file = full


class Full(Witness):
    """A witness whose disk is full from the third step on."""

    def stepped(self, record: object, epsilon: float | None) -> None:
        super().stepped(record, epsilon)
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == 3:
            fill_disk()


def start_ranks(size: int, folder: Path, book: Path, shared: mmap.mmap, way: str) -> list[int]:
    """Fork the processes of one training; returns their numbers."""
    port = free_port()
    return [_start(rank, size, port, folder, book, shared, way) for rank in range(size)]


def _start(rank: int, size: int, port: int, folder: Path, book: Path, shared: mmap.mmap, way: str) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        torch.set_num_threads(1)  # threads of the parent do not survive the fork
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), SFUMATO_RANK_TIMEOUT="60")
        witness = None if rank else (Full if way == "full disk" else Witness)(shared)
        resume = (folder / "state" / "state.safetensors").exists()
        with Ledger.open(book) as ledger:
            recipe = with_settings(Recipe(), SETTINGS)
            train(recipe, out=folder, resume=resume, data=images(), ledger=ledger, observer=witness)
        status = 0
    except KeyboardInterrupt:
        status = 130
    finally:
        os._exit(status)


def do_harm(way: str, children: list[int]) -> set[int]:
    """Kill or signal; returns the ranks that were killed."""
    last = len(children) - 1
    if way == "SIGTERM to one":
        os.kill(children[last], signal.SIGTERM)
        return set()
    victims = {"a rank": {last}, "the first rank": {0}, "all ranks": set(range(last + 1))}.get(way, set())
    for number in victims:
        os.kill(children[number], signal.SIGKILL)
    return victims


def wait_for_start(shared: mmap.mmap, longest: float) -> None:
    """Until a random instant of the steps."""
    deadline = time.monotonic() + 120
    while shared[8:9] != b"1" and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(random.uniform(0.0, longest))


def statuses(children: list[int]) -> dict[int, int]:
    """How every rank ended, by itself and in time."""
    deadline, ended = time.monotonic() + LONGEST_END, dict[int, int]()
    while len(ended) < len(children):
        for number, child in enumerate(children):
            done, status = (0, 0) if number in ended else os.waitpid(child, os.WNOHANG)
            if done:
                ended[number] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            raise SystemExit(f"FAILED: ranks {sorted(set(range(len(children))) - ended.keys())} did not end")
        time.sleep(0.005)
    return ended


def check_ends(way: str, ended: dict[int, int], victims: set[int], folder: Path, used: int) -> None:
    """Whoever was not killed has failed with an error; after a signal the last step is saved, and said so."""
    expected = 130 if way == "SIGTERM to one" else 1
    others = {number: status for number, status in ended.items() if number not in victims}
    if any(status != expected for status in others.values()):
        raise SystemExit(f"FAILED: after {way} the ranks ended with {others}")
    if way == "SIGTERM to one":
        saved = load_state(folder / "state").values["step"]
        if saved != used:
            raise SystemExit(f"FAILED: step {used} was taken, but step {saved} is saved")


def one_round(way: str, size: int, folder: Path, book: Path, shared: mmap.mmap, longest: float) -> bool:
    """One training and what is done to it; returns whether the run has come to its end."""
    shared[8:9] = b"0"
    children = start_ranks(size, folder, book, shared, way)
    wait_for_start(shared, longest)
    victims = do_harm(way, children)
    ended, finished = statuses(children), (folder / "release" / "privacy.json").exists()
    if not finished:
        check_ends(way, ended, victims, folder, used_steps(shared))
    check_record(book, folder.name, used_steps(shared))
    with Ledger.open(book) as ledger:
        labels = [each.label for mark in ledger.datasets() for each in ledger.records(mark)]
    if labels.count(folder.name) != 1:
        raise SystemExit(f"FAILED: {folder.name} is on record {labels.count(folder.name)} times")
    return finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--longest", type=float, default=1.0, help="seconds of steps before the harm, at most"
    )
    parser.add_argument("--last", type=int, default=2, help="ranks that finish the last run")
    arguments = parser.parse_args()
    prepare(with_settings(Recipe(), SETTINGS), data=images())  # what it imports and solves, all forks have
    happened = dict.fromkeys(WAYS, 0)
    with tempfile.TemporaryDirectory() as place:
        book, shared, number, seen = Path(place) / "ledger.sqlite", mmap.mmap(-1, 9), 0, []
        for turn in range(arguments.rounds):
            way, size = WAYS[turn % len(WAYS)], (2, 4, 1, 2, 4)[turn % 5]
            folder = Path(place) / f"run{number}"
            finished = one_round(way, size, folder, book, shared, arguments.longest)
            happened[way] += 1
            seen = check_seen(folder, seen)
            if finished:
                check_finished(folder)
                number, seen = number + 1, []
                shared[:9] = bytes(9)
        folder = Path(place) / f"run{number}"
        statuses(start_ranks(arguments.last, folder, book, shared, "nothing"))
        check_seen(folder, seen)
        check_finished(folder)
    for way, count in happened.items():
        print(f"{way}: {count}")
    print(f"{number + 1} runs of {NUM_STEPS} steps finished. Nothing was lost, and nothing spent twice.")


if __name__ == "__main__":
    sys.exit(main())
