"""Whole runs on several ranks: the same model, the same guarantee, one folder, one account."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forked_ranks import forked, free_port
from sfumato.cli import main
from sfumato.data import DataSplits, ImageSet
from sfumato.data.generated import dead_leaves
from sfumato.ledger.ledger import Ledger
from sfumato.recipes.recipe import load_recipe, with_settings
from sfumato.run.session import train
from small_runs import SmallNet, small_recipe, small_splits

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def run(recipe, place, name, *, data, model=None, resume=False):
    """One rank's part of a run; a summary that JSON can hold."""
    with Ledger.open(place / "ledger.db") as ledger:
        result = train(recipe, out=place / name, data=data, ledger=ledger, model=model, resume=resume)
    return {
        "num_steps": result.num_steps,
        "epsilon": result.privacy["epsilon"],
        "scores": result.scores is not None,
        "weights": None
        if model is None
        else float(sum(value.detach().sum() for value in model.parameters())),
    }


def weights(folder):
    return load_file(folder / "release" / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """The same up to rounding: weights, guarantee, scores and what every step recorded."""
    expected, found = weights(one), weights(other)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    first, second = (json.loads((folder / "release" / "privacy.json").read_text()) for folder in (one, other))
    assert {**first, "filing": None} == {**second, "filing": None}
    for log in ("metrics.jsonl", "state/sensitive.jsonl"):
        lines = [
            [json.loads(line) for line in (each / log).read_text().splitlines()] for each in (one, other)
        ]
        assert len(lines[0]) == len(lines[1]) > 0
        for a, b in zip(*lines, strict=True):
            a.pop("units_per_second", None), b.pop("units_per_second", None)
            assert a == pytest.approx(b, rel=1e-5)


def test_a_seeded_run_is_the_same_on_1_2_and_4_ranks(tmp_path):
    data = small_splits(patients=40)
    settings = {"privacy__unit": "patient", "training__batch_size": 20, "training__kalman_gain": 0.7}
    recipe = small_recipe(training__seed=7, training__num_steps=4, augmentation__views=2, **settings)
    run(recipe, tmp_path, "alone", data=data)
    for size in (2, 4):
        name = f"ranks{size}"
        found = forked(size, lambda rank, name=name: run(recipe, tmp_path, name, data=data), tmp_path)
        assert [each["scores"] for each in found] == [True] + [False] * (size - 1)
        assert {each["epsilon"] for each in found} == {found[0]["epsilon"]}
        assert_same_run(tmp_path / "alone", tmp_path / f"ranks{size}")
        assert json.loads((tmp_path / f"ranks{size}" / "environment.json").read_text())["num_ranks"] == size
    other = small_recipe(training__seed=8, training__num_steps=4, augmentation__views=2, **settings)
    run(other, tmp_path, "other", data=data)
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "alone", tmp_path / "other")
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        (mark,) = ledger.datasets()
        assert len(ledger.records(mark)) == 4  # one account for each run, however many ranks it had


def test_fixed_features_are_shared_and_every_rank_has_the_released_network(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sfumato.features.cache._ROWS_AT_ONCE", 32)
    monkeypatch.setattr("sfumato.features.cache._ROWS_PER_PART", 32)
    images = dead_leaves(160, seed=1)
    whole = ImageSet(images, torch.arange(160) % 2, ("a", "b"), None, "leaves")
    data = DataSplits(train=whole.select(torch.arange(120)), test=whole.select(torch.arange(120, 160)))
    settings = {"model.options": {"num_layers": 1, "num_patches": 12, "num_directions": 40}}
    settings |= {"privacy.epsilon": 8.0, "training.seed": 0, "privacy.delta": 1e-3, "features.num_images": 80}
    recipe = with_settings(load_recipe("fast/patches"), {**settings, "training.num_steps": 3})
    found = forked(2, lambda rank: run(recipe, tmp_path, "ranks", data=data), tmp_path)
    assert found[0].get("num_steps") == 3, found
    assert len(list((tmp_path / "cache").rglob("*.npy"))) == 2  # of training and of test images
    assert not list((tmp_path / "cache").rglob("*.part"))
    run(recipe, tmp_path, "alone", data=data)
    assert_same_run(tmp_path / "alone", tmp_path / "ranks")


def test_a_network_of_ones_own_gets_the_released_weights_on_every_rank(tmp_path):
    data = small_splits()

    def work(rank):
        torch.manual_seed(rank)  # ranks begin apart: the first one's weights count
        return run(small_recipe(training__num_steps=2), tmp_path, "own", data=data, model=SmallNet())

    found = forked(2, work, tmp_path)
    assert found[1].get("num_steps") == 2, found
    released = float(sum(value.sum() for value in weights(tmp_path / "own").values()))
    assert [each["weights"] for each in found] == [pytest.approx(released, rel=1e-6)] * 2


def test_what_ranks_cannot_do_is_refused_on_all_of_them(tmp_path):
    data, other = small_splits(), small_splits(train=93)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()

    def work(rank):
        codes = []
        for recipe, name, splits in (
            (small_recipe(), "taken", data),
            (small_recipe(privacy__enabled=False, privacy__epsilon=None), "plain", data),
            (small_recipe(), "differ", other if rank else data),
        ):
            try:
                run(recipe, tmp_path, name, data=splits)
            except Exception as error:
                codes.append(error.code)
        return codes

    first, second = forked(2, work, tmp_path)
    assert first == ["run-exists", "not-over-ranks", "ranks-differ"]
    assert second == ["rank-failed", "rank-failed", "run-stopped"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["taken"]


@pytest.mark.parametrize("command", [["evaluate", "run"], ["demo"], ["train", "digits", "--dry-run"]])
def test_commands_that_ranks_do_not_share_are_refused(command, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    assert "[not-over-ranks]" in capsys.readouterr().err


def test_torchrun_trains_and_only_the_first_rank_speaks(tmp_path, image_folder):
    data = image_folder(train=12, test=4)
    settings = [
        "training.num_steps=2",
        "training.batch_size=8",
        "model.options.width=4",
        "privacy.delta=0.01",
    ]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *(f"--master-port={free_port()}", "-m", "sfumato", "train", str(data)),
            *("--recipe", "default/folder", "--epsilon", "8", "--out", str(tmp_path / "run"), "--json"),
            *(word for each in settings for word in ("--set", each)),
        ],
        env={**os.environ, "SFUMATO_LEDGER": str(tmp_path / "ledger.db")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    printed = json.loads(ended.stdout)  # one document: the other rank prints nothing
    assert printed["privacy"]["releasable"]
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["num_ranks"] == 2
