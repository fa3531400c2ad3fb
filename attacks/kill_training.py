"""kill -9 at random instants of whole trainings: the ledger never shows less than was used.

    python attacks/kill_training.py --kills 100

A watcher inside the training writes every step that was used into memory shared with this process,
which survives the kill. After each kill the ledger is opened afresh and compared, and what metrics.jsonl
shows is noted: scores that were seen once may never change, since a step that is taken again has fresh
noise. A run that comes to its end is checked for completeness (every step once in metrics.jsonl, ε as
planned) and the next one begins. Needs a system that can fork.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from sfumato.data import DataSplits, ImageSet
from sfumato.ledger.ledger import Ledger
from sfumato.recipes.recipe import Recipe, with_settings
from sfumato.run.session import train

NUM_STEPS = 60
SETTINGS = {
    "data.name": "shades",
    "model.name": "scale_resnet9",
    "model.options": {"width": 4, "groups": 2},
    "privacy.epsilon": 8.0,
    "privacy.delta": 1e-3,
    "training.batch_size": 16,
    "training.num_steps": NUM_STEPS,
    "training.evaluate_every": 2,
    "performance.save_every_seconds": 0.1,
}


class Witness:
    """Writes each step that was used, and each evaluation, where the parent can read it."""

    def __init__(self, shared: mmap.mmap) -> None:
        self.shared = shared

    def started(self, prepared: object, start_step: int) -> None:
        self.shared[8:9] = b"1"

    def stepped(self, record: object, epsilon: float | None) -> None:
        self.shared[:8] = max(record.step, used_steps(self.shared)).to_bytes(8, "little")

    def scored(self, step: int, scored: object, scores: object) -> None: ...

    def noted(self, text: str) -> None: ...

    def computed(self, what: str, done: int, total: int) -> None: ...


def used_steps(shared: mmap.mmap) -> int:
    return int.from_bytes(shared[:8], "little")


def images() -> DataSplits:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (96, 1, 8, 8), generator=generator).to(torch.uint8)
    whole = ImageSet(pixels, torch.arange(96) % 3, ("a", "b", "c"), None, "shades")
    return DataSplits(train=whole.select(torch.arange(90)), test=whole.select(torch.arange(90, 96)))


def train_in_child(folder: Path, book: Path, shared: mmap.mmap) -> int:
    """Fork a process that begins or resumes the run; returns its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        torch.set_num_threads(1)  # threads of the parent do not survive the fork
        with Ledger.open(book) as ledger:
            resume = (folder / "state" / "state.safetensors").exists()
            recipe = with_settings(Recipe(), SETTINGS)
            train(recipe, out=folder, resume=resume, data=images(), ledger=ledger, observer=Witness(shared))
        status = 0
    finally:
        os._exit(status)


def check_record(book: Path, label: str, used: int) -> int:
    """How much more than used is on record for the run; -1 if nothing is recorded and nothing was used."""
    with Ledger.open(book) as ledger:
        records = [
            record for mark in ledger.datasets() for record in ledger.records(mark) if record.label == label
        ]
    reserved = max((record.reserved_steps for record in records), default=0)
    if reserved < used:
        raise SystemExit(f"FAILED: {used} steps of {label} were used, but {reserved} are on record")
    return reserved - used


def check_seen(folder: Path, seen: list[str]) -> list[str]:
    """The whole lines that can be read now; whatever was ``seen`` before must be among them."""
    log = folder / "metrics.jsonl"
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    if lines[: len(seen)] != seen:
        raise SystemExit(f"FAILED: {folder.name} took steps again whose scores had been seen")
    return lines


def check_finished(folder: Path) -> None:
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    privacy = json.loads((folder / "release" / "privacy.json").read_text())
    if steps != list(range(1, NUM_STEPS + 1)) or privacy["num_steps"] != NUM_STEPS:
        raise SystemExit(f"FAILED: {folder.name} has lost or repeated lines: {steps}")
    if privacy["epsilon"] > SETTINGS["privacy.epsilon"]:
        raise SystemExit(f"FAILED: {folder.name} states ε = {privacy['epsilon']}")


def wait_for_the_moment(child: int, shared: mmap.mmap, longest: float) -> int | None:
    """Until a random instant, of the preparation or (mostly) of the steps; the status if it ended before."""
    shared[8:9] = b"0"
    in_preparation = random.random() < 0.25
    deadline = time.monotonic() + random.uniform(0.0, longest) if in_preparation else None
    while deadline is None or time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if deadline is None and shared[8:9] == b"1":
            deadline = time.monotonic() + random.uniform(0.0, longest)
        time.sleep(0.001)
    return None


def kill_at_random(kills: int, place: Path, *, longest: float) -> dict[str, int]:
    """Kill ``kills`` times, resuming between; returns what happened."""
    book = place / "ledger.sqlite"
    happened = {"kills": 0, "before the first step": 0, "finished runs": 0, "most recorded beyond used": 0}
    number, seen = 0, []
    shared = mmap.mmap(-1, 9)
    while happened["kills"] < kills:
        folder = place / f"run{number}"
        child = train_in_child(folder, book, shared)
        status = wait_for_the_moment(child, shared, longest)
        if status is None:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            happened["kills"] += os.WIFSIGNALED(status)
            happened["before the first step"] += used_steps(shared) == 0
        elif os.waitstatus_to_exitcode(status) != 0:
            raise SystemExit(f"FAILED: {folder.name} could not be resumed")
        spare = check_record(book, folder.name, used_steps(shared))
        happened["most recorded beyond used"] = max(happened["most recorded beyond used"], spare)
        seen = check_seen(folder, seen)
        if not os.WIFSIGNALED(status):
            check_finished(folder)
            happened["finished runs"] += 1
            number, seen = number + 1, []
            shared[:9] = bytes(9)
    _, status = os.waitpid(train_in_child(place / f"run{number}", book, shared), 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"FAILED: run{number} could not be resumed")
    check_seen(place / f"run{number}", seen)
    check_finished(place / f"run{number}")
    happened["finished runs"] += 1
    return happened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--longest", type=float, default=1.5, help="seconds until a kill, at most")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        happened = kill_at_random(arguments.kills, Path(place), longest=arguments.longest)
    for what, count in happened.items():
        print(f"{what}: {count}")
    print(
        "The ledger never showed less than was used, no score that was seen changed, and every run resumed."
    )


if __name__ == "__main__":
    sys.exit(main())
