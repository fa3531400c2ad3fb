"""The folder of a run: where each file lies, who may write to it, and when it may be created."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sfumato.data import KNOWN_SETS
from sfumato.errors import RunError
from sfumato.files import hold, read_bytes, remove_unfinished, replacing, write_text
from sfumato.recipes.recipe import Recipe, differences, list_recipes, recipe_from_toml

STATE_FILE = "state.safetensors"
CANARY_KEY = "canaries.key"
# Words of the command line and of recipes that stand in environment.json as they are.
_WORDS = frozenset(["train", "demo", "image", "patient", "true", "false", "none"]) | {
    "gradient",
    "mislabelled",
    "noise",
    "optimised",
}


@dataclass(frozen=True)
class RunFolder:
    """``runs/NAME``: public records above, ``release/`` for the world, ``state/`` for resuming only."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def resolved(self) -> Path:
        return self.path / "resolved.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def release(self) -> Path:
        return self.path / "release"

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def pretraining(self) -> RunFolder:
        """The first stage of a run in two stages: a run folder of its own."""
        return RunFolder(self.path / "pretraining")

    @property
    def sensitive(self) -> Path:
        return self.state / "sensitive.jsonl"

    @property
    def has_state(self) -> bool:
        return (self.state / STATE_FILE).is_file()

    def scores(self, *, sensitive: bool) -> Path:
        """Where the final scores lie: beside the metrics, or in ``state/`` if they are sensitive."""
        return (self.state if sensitive else self.path) / "scores.json"

    @property
    def audit(self) -> Path:
        """What ``sfumato audit run`` found."""
        return self.path / "audit.json"

    def canary_key(self) -> int | None:
        """The secret of the run's canaries; None if there is none."""
        path = self.state / CANARY_KEY
        if not path.exists():
            return None
        try:
            return int(read_bytes(path).decode("ascii").strip(), 16)
        except (OSError, ValueError) as error:
            raise RunError(
                "damaged-run",
                f"{path} cannot be read: {error}",
                why="Without it nobody knows which canaries were in the training.",
                fix="Restore the file, or start anew with another --out.",
            ) from error

    def keep_canary_key(self, key: int) -> None:
        """For the owner's eyes: whoever has the key knows which canaries were in."""
        with replacing(self.state / CANARY_KEY, mode=0o600) as temporary:
            temporary.write_text(f"{key:064x}\n", encoding="ascii")

    def stored_recipe(self) -> Recipe:
        """The recipe this run was started with."""
        try:
            text = read_bytes(self.recipe).decode("utf-8")
        except ValueError as error:
            raise RunError(
                "damaged-run",
                f"{self.recipe} cannot be read: {error}",
                fix="Restore the file, or start anew with another --out.",
            ) from error
        except OSError as error:
            raise RunError(
                "no-run",
                f"{self.path} holds no run that could be resumed",
                why="There is one as soon as a run takes its first step; nothing is spent before.",
                fix="Check --out, or give the run's whole command without --resume to start there.",
            ) from error
        return recipe_from_toml(text, origin=str(self.recipe))

    def check_usable(self, recipe: Recipe, *, resume: bool) -> None:
        """Refuse to overwrite a run, to resume none, or to resume under a changed recipe."""
        if not resume:
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise RunError(
                    "run-exists",
                    f"{self.path} already exists",
                    why="A run is never overwritten.",
                    fix="Continue it with --resume, or give another --out.",
                )
            return
        changed = differences(self.stored_recipe(), recipe)
        if changed:
            listed = ", ".join(f"{key} was {old!r}, now {new!r}" for key, (old, new) in changed.items())
            raise RunError(
                "changed-recipe",
                f"{self.path} was started with another recipe: {listed}",
                why="Steps already taken were accounted under the old one; the guarantee would not hold.",
                fix="Resume without these changes, or start a new run with another --out.",
            )

    @contextlib.contextmanager
    def opened(self, recipe_toml: str) -> Iterator[None]:
        """Hold the folder alone; a new one is removed again if the run fails before its first state."""
        created = [place for place in (self.path, *self.path.parents) if not place.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.state.mkdir(mode=0o700, exist_ok=True)
            os.chmod(self.state, 0o700)  # mkdir's mode is subject to the umask, and the folder may be older
        except OSError as error:
            raise RunError(
                "cannot-save", f"{self.path} cannot be created: {error}", fix="Give another --out."
            ) from error
        lock = self._locked()  # before the try: who does not hold the folder does not remove it
        try:
            with lock:
                remove_unfinished(self.state)
                if not self.recipe.exists():
                    write_text(self.recipe, recipe_toml)
                yield
        finally:
            if self.path in created and not self.has_state and not self.pretraining.has_state:
                shutil.rmtree(self.path, ignore_errors=True)
                for parent in created[1:]:
                    with contextlib.suppress(OSError):  # another run lies there by now
                        parent.rmdir()

    def _locked(self) -> contextlib.AbstractContextManager[object]:
        """The lock goes with the process, so a killed run leaves none behind."""
        try:
            return hold(self.state / "lock")
        except BlockingIOError as error:
            raise RunError(
                "run-in-use",
                f"another process is working on {self.path}",
                fix="Wait for it, or stop it first.",
            ) from error
        except OSError as error:
            raise RunError(
                "cannot-save",
                f"{self.path} cannot be locked: {error}",
                why="Two processes in one run folder would destroy each other's state.",
                fix="Give another --out, on a disk of this machine.",
            ) from error


def describe_environment() -> dict[str, Any]:
    """Software and hardware, for ``environment.json``; no names of users or hosts."""
    import torch

    packages = ("torch", "numpy", "scipy", "dp-accounting", "safetensors", "pillow", "cryptography")
    accelerator = torch.accelerator.current_accelerator()
    return {
        "sfumato": version("sfumato"),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "num_threads": torch.get_num_threads(),
        "accelerator": None if accelerator is None else str(accelerator),
        "command": public_command(sys.argv[1:]) if sys.argv[0].endswith("sfumato") else None,
    }


def public_command(arguments: Sequence[str]) -> str:
    """The command with only what names nobody: options, numbers, and names that ship with the package.

    Everything else (a path, a pattern, a name of one's own) becomes ``…``; recipe.toml has it in full.
    """
    from sfumato.models import list_feature_heads, list_models

    known = {*KNOWN_SETS, *list_recipes(), *list_models(), *list_feature_heads(), *_WORDS}

    def shown(word: str) -> str:
        option = re.fullmatch(r"(--[a-z-]+)(?:=(.*))?", word, re.DOTALL)
        if option is not None:
            return option[1] if option[2] is None else f"{option[1]}={shown(option[2])}"
        setting = re.fullmatch(r"([a-z]+\.[a-z_.]+)=(.*)", word, re.DOTALL)
        if setting is not None:
            return f"{setting[1]}={shown(setting[2])}"
        plain = re.fullmatch(r"[-+]?[0-9.]{1,20}(?:e[-+]?[0-9]{1,3})?", word) is not None
        return word if plain or word in known else "…"

    return " ".join(["sfumato", *map(shown, arguments)])


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
