"""The commands of a run, as a user calls them: results, refusals, exit codes, and nothing left behind."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sfumato.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]

SMALL = ("--set", "model.options.width=4", "--set", "model.options.groups=2", "--set", "data.image_size=12")


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def call(capsys):
    """Runs a command in this process: (exit code, what it printed, what it complained)."""

    def run(*arguments):
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_train_evaluate_predict_and_report_work_together(call, image_folder, own_place):
    data = image_folder(train=12, test=4)
    code, out, _ = call(
        "train", data, "--epsilon", 8, "--delta", 1e-2, *SMALL, "--set", "training.num_epochs=1", "--json"
    )
    result = json.loads(out)
    assert code == 0
    assert result["folder"] == "runs/images-scale_resnet9-eps8"
    assert result["privacy"]["epsilon"] <= 8
    run = own_place / result["folder"]

    code, out, _ = call("evaluate", run, "--json")
    scored = json.loads(out)
    assert (code, scored["accuracy"], scored["num_examples"]) == (0, result["accuracy"], 8)

    code, out, _ = call("predict", run / "release", data / "test", "--json")
    assert code == 0
    assert {row["label"] for row in json.loads(out)} <= {"cat", "dog"}
    assert len(json.loads(out)) == 8
    assert all(row["releasable"] and row["epsilon"] <= 8 for row in json.loads(out))

    code, out, _ = call("report", run)
    assert (code, out.strip()) == (0, str(run / "report.html"))

    code, out, _ = call("evaluate", run / "release", data, "--split", "train")
    assert code == 0
    assert "% of 24 train images" in out


def test_scores_on_private_images_say_that_they_are_sensitive_everywhere(call, image_folder, own_place):
    data = image_folder(train=12)
    settings = ("--epsilon", 8, "--delta", 1e-2, *SMALL, "--set", "training.num_epochs=0.2")
    private = (*settings, "--set", "data.holdout=0.4")
    code, out, err = call("train", data, *private, "--out", "private")
    assert code == 0
    accuracy_lines = [line for line in (out + err).splitlines() if "ccuracy" in line]
    assert len(accuracy_lines) >= 2
    assert all("sensitive" in line for line in accuracy_lines)
    scores = json.loads((own_place / "private/state/scores.json").read_text())
    assert scores["sensitive"] is True
    assert not (own_place / "private/scores.json").exists()
    code, out, err = call("evaluate", "private", "--json")
    assert json.loads(out)["sensitive"] is True
    code, out, err = call("evaluate", "private")
    assert "(sensitive)" in out.splitlines()[0]
    assert "sensitive:" in err


def test_scores_on_test_images_do_not(call, image_folder, own_place):
    data = image_folder(train=12, test=4, val=4)
    settings = ("--epsilon", 8, "--delta", 1e-2, *SMALL, "--set", "training.num_epochs=0.2")
    _, out, _ = call("train", data, *settings, "--set", "data.val_is_public=true", "--out", "run", "--json")
    assert json.loads(out)["sensitive"] is False
    assert json.loads((own_place / "run/scores.json").read_text())["sensitive"] is False
    found = {split: json.loads(call("evaluate", "run", "--split", split, "--json")[1])["sensitive"]
             for split in ("test", "val", "train")}  # fmt: skip
    assert found == {"test": False, "val": False, "train": True}
    again = json.loads(call("evaluate", "run/release", data, "--split", "val", "--json")[1])
    assert again["sensitive"] is True  # the release alone does not know that they are public


def test_a_folder_may_lack_a_class_of_the_model_but_not_have_another(call, image_folder, own_place):
    data = image_folder(train=12, test=4)
    settings = ("--epsilon", 8, "--delta", 1e-2, *SMALL, "--set", "training.num_epochs=0.2")
    assert call("train", data, *settings, "--out", "run")[0] == 0
    only = own_place / "only"
    shutil.copytree(data / "test" / "dog", only / "dog")
    code, out, _ = call("evaluate", "run", only, "--json")
    assert (code, json.loads(out)["num_examples"]) == (0, 4)
    (only / "dog").rename(only / "wolf")
    code, _, err = call("evaluate", "run", only)
    assert code == 1
    assert "label-out-of-range" in err


def test_a_dry_run_plans_and_writes_nothing(call, image_folder, own_place):
    code, out, _ = call("train", image_folder(train=12), "--epsilon", 3, *SMALL, "--dry-run", "--json")
    plan = json.loads(out)
    assert code == 0
    assert 2.9 < plan["epsilon"] <= 3
    assert plan["seconds"] > 0
    assert plan["memory_bytes"] > 2**20
    assert list(own_place.iterdir()) == []


def break_nothing(folder):
    """The folder as it is."""


def empty_class(folder):
    (folder / "train/empty").mkdir()


def corrupt_image(folder):
    (folder / "train/cat/p0-0.png").write_bytes(b"not a picture")


def label_out_of_range(folder):
    (folder / "classes.txt").write_text("cat\ndog\n")
    rows = ["path,label,split"] + [
        f"train/cat/p{n // 2}-{n}.png,{7 if n == 3 else 0},train" for n in range(4)
    ]
    (folder / "manifest.csv").write_text("\n".join(rows) + "\n")


def huge_image(folder):
    """A PNG whose header claims 50,000 x 50,000 pixels."""
    import struct
    import zlib

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 0, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    (folder / "train/cat/huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + data)


@pytest.mark.parametrize(
    ("spoil", "options", "code", "exit_code"),
    [
        (empty_class, ("--epsilon", 3), "empty-class", 1),
        (corrupt_image, ("--epsilon", 3), "corrupt-image", 1),
        (huge_image, ("--epsilon", 3), "image-too-large", 1),
        (label_out_of_range, ("--epsilon", 3), "label-out-of-range", 1),
        (break_nothing, (), "no-budget", 2),
        (break_nothing, ("--epsilon", -1), "epsilon-out-of-range", 2),
        (break_nothing, ("--epsilon", 3, "--delta", 7), "delta-out-of-range", 2),
        (break_nothing, ("--epsilon", 3, "--delta", 0.5), "delta-too-large", 1),
        (break_nothing, ("--epsilon", 3, "--set", "privacy.noise_multiplier=1"), "contradictory-budget", 2),
        (break_nothing, ("--epsilon", 3, "--set", "privacy.epsilom=1"), "unknown-key", 2),
        (break_nothing, ("--epsilon", 3, "--set", "model.options.norm=batch"), "mixes-examples", 1),
        (break_nothing, ("--epsilon", 3, "--model", "resnet10"), "unknown-model", 2),
        (break_nothing, ("--epsilon", 3, "--unit", "patient"), "no-patients", 1),
        (break_nothing, ("--epsilon", 3, "--recipe", "demo/digit"), "no-recipe", 2),
        (break_nothing, ("--resume", "--out", "nowhere"), "no-run", 1),
    ],
)
def test_bad_input_is_a_coded_error_and_leaves_nothing(
    call, image_folder, own_place, spoil, options, code, exit_code
):
    folder = image_folder(train=12)
    spoil(folder)
    small = () if "--model" in options else SMALL
    returned, out, complaint = call("train", folder, *small, *options, "--json")
    assert returned == exit_code
    error = json.loads(out)
    assert code is None or error["code"] == code
    assert f"[{error['code']}]" in complaint
    assert list(own_place.iterdir()) == []


def test_resuming_needs_to_know_which_run(call, own_place):
    code, out, _ = call("train", "--resume", "--json")
    assert (code, json.loads(out)["code"]) == (2, "no-out")
    code, out, _ = call("train", "--resume", "--out", "nowhere", "--json")
    assert (code, json.loads(out)["code"]) == (1, "no-run")


def test_a_missing_folder_and_an_unknown_name_are_told_apart(call, own_place):
    code, out, _ = call("train", "no/such/folder", "--epsilon", 3, "--json")
    assert (code, json.loads(out)["code"]) == (1, "missing-folder")
    code, out, _ = call("train", "cifar11", "--epsilon", 3, "--json")
    assert (code, json.loads(out)["code"]) == (1, "unknown-data")
    assert "cifar10" in json.loads(out)["what"]


def test_an_epsilon_replaces_the_fixed_noise_of_a_recipe():
    from sfumato.cli.train import assemble

    name = "de2022/cifar10-wrn16-4-eps8"
    asked = assemble(name, {"privacy.epsilon": 4.0}, (), None, False)
    assert (asked.privacy.epsilon, asked.privacy.noise_multiplier) == (4.0, None)
    plain = assemble(name, {}, (), None, False)
    assert (plain.privacy.epsilon, plain.privacy.noise_multiplier) == (None, 3.0)
    both = assemble(name, {"privacy.epsilon": 4.0}, ("privacy.noise_multiplier=2",), None, False)
    assert (both.privacy.epsilon, both.privacy.noise_multiplier) == (4.0, 2.0)


def test_another_model_does_not_inherit_the_options_of_the_recipes():
    from sfumato.cli.train import assemble

    assert assemble("demo/digits", {"model.name": "wrn_16_4"}, (), None, False).model.options == {}
    assert assemble("demo/digits", {"model.name": "scale_resnet9"}, (), None, False).model.options


def test_recipes_are_listed_shown_copied_and_validated(call, own_place):
    code, out, _ = call("recipes", "list", "de2022/table3")
    assert code == 0
    assert sum(line.startswith("de2022/") for line in out.splitlines()) == 12
    code, out, _ = call("recipes", "show", "demo/digits", "--json")
    assert json.loads(out)["settings"]["privacy"]["epsilon"] == 3.0
    assert call("recipes", "copy", "demo/digits", "mine.toml")[0] == 0
    assert call("recipes", "copy", "demo/digits", "mine.toml")[0] == 2
    assert call("recipes", "validate", "mine.toml", "demo/digits")[0] == 0
    (own_place / "bad.toml").write_text("[privacy]\nepsilonn = 1\n")
    code, out, _ = call("recipes", "validate", "bad.toml", "--json")
    assert (code, json.loads(out)["code"]) == (2, "unknown-key")


@pytest.mark.parametrize("group", ["models", "recipes"])
def test_a_pattern_that_matches_nothing_says_so(call, group):
    code, out, hint = call(group, "list", "zzz*")
    assert (code, out) == (0, "")
    assert "No" in hint
    assert f"sfumato {group} list" in hint
    assert call(group, "list", "*9*" if group == "models" else "demo/*")[2] == ""


def test_heads_on_features_are_listed_apart_and_found_with_the_rest(call):
    code, out, _ = call("models", "list", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert rows["patches"]["fixed_features"] is True
    assert rows["resnet9"]["fixed_features"] is False
    text = call("models", "list")[1]
    assert text.index("resnet9") < text.index("Heads on fixed features") < text.index("patches")
    assert "Did you mean patches?" in call("models", "show", "patchs")[2]


def leaves(command, words=()):
    """Every command that does something, with its name."""
    if not hasattr(command, "commands"):
        yield " ".join(words), command
        return
    for name, inner in command.commands.items():
        yield from leaves(inner, (*words, name))


def test_every_command_answers_programs_too():
    found = {}
    for name, (module, _) in COMMANDS.items():
        found.update(leaves(importlib.import_module(module).command, (name,)))
    assert len(found) > 20
    silent = [
        name for name, each in found.items() if "--json" not in [o for p in each.params for o in p.opts]
    ]
    # a drawing, a page and a script for a shell are their only answers
    assert sorted(silent) == ["bench plot", "completion", "serve"]


def test_help_does_not_wait_for_torch():
    script = "import sys, sfumato.cli; print('torch' in sys.modules, 'numpy' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", "False"]


def test_a_run_killed_at_random_moments_ends_as_planned(image_folder, own_place):
    out = own_place / "run"
    steps = 60
    start = [
        "train", str(image_folder(train=40)), "--epsilon", "8", *SMALL, "--out", str(out),
        "--set", f"training.num_steps={steps}", "--set", "training.num_epochs=none",
        "--set", "training.batch_size=20", "--set", "performance.save_every_seconds=0.05",
    ]  # fmt: skip
    again = ["train", "--resume", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    dice, reached = random.Random(5), [0]
    for attempt in range(3):
        command = [sys.executable, "-m", "sfumato", *(again if out.exists() else start)]
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
            if attempt < 2:
                wait_for_progress(out, process, beyond=reached[-1])
                time.sleep(dice.uniform(0.0, 0.3))
                process.send_signal(signal.SIGKILL)
            process.wait()
        reached.append(steps_on_record(out))
    assert process.returncode == 0
    assert reached == sorted(reached)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    privacy = json.loads((out / "release/privacy.json").read_text())
    assert (privacy["num_steps"], privacy["epsilon"] <= 8) == (steps, True)


def steps_on_record(out):
    """Complete lines in the log; a killed run may hold some that its state does not count."""
    log = out / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def wait_for_progress(out, process, *, beyond):
    deadline = time.monotonic() + 60
    while steps_on_record(out) <= beyond and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def test_the_python_example_runs(own_place):
    example = ROOT / "examples/train_and_predict.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(
        [sys.executable, str(example), "2"], env=environment, capture_output=True, text=True, check=True
    )
    assert "with probability" in shown.stdout
    assert (own_place / "runs/example/report.html").exists()


@pytest.mark.parametrize("name", ["demo", "train", "evaluate", "predict", "report", "recipes"])
def test_every_command_and_option_of_a_run_is_documented(name):
    text = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    command = importlib.import_module(COMMANDS[name][0]).command
    assert f"sfumato {name}" in text
    for option in [item for parameter in command.params for item in parameter.opts]:
        assert (
            not option.startswith("--")
            or f"`{option}" in text
            or f"`{name} {option}" in text
            or option == "--json"
        )
