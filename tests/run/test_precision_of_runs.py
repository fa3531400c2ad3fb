"""A run in bfloat16: where that is slow it says so, is timed as it is, and goes on as it was asked to."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from sfumato.cli import cli
from sfumato.data import DataSplits
from sfumato.recipes.recipe import load_recipe, with_settings
from sfumato.run import estimate as estimates
from sfumato.run.prepare import prepare
from sfumato.run.session import train
from small_runs import Watcher, small_recipe, small_set, small_splits

IN_BFLOAT16 = {"performance__precision": "bfloat16"}
SLOW = "slow-bfloat16"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))


def codes(prepared) -> list[str]:
    return [finding.code for finding in prepared.findings]


@pytest.mark.parametrize("bfloat16", [True, False])
def test_only_a_slow_run_is_told_and_nothing_else_of_it_changes(bfloat16, processor):
    processor(bfloat16=bfloat16)
    asked = prepare(small_recipe(**IN_BFLOAT16), data=small_splits())
    plain = prepare(small_recipe(), data=small_splits())
    assert (SLOW in codes(asked)) is not bfloat16
    assert SLOW not in codes(plain)
    assert asked.in_bfloat16  # whatever it takes
    assert (asked.plan, asked.resolved.document()) == (plain.plan, plain.resolved.document())


def test_a_run_without_passes_in_bfloat16_is_told_nothing(processor):
    processor(bfloat16=False)
    without = small_recipe(**IN_BFLOAT16, privacy__enabled=False, privacy__epsilon=None, privacy__delta=None)
    assert not prepare(without, data=small_splits()).in_bfloat16
    settings = {"model.options": {"num_layers": 1, "num_patches": 8, "num_directions": 20, "image_size": 8}}
    settings |= {"privacy.epsilon": 8.0, "privacy.delta": 1e-3, "features.num_images": 50}
    settings |= {"performance.precision": "bfloat16"}
    recipe = with_settings(load_recipe("fast/patches"), settings)
    rows = DataSplits(train=small_set(60, seed=1), test=small_set(20, seed=2))
    in_closed_form = prepare(recipe, data=rows, rows=False)
    assert SLOW not in codes(in_closed_form)
    patients = DataSplits(train=small_set(60, seed=1, patients=20), test=None)
    by_engine = prepare(with_settings(recipe, {"privacy.unit": "patient"}), data=patients, rows=False)
    assert SLOW in codes(by_engine)  # the control


def test_a_run_goes_on_where_bfloat16_is_slow(tmp_path, processor):
    splits, recipe = small_splits(), small_recipe(**IN_BFLOAT16)
    processor(bfloat16=True)
    with pytest.raises(RuntimeError, match="as if killed"):
        train(recipe, out=tmp_path / "run", data=splits, observer=Watcher(crash_after=3))
    begun = json.loads((tmp_path / "run" / "resolved.json").read_text())
    processor(bfloat16=False)
    result = train(recipe, out=tmp_path / "run", data=splits, resume=True)
    assert result.num_steps == 8
    assert json.loads((tmp_path / "run" / "resolved.json").read_text()) == begun
    assert (result.privacy["epsilon"], result.privacy["noise_multiplier"]) == stated(recipe, splits)
    assert (result.privacy["epsilon"], result.privacy["noise_multiplier"]) != stated(
        small_recipe(privacy__epsilon=4.0), splits
    )


def stated(recipe, splits) -> tuple[float, float]:
    """ε and σ of the recipe's plan, whatever the processor."""
    plan = prepare(recipe, data=splits).plan
    return plan.epsilon, plan.noise_multiplier


@pytest.mark.parametrize(
    ("changes", "bfloat16", "in_bfloat16", "few"),
    [(IN_BFLOAT16, True, True, False), (IN_BFLOAT16, False, True, True), ({}, False, False, False)],
)
def test_an_estimate_is_of_the_precision_that_the_run_has(
    changes, bfloat16, in_bfloat16, few, processor, monkeypatch
):
    processor(bfloat16=bfloat16)
    seen, real = [], estimates.clipped_total

    def spy(model, microbatches, **options):
        seen.append((torch.is_autocast_enabled("cpu"), len(microbatches[0].inputs)))
        return real(model, microbatches, **options)

    monkeypatch.setattr(estimates, "clipped_total", spy)
    prepared = prepare(small_recipe(**changes), data=small_splits())
    found = estimates.estimate(prepared)
    assert {low for low, _ in seen} == {in_bfloat16}
    assert {rows < found.microbatch_size for _, rows in seen} == {few}  # minutes would be waited for
    assert found.microbatch_size == found.rows_per_step == 32
    assert found.seconds_per_step > 0


@pytest.mark.parametrize("bfloat16", [True, False])
def test_the_commands_say_it_in_one_line(bfloat16, image_folder, processor):
    processor(bfloat16=bfloat16)
    asked = ["--set", "performance.precision=bfloat16", "--set", "model.options={width=4,groups=2}"]
    recipe = ["--recipe", "default/folder", "--set", "data.image_size=12", *asked]
    planned = CliRunner().invoke(
        cli, ["train", str(image_folder(train=12)), *recipe, "--epsilon", "3", "--dry-run"]
    )
    assert planned.exit_code == 0, planned.output
    examined = CliRunner().invoke(cli, ["doctor", "--model", "resnet9", "--image-size", "12", *asked])
    assert examined.exit_code == 0, examined.output
    for result in (planned, examined):
        lines = [line for line in result.output.splitlines() if "slower than float32" in line]
        assert len(lines) == (0 if bfloat16 else 1)
        assert all(line.startswith("note") for line in lines)
