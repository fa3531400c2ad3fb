"""The progress display: lines for log files, one bar on a terminal, silence for JSON."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from types import SimpleNamespace

import pytest
from torch import nn

from sfumato.cli import main
from sfumato.cli.progress import CountLines, LiveProgress, PlainProgress, echo_start, make_progress
from sfumato.doctor.data_checks import examine_data
from sfumato.recipes.recipe import Recipe
from small_runs import small_splits


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_computations_are_counted_in_lines_and_quiet_is_silent(capsys):
    for quiet in (False, True):
        progress = PlainProgress(quiet=quiet)
        for done in (256, 512, 600):
            progress.computed("features of training images", done, 600)
        shown = capsys.readouterr().err.splitlines()
        assert shown == (
            [] if quiet else [f"features of training images  {done}/600" for done in (256, 600)]
        )  # 512 came too soon after 256 for a line of its own


def test_of_what_has_no_total_the_count_is_shown_until_something_else_is_counted(monkeypatch, capsys):
    PlainProgress().computed("listing files", 1024, 0)
    assert capsys.readouterr().err == "listing files  1,024\n"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = make_progress()
    progress.computed("listing files", 1024, 0)
    progress.computed("reading images", 32, 600)
    assert progress.waiting is not None
    progress.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert plain.index("listing files 1024/?") < plain.rindex("reading images  32/600")


@pytest.mark.parametrize("command", ["advise", "doctor", "train", "train-json"])
def test_commands_say_how_many_files_are_listed_if_that_takes_long(
    command, image_folder, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr("sfumato.run.progress._PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr("sfumato.data.readers.listing._TOLD_EVERY", 3)
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    folder = str(image_folder(train=4))
    arguments = {
        "advise": ["advise", folder, "--epsilon", "3"],
        "doctor": ["doctor", "--data", folder],
        "train": ["train", folder, "--epsilon", "3", "--set", "data.classes=[]"],
        "train-json": ["train", folder, "--epsilon", "3", "--set", "data.classes=[]", "--json"],
    }[command]
    with contextlib.suppress(SystemExit):  # no training is waited for: the class list is refused
        main(arguments)
    assert ("listing files  3" in capsys.readouterr().err) is not command.endswith("json")


def test_quiet_keeps_what_is_worth_a_sentence(capsys):
    make_progress(quiet=True).noted("Fitting features on 80 generated images.")
    assert "Fitting" in capsys.readouterr().err


def test_a_terminal_gets_a_bar_that_goes_away_and_json_gets_none(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert isinstance(make_progress(quiet=True), PlainProgress)
    progress = make_progress()
    assert isinstance(progress, LiveProgress)
    progress.computed("features of training images", 300, 600)
    assert progress.waiting is not None
    progress.computed("features of training images", 600, 600)
    assert progress.waiting is None
    assert "600/600" in terminal.getvalue()
    progress.close()


def test_a_bar_that_was_broken_off_is_put_away(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = make_progress()
    progress.computed("features of training images", 300, 600)
    assert not terminal.getvalue().endswith("\x1b[?25h")  # the cursor is hidden while the bar moves
    progress.close()
    assert terminal.getvalue().rstrip().endswith("\x1b[?25h")


def test_counted_work_is_told_every_ten_seconds_with_its_speed(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines = CountLines("models", quiet=False)
    for done, now[0] in ((20, 100.0), (30, 109.0), (40, 110.0), (45, 111.0), (60, 112.0)):
        lines("ε = 1", done, 60)
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[3] for line in told] == ["40/60", "60/60"]
    assert "2.00 models/s" in told[0]  # from the first call on: the 20 before it took time of their own
    CountLines("models", quiet=True)("ε = 1", 60, 60)
    assert capsys.readouterr().err == ""


def test_what_a_run_says_of_private_images_is_marked_sensitive(capsys):
    splits = small_splits(train=24)  # eight images in each class
    findings = examine_data(splits, unit="image")
    prepared = SimpleNamespace(
        splits=splits,
        recipe=Recipe(),
        model=nn.Linear(2, 2),
        units=splits.train.images,
        num_steps=1,
        batch_size=1.0,
        plan=None,
        findings=findings,
    )
    echo_start(prepared, 0)
    shown = capsys.readouterr().err.splitlines()
    assert "few-images" in [finding.code for finding in findings]
    assert any(line.startswith("note (sensitive): fewer than 20") for line in shown)
    assert any(line.startswith("note: the 3 class names are published") for line in shown)
