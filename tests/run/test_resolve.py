"""A run is resolved once: one complete set of public values, kept beside the recipe and equal on resume."""

from __future__ import annotations

import dataclasses
import json

import pytest
from click.testing import CliRunner

from sfumato.cli import cli
from sfumato.errors import ConfigError, RunError
from sfumato.recipes.recipe import recipe_to_toml
from sfumato.release.run_folder import RunFolder
from sfumato.reporting.records import read_run
from sfumato.run import planning
from sfumato.run.prepare import prepare
from sfumato.run.provenance import find_provenance
from sfumato.run.resolve import resolve
from sfumato.run.session import train
from sfumato.training import components
from small_runs import Watcher, small_recipe, small_splits


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))


def open_recipe(**changes):
    """A recipe that leaves open whatever it may."""
    absent = {"privacy__delta": None, "training__batch_size": None, "training__learning_rate": None}
    return small_recipe(**absent | changes)


def break_off(folder, recipe):
    with pytest.raises(RuntimeError, match="as if killed"):
        train(recipe, out=folder, data=small_splits(), observer=Watcher(crash_after=3))


def test_nothing_is_left_open(tmp_path):
    train(open_recipe(), out=tmp_path / "run", data=small_splits())
    resolved = json.loads((tmp_path / "run/resolved.json").read_text())
    assert resolved == resolve(open_recipe(), small_splits())[0].document()
    assert resolved.pop("sampling_rate") == 12 / 96
    assert resolved.pop("noise_multiplier") > 0
    assert resolved == {
        "data": "shades",
        "classes": ["dark", "middle", "bright"],
        "image_size": 8,
        "channels": 1,
        "mean": [0.5],
        "std": [0.25],
        "model": {"name": "scale_resnet9", "options": {"width": 4, "groups": 2}},
        "features": None,
        "unit": "image",
        "num_units": 96,
        "delta": 0.001,
        "batch_size": 12.0,
        "num_steps": 8,
        "learning_rate": 1.0,
        "evaluate_every": 1,
        "microbatch_size": None,
        "loss": "cross-entropy",
        "task": "single-label",
    }


def test_delta_and_optimizer_are_decided_once(monkeypatch):
    asked, built = [], []
    default, build = planning.default_delta, components.build_optimizer
    monkeypatch.setattr(planning, "default_delta", lambda units: asked.append(units) or default(units))
    monkeypatch.setattr(
        components, "build_optimizer", lambda *args, **options: built.append(1) or build(*args, **options)
    )
    prepared = prepare(open_recipe(), data=small_splits())
    assert (asked, built) == ([96], [1])
    assert prepared.plan.delta == prepared.recipe.privacy.delta == 0.001


@pytest.mark.parametrize(
    ("key", "value"), [("learning_rate", 0.5), ("mean", [0.4]), ("evaluate_every", 3), ("later", 1)]
)
def test_a_run_goes_on_with_the_values_that_it_began_with_or_not_at_all(tmp_path, key, value):
    recipe, folder = open_recipe(), RunFolder(tmp_path / "run")
    break_off(folder.path, recipe)
    stored = json.loads(folder.resolved.read_text())
    folder.resolved.write_text(json.dumps({**stored, key: value}))
    with pytest.raises(RunError, match=f"{key} was .*, now ") as caught:
        train(recipe, out=folder.path, data=small_splits(), resume=True)
    assert caught.value.code == "changed-values"
    faster = dataclasses.replace(
        recipe, performance=dataclasses.replace(recipe.performance, microbatch_size=9)
    )
    folder.resolved.write_text(json.dumps(stored))
    assert train(faster, out=folder.path, data=small_splits(), resume=True).num_steps == 8  # the control


@pytest.mark.parametrize("text", [None, "{}", '{"data": 1}', "[" * 9000])
def test_a_begun_run_without_its_values_is_refused(tmp_path, text):
    folder = RunFolder(tmp_path / "run")
    break_off(folder.path, open_recipe())
    folder.resolved.unlink() if text is None else folder.resolved.write_text(text)
    with pytest.raises(RunError) as caught:
        train(open_recipe(), out=folder.path, data=small_splits(), resume=True)
    assert caught.value.code == "damaged-run"


def test_the_report_shows_the_rate_that_was_resolved(tmp_path):
    folder = RunFolder(tmp_path / "run")
    train(open_recipe(), out=folder.path, data=small_splits())
    assert read_run(folder.path).learning_rate == "1"
    folder.resolved.write_text(
        folder.resolved.read_text().replace('"learning_rate": 1.0', '"learning_rate": 7')
    )
    assert read_run(folder.path).learning_rate == "7"
    folder.resolved.write_text("{}")
    with pytest.raises(RunError) as caught:
        read_run(folder.path)
    assert caught.value.code == "damaged-run"
    folder.resolved.unlink()  # as earlier versions left it: the recipe names no rate
    assert read_run(folder.path).learning_rate == "-"


def test_a_first_stage_is_known_before_it_is_trained(tmp_path):
    """What its weights will say of themselves decides constants and statement, so it is not asked twice."""
    stage = {"pretraining__data": "digits", "pretraining__num_epochs": 0.1}
    recipe = open_recipe(**stage)
    before, nothing = resolve(recipe, small_splits())
    train(recipe, out=tmp_path / "run", data=small_splits())
    after, checkpoint = resolve(recipe, small_splits(), pretrained=tmp_path / "run/pretraining/release")
    assert (nothing, checkpoint is None) == (None, False)
    assert before == after
    assert before.document() == json.loads((tmp_path / "run/resolved.json").read_text())
    assert resolve(open_recipe(), small_splits())[0].provenance is None  # the control


def test_two_stages_are_prepared_once_each(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "sfumato.run.resolve.find_provenance",
        lambda recipe, *args, **options: (
            calls.append(recipe.data.name) or find_provenance(recipe, *args, **options)
        ),
    )
    recipe = open_recipe(pretraining__data="digits", pretraining__num_epochs=0.1)
    train(recipe, out=tmp_path / "run", data=small_splits())
    assert calls == ["shades", "digits"]


def test_a_dry_run_says_what_the_run_would_resolve(tmp_path):
    recipe = open_recipe(data__name="digits")
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(recipe))
    command = ["train", "--recipe", str(tmp_path / "recipe.toml"), "--dry-run", "--json"]
    shown = CliRunner().invoke(cli, [*command, "--out", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["resolved"] == prepare(recipe).resolved.document()


def test_a_step_schedule_that_never_rests_is_refused():
    with pytest.raises(ConfigError) as caught:
        resolve(small_recipe(schedule__name="step", schedule__every_epochs=0.0), small_splits())
    assert caught.value.code == "bad-value"
