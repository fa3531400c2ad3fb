"""Recipes: strict, complete, and equal to the papers' tables."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from pathlib import Path

import numpy as np
import pytest

from sfumato.accounting import check_budget
from sfumato.errors import ConfigError
from sfumato.privacy.plan import Plan
from sfumato.recipes.recipe import (
    Recipe,
    differences,
    list_recipes,
    load_recipe,
    parse_assignment,
    recipe_from_toml,
    recipe_to_toml,
    with_settings,
)
from sfumato.recipes.settings import without_none
from sfumato.run.planning import build_plan

DOCS = Path(__file__).resolve().parents[2] / "docs"

# De et al. 2022, tables 13 and 14: (epsilon, learning rate, noise multiplier, updates)
TABLE_13 = [
    (1, 2, 10, 875),
    (2, 2, 6, 1125),
    (3, 2, 5, 1593),
    (4, 2, 4, 1687),
    (6, 4, 3, 1843),
    (8, 4, 3, 2468),
]
TABLE_14 = [
    (1, 2, 40, 906),
    (2, 2, 24, 1156),
    (3, 2, 20, 1656),
    (4, 2, 16, 1765),
    (6, 4, 12, 2007),
    (8, 4, 9.4, 2000),
]


@pytest.mark.parametrize("name", list_recipes())
def test_every_shipped_recipe_is_sound(name):
    recipe = load_recipe(name)
    assert recipe_from_toml(recipe_to_toml(recipe)) == recipe
    if recipe.privacy.epsilon is not None and "-eps" in name:
        assert recipe.privacy.epsilon == float(name.rpartition("-eps")[2])


@pytest.mark.parametrize("row", TABLE_13)
def test_table_13_is_reproduced_with_its_epsilon(row):
    epsilon, rate, noise, steps = row
    recipe = load_recipe(f"de2022/cifar10-wrn16-4-eps{epsilon}")
    assert (recipe.training.learning_rate, recipe.privacy.noise_multiplier) == (rate, noise)
    assert (recipe.training.num_steps, recipe.training.batch_size) == (steps, 4096)
    assert (recipe.model.name, recipe.augmentation.views, recipe.training.ema_decay) == (
        "wrn_16_4",
        16,
        0.9999,
    )
    num_units = 45_000 if epsilon == 8 else 50_000  # the row at 8 was computed for the training split
    assert build_plan(recipe, num_units=num_units).epsilon == pytest.approx(epsilon, rel=0.02)
    assert build_plan(recipe, num_units=40_000).epsilon != pytest.approx(epsilon, rel=0.02)


@pytest.mark.parametrize("row", TABLE_14)
def test_table_14_is_reproduced_with_its_epsilon(row):
    epsilon, rate, noise, steps = row
    recipe = load_recipe(f"de2022/cifar10-wrn40-4-eps{epsilon}")
    assert (recipe.training.learning_rate, recipe.privacy.noise_multiplier) == (rate, noise)
    assert (recipe.training.num_steps, recipe.training.batch_size) == (steps, 16384)
    assert (recipe.model.name, recipe.augmentation.views) == ("wrn_40_4", 32)
    assert build_plan(recipe, num_units=50_000).epsilon == pytest.approx(epsilon, rel=0.02)


def test_a_misspelt_key_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="Did you mean noise_multiplier") as caught:
        recipe_from_toml("[privacy]\nnoise_multiplyer = 1.0", origin="my.toml")
    assert caught.value.code == "unknown-key"
    assert "my.toml: privacy.noise_multiplyer" in str(caught.value)
    recipe_from_toml("[privacy]\nnoise_multiplier = 1.0")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[privacy\n", "bad-toml"),
        ("[privacy]\nunit = 'patent'", "bad-value"),
        ("[privacy]\nepsilon = 'one'", "bad-value"),
        ("[privacy]\nepsilon = true", "bad-value"),
        ("[privacy]\nepsilon = inf", "epsilon-out-of-range"),
        ("[privacy]\nepsilon = nan", "epsilon-out-of-range"),
        ("[privacy]\nepsilon = 0", "epsilon-out-of-range"),
        ("[privacy]\nepsilon = -1", "epsilon-out-of-range"),
        ("[privacy]\ndelta = 1", "delta-out-of-range"),
        ("[privacy]\nnoise_multiplier = 0", "bad-value"),
        ("[privacy]\nclip_norm = -1", "bad-value"),
        ("[training]\nbatch_size = 2.5", "bad-value"),
        ("[training]\nbatch_size = 0", "bad-value"),
        ("[training]\nlearning_rate = -1", "bad-value"),
        ("[data]\nmean = ['a']", "bad-value"),
        ("[data]\nname = 2026-11-17", "bad-value"),
        ("[data]\nval_is_public = 1", "bad-value"),
        ("[training]\nbatch_size = true", "bad-value"),
        ("[training]\nbatch_size = 1" + "0" * 30, "bad-value"),
        ("[training]\nlearning_rate = inf", "bad-value"),
        ("[training]\nlearning_rate = nan", "bad-value"),
        ("[training]\nnum_epochs = 1" + "0" * 400, "bad-value"),
        ("[training]\nnum_epochs = 1" + "0" * 5000, "bad-toml"),
        ("[privacy]\nepsilon = 1" + "0" * 400, "bad-value"),
        ("[features]\nmean_noise_multiplier = 1e-9", "bad-value"),
        ("[model]\noptions = { width = [3] }", "bad-value"),
        ("[reference]\nvalue = 101", "bad-value"),
        ("[reference]\nvalu = 50", "unknown-key"),
        ("[reference]\nours = [{ data = 'x', epsilon = 1, median = 5, n = 0, minutes = 1 }]", "bad-value"),
        ("[model]\noptions = 3", "bad-value"),
        ("[modle]\nname = 'resnet9'", "unknown-key"),
        ("privacy = 3", "bad-value"),
        ("[training]\nnum_steps = 3\nnum_epochs = 2", "steps-and-epochs"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, code):
    with pytest.raises(ConfigError) as caught:
        recipe_from_toml(text)
    assert caught.value.code == code


@pytest.mark.parametrize("epsilon", [math.nan, math.inf, 0.0, -1.0])
def test_an_impossible_budget_is_called_the_same_everywhere(epsilon):
    known = {"delta": 1e-5, "num_examples": 1000, "batch_size": 100, "num_steps": 10}
    complaints = []
    for ask in (
        lambda: recipe_from_toml(f"[privacy]\nepsilon = {epsilon}"),
        lambda: with_settings(Recipe(), {"privacy.epsilon": epsilon}),
        lambda: Plan.calibrate(epsilon=epsilon, **known),
        lambda: check_budget(epsilon),
    ):
        with pytest.raises(ConfigError) as caught:
            ask()
        complaints.append(str(caught.value))
    assert len(set(complaints)) == 1
    with pytest.raises(ConfigError, match=r"my.toml: epsilon is"):
        recipe_from_toml(f"[privacy]\nepsilon = {epsilon}", origin="my.toml")
    recipe_from_toml("[privacy]\nepsilon = 0.1")


def test_a_value_out_of_range_is_told_the_range():
    for text, words in (
        ("[privacy]\nclip_norm = 0", "not a finite number: above 0"),
        ("[training]\nema_decay = 2", "not a finite number: 0 or more and at most 1"),
        ("[data]\nmean = [nan]", "not a list of finite numbers"),
        ("[data]\nholdout = inf", "holdout = inf is not a finite number: 0 or more and at most 0.9"),
        ("[training]\nbatch_size = 2.5", "batch_size = 2.5 is not a whole number"),
        ("[training]\nbatch_size = 0", "batch_size = 0 is not a finite number: 1 or more"),
        ("[privacy]\nunit = 'patent'", "'patent' is not one of image, patient. Did you mean patient?"),
        ("[privacy]\nenabled = 'no'", "'no' is not true or false"),
        ("[reference]\nalso = [{ epsilon = 1, valu = 3 }]", "unknown field `valu`"),
    ):
        with pytest.raises(ConfigError, match=words):
            recipe_from_toml(text)


def test_an_assignment_keeps_its_type_and_none_removes():
    assert parse_assignment("training.batch_size=512") == ("training.batch_size", 512)
    assert parse_assignment("privacy.epsilon=1e-1") == ("privacy.epsilon", 0.1)
    assert parse_assignment("model.name=wrn_16_4") == ("model.name", "wrn_16_4")
    assert parse_assignment("data.mean=[0.5, 0.5]") == ("data.mean", [0.5, 0.5])
    assert parse_assignment("privacy.noise_multiplier=none") == ("privacy.noise_multiplier", None)
    for text in ("training.batch_size", "batch_size=3"):
        with pytest.raises(ConfigError) as caught:
            parse_assignment(text)
        assert caught.value.code == "bad-assignment"


def test_settings_are_replaced_and_the_rest_is_kept():
    before = load_recipe("demo/digits")
    after = with_settings(before, {"model.options.width": 16, "privacy.epsilon": None, "training.seed": 3})
    assert after.model.options == {"width": 16, "groups": 4}
    assert after.privacy.epsilon is None
    assert after.training == dataclasses.replace(before.training, seed=3)
    with pytest.raises(ConfigError, match="epsilon"):
        with_settings(before, {"privacy.epsilom": None})


def test_numbers_of_numpy_are_numbers():
    settings = {"training.learning_rate": np.float64(0.5), "data.mean": (np.float64(0.25),)}
    recipe = with_settings(Recipe(), settings | {"model.options": {"width": np.float64(2)}})
    assert type(recipe.training.learning_rate) is float
    assert (recipe.data.mean, recipe.model.options) == ((0.25,), {"width": 2.0})
    assert recipe_from_toml(recipe_to_toml(recipe)) == recipe
    with pytest.raises(ConfigError):
        with_settings(Recipe(), {"training.learning_rate": np.float64("nan")})


def test_differences_name_changed_keys_but_not_what_cannot_change_a_run():
    before = load_recipe("demo/digits")
    harmless = {"performance.microbatch_size": 16, "reference.value": 1.0}
    after = with_settings(before, {"privacy.clip_norm": 2.0, **harmless})
    assert differences(before, after) == {"privacy.clip_norm": (1.0, 2.0)}
    assert differences(before, with_settings(before, harmless)) == {}
    assert differences(before, dataclasses.replace(before, reference=None)) == {}


@pytest.mark.parametrize(
    "word",
    [
        'quote " and \\ backslash',
        "newline\nand\ttab",
        "ümlaut δ",
        "\x7f",
        "\u2028 \x85",
        "[data]\nseed = 3 # ",
    ],
)
def test_strings_survive_the_round_trip(word):
    recipe = with_settings(Recipe(), {"data.name": word, "model.options": {"odd key": word}})
    assert recipe_from_toml(recipe_to_toml(recipe)) == recipe


def test_a_recipe_that_is_not_there_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="de2022/cifar10-wrn16-4-eps8"):
        load_recipe("de2022/cifar10-wrn16-4-eps9")
    with pytest.raises(ConfigError) as caught:
        load_recipe("nowhere/mine.toml")
    assert caught.value.code == "no-recipe"


def test_every_setting_is_documented_with_its_meaning():
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    for section, kind in typing.get_type_hints(Recipe).items():
        assert f"### [{section}]" in text
        for item in dataclasses.fields(without_none(kind)):
            line = rf"^\| `{item.name}` \| [^|]+ \| {re.escape(item.metadata['help'])} \|$"
            assert re.search(line, text, re.MULTILINE), f"{section}.{item.name} is not in docs/recipes.md"
