"""Two stages in one recipe: public pre-training, then private training; resumable in both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from sfumato.data import load_data
from sfumato.data.generated import KINDS, DeadLeaves
from sfumato.data.generated_set import load_generated
from sfumato.errors import ConfigError, PrivacyError, RunError
from sfumato.recipes.recipe import recipe_to_toml, with_settings
from sfumato.run.prepare import prepare
from sfumato.run.session import train
from small_runs import SmallNet, Watcher, small_recipe, small_splits


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))


def two_stages(**changes):
    """Seven steps on digits as public images, then eight on the private ones."""
    stage = {"pretraining__data": "digits", "pretraining__num_epochs": 0.5, "pretraining__batch_size": 256}
    return small_recipe(**{**stage, **changes})


class SlowNotes(Watcher):
    """Also remembers which stage each step belongs to."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.stages = []

    def started(self, prepared, start_step):
        super().started(prepared, start_step)
        self.stages.append((prepared.splits.train.name, prepared.plan is not None, start_step))


def test_the_second_stage_begins_with_the_weights_of_the_first(tmp_path):
    watcher = SlowNotes()
    recipe = two_stages(model__trained="last")
    result = train(recipe, out=tmp_path / "run", data=small_splits(), observer=watcher)
    assert watcher.stages == [("digits", False, 0), ("shades", True, 0)]
    first = load_file(tmp_path / "run/pretraining/release/model.safetensors")
    second = load_file(tmp_path / "run/release/model.safetensors")
    changed = {name for name in first if first[name].shape != second[name].shape}
    assert changed == {"head.weight", "head.bias"}
    assert all(torch.equal(first[name], second[name]) for name in set(first) - changed)
    assert "weights trained on digits, which are taken to be public" in result.privacy["statement"]
    assert result.privacy["weights_from"] == {"data": "digits", "public": True, "unprotected": ["digits"]}
    assert (
        "NO PRIVACY"
        in json.loads((tmp_path / "run/pretraining/release/privacy.json").read_text())["statement"]
    )
    assert (tmp_path / "run/pretraining/metrics.jsonl").read_text().count("\n") == 7


def test_a_run_broken_off_in_either_stage_goes_on_there_and_ends_the_same(tmp_path):
    recipe = two_stages(training__seed=5)
    train(recipe, out=tmp_path / "whole", data=small_splits())
    broken = tmp_path / "broken"
    for crash_after, stage, error in ((4, 1, KeyboardInterrupt), (5, 2, RuntimeError)):
        watcher = CrashInStage(stage, crash_after=crash_after, error=error)
        with pytest.raises(error):
            train(recipe, out=broken, data=small_splits(), observer=watcher, resume=stage == 2)
    assert not (broken / "release").exists()
    assert (broken / "pretraining/release").is_dir()
    train(recipe, out=broken, data=small_splits(), resume=True)
    for name in ("release", "pretraining/release"):
        ended, expected = (
            load_file(place / name / "model.safetensors") for place in (broken, tmp_path / "whole")
        )
        assert all(torch.equal(ended[key], expected[key]) for key in expected)


class CrashInStage(SlowNotes):
    """Breaks the run off in one of its stages only."""

    def __init__(self, stage, **settings):
        super().__init__(**settings)
        self.stage = stage

    def stepped(self, record, epsilon):
        if (epsilon is None) == (self.stage == 1):
            super().stepped(record, epsilon)


def test_killed_in_each_stage_the_command_goes_on(tmp_path, image_folder):
    data = image_folder(train=40, size=12, grey=True)
    recipe = with_settings(
        two_stages(pretraining__num_epochs=4.0, training__num_steps=40, training__batch_size=16),
        {"data.name": str(data), "data.image_size": 12, "data.channels": 1, "privacy.delta": 1e-2},
    )
    (tmp_path / "two.toml").write_text(recipe_to_toml(recipe))
    out = tmp_path / "run"
    start = ["train", "--recipe", str(tmp_path / "two.toml"), "--out", str(out)]
    logs = (out / "pretraining/metrics.jsonl", out / "metrics.jsonl")
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
    for log in logs:
        arguments = ["train", "--resume", "--out", str(out)] if out.exists() else start
        command = [sys.executable, "-m", "sfumato", *arguments]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=surroundings) as process:
            deadline = time.monotonic() + 120
            while not (log.exists() and log.read_text().count("\n") > 3) and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert process.returncode == -signal.SIGKILL
    assert train(recipe, out=out, resume=True).num_steps == 40
    for log, steps in zip(logs, (60, 40), strict=True):
        assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == list(
            range(1, steps + 1)
        )


def test_public_images_that_are_private_too_are_refused(tmp_path):
    digits = load_data("digits")
    recipe = two_stages(data__name="digits", privacy__delta=1e-4)
    with pytest.raises(PrivacyError, match="3,823 of the 3,823") as caught:
        train(recipe, out=tmp_path / "run", data=digits)
    assert caught.value.code == "weights-saw-these-images"
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError) as caught:
        prepare(with_settings(recipe, {"pretraining.data": None}), data=digits)
    assert caught.value.code == "no-pretraining-data"


def test_a_finished_first_stage_serves_other_budgets_but_not_other_settings(tmp_path):
    train(two_stages(), out=tmp_path / "one", data=small_splits())
    again = two_stages(model__weights=str(tmp_path / "one/pretraining"), privacy__epsilon=2.0)
    watcher = SlowNotes()
    train(again, out=tmp_path / "two", data=small_splits(), observer=watcher)
    assert watcher.stages == [("shades", True, 0)]
    assert not (tmp_path / "two/pretraining").exists()
    for changes in ({"pretraining.num_epochs": 2.0}, {"model.weights": str(tmp_path / "one")}):
        with pytest.raises(ConfigError) as caught:
            prepare(with_settings(again, changes), data=small_splits())
        assert caught.value.code == "other-pretraining"


def test_a_first_stage_killed_while_its_folder_was_made_is_begun_anew(tmp_path):
    with pytest.raises(RuntimeError):
        train(
            two_stages(), out=tmp_path / "run", data=small_splits(), observer=CrashInStage(1, crash_after=1)
        )
    (tmp_path / "run/pretraining/recipe.toml").unlink()
    result = train(two_stages(), out=tmp_path / "run", data=small_splits(), resume=True)
    assert result.num_steps == 8


def test_another_first_stage_is_not_resumed(tmp_path):
    watcher = CrashInStage(1, crash_after=4)
    with pytest.raises(RuntimeError):
        train(two_stages(), out=tmp_path / "run", data=small_splits(), observer=watcher)
    with pytest.raises(RunError) as caught:
        train(two_stages(pretraining__seed=1), out=tmp_path / "run", data=small_splits(), resume=True)
    assert caught.value.code == "changed-recipe"


def test_generated_images_are_a_data_set_that_is_drawn_once(tmp_path):
    splits = load_generated(image_size=8, channels=1, num_train=144, num_test=72)
    again = load_generated(image_size=8, channels=1, num_train=144, num_test=72)
    assert splits.train.images.shape == (144, 1, 8, 8)
    assert splits.train.classes == KINDS
    assert torch.bincount(splits.train.labels).tolist() == [2] * len(KINDS)
    assert splits.train.fingerprint == again.train.fingerprint != splits.test.fingerprint
    assert torch.equal(splits.train.images, again.train.images)
    assert len(list((tmp_path / "cache").glob("generated-*"))) == 2


def test_an_images_statistics_tell_how_it_was_drawn_and_shuffled_labels_do_not():
    """A nearest class mean on a few statistics of the image finds its size and its direction."""
    labels = torch.arange(8 * len(KINDS)) % len(KINDS)
    images = DeadLeaves(channels=1).images_of(labels, seed=3).float()[:, 0]
    right, down = images.diff(dim=2).abs().mean((1, 2)), images.diff(dim=1).abs().mean((1, 2))
    words = [KINDS[label].split("-") for label in labels.tolist()]

    def advantage(score, position, high, low):
        pick = [torch.tensor([word[position] == name for word in words]) for name in (high, low)]
        a, b = score[pick[0]], score[pick[1]]
        return (a[:, None] > b[None]).float().mean().item()

    assert advantage(right / down, 2, "upright", "level") > 0.7
    assert advantage(right + down, 3, "rough", "smooth") > 0.7
    assert 0.4 < advantage((right + down)[torch.randperm(len(labels))], 3, "rough", "smooth") < 0.6


def test_mirrored_images_keep_their_kind():
    labels = torch.full((64,), KINDS.index("rectangles-mixed-diagonal-smooth"))
    images = DeadLeaves(channels=1, texture=0.0).images_of(labels, seed=1).float()[:, 0]
    falling = (images[:, 1:, 1:] - images[:, :-1, :-1]).abs().mean()
    rising = (images[:, 1:, :-1] - images[:, :-1, 1:]).abs().mean()
    assert 0.9 < falling / rising < 1.1


def test_a_network_of_ones_own_has_no_first_stage():
    model = SmallNet()
    with pytest.raises(ConfigError) as caught:
        prepare(two_stages(), data=small_splits(), model=model)
    assert caught.value.code == "own-model-two-stages"
    assert prepare(small_recipe(), data=small_splits(), model=model).model is model
