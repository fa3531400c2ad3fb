"""The commands of README and getting-started run as they are written, one after the other, on a tiny folder.

Only the recipe that is chosen is a tiny one: what the choice itself does is in run/test_advice.py.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sfumato.cli import main
from sfumato.cli import train as train_command
from sfumato.recipes.recipe import Recipe, load_recipe, with_settings
from sfumato.run import prepare as preparing

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "## Your own images", "docs/getting-started.md": "## 2. Your images"}


def commands_after(page: str, heading: str) -> list[str]:
    """The lines that call sfumato below a heading, in order, without comments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fences = re.findall(r"^```\n(.*?)^```$", text[text.index(heading) :], re.MULTILINE | re.DOTALL)
    lines = [line for fence in fences for line in fence.splitlines()]
    return [re.split(r"\s{2,}", line)[0] for line in lines if line.startswith("sfumato ")]


def knobs() -> list[str]:
    """The settings of the table in getting-started, as the shell would pass them on."""
    text = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    table = text[text.index("| setting | when |") :].split("\n\n")[0]
    return [shlex.split(found)[0] for found in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the reader's, ``xrays/``, and new images in ``new/``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(preparing, "check_model", lambda *_, **__: [])  # takes seconds; tested elsewhere
    random = np.random.default_rng(3)

    def save(place: Path, name: str, brightness: int) -> None:
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(brightness, brightness + 60, (9, 9), dtype=np.uint8)).save(
            place / name
        )

    for split, first, count in (("train", 0, 12), ("test", 500, 3)):
        for number in range(2 * count):
            name = "normal" if number % 2 else "pneumonia"
            for image in range(2):
                place = tmp_path / "xrays" / split / name
                save(place, f"P{first + number:04d}_{image:02d}.png", 40 + 90 * (number % 2))
    save(tmp_path / "new", "scan.png", 40)
    return tmp_path


def tiny(given: dict[str, object], minutes: float | None, *, quiet: bool) -> Recipe:
    changes = {"model.options": {"width": 4, "groups": 2}, "data.image_size": 8, "training.num_epochs": 1.0}
    return with_settings(load_recipe("default/folder"), changes)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs_as_it_is_written(
    page: str, reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_command, "_advised", tiny)
    lines = commands_after(page, PAGES[page])
    assert len(lines) >= 6
    for line in lines:
        if line.startswith(("sfumato data get", "sfumato data import")):
            continue  # the network, and an archive of the reader's
        words = [word for part in shlex.split(line)[1:] for word in _expanded(part)]
        code = _exit_code(words)
        # doctor says by its exit code that something was found
        assert code == 0 or words[0] == "doctor", f"{line}: {capsys.readouterr().err}"
    assert (reader / "runs" / "xrays" / "release" / "privacy.json").is_file()


def _exit_code(words: list[str]) -> int:
    try:
        main(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _expanded(word: str) -> list[str]:
    """As the shell does with ``new/*.png``."""
    return sorted(map(str, Path().glob(word))) if word.endswith("*.png") else [word]


@pytest.mark.parametrize("knob", knobs())
def test_every_knob_of_getting_started_is_accepted(knob: str, reader: Path) -> None:
    flags = {"data.name": str(reader / "xrays"), "privacy.epsilon": 4.0}
    recipe = train_command.assemble(None, dict(flags), (knob,), None, False)
    if knob.startswith("model.name"):
        assert recipe.model.options == {}  # 2.7 million parameters, not the recipe's width times as many
    if knob.startswith("training.num_steps"):
        assert recipe.training.num_epochs is None


def test_the_knobs_and_the_commands_are_found() -> None:
    assert {"model.name=wrn_16_4", "training.num_steps=500"} <= set(knobs())
    assert 'data.classes=["normal", "pneumonia"]' in knobs()
    assert any("--dry-run" in line for line in commands_after(*list(PAGES.items())[1]))
