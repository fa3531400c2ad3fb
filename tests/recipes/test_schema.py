"""The schema that editors read says what the strict reader says."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import typing
from pathlib import Path

import jsonschema
import pytest

from sfumato.errors import ConfigError
from sfumato.recipes.recipe import Recipe, list_recipes, recipe_from_toml, recipe_text, recipe_to_toml
from sfumato.recipes.schema import recipe_schema
from sfumato.recipes.settings import without_none

STORED = Path(__file__).resolve().parents[2] / "docs" / "recipe.schema.json"
CHECK = jsonschema.Draft7Validator(recipe_schema())


def test_the_published_schema_is_the_current_one() -> None:
    assert json.loads(STORED.read_text(encoding="utf-8")) == recipe_schema(), (
        "run: sfumato recipes schema > docs/recipe.schema.json"
    )
    jsonschema.Draft7Validator.check_schema(recipe_schema())


@pytest.mark.parametrize("name", list_recipes())
def test_every_shipped_recipe_fits_the_schema(name: str) -> None:
    assert list(CHECK.iter_errors(tomllib.loads(recipe_text(name)))) == []


def test_a_recipe_written_in_full_fits_the_schema() -> None:
    assert list(CHECK.iter_errors(tomllib.loads(recipe_to_toml(Recipe())))) == []


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("[privacy]\nepsilon = 1", True),
        ("[privacy]\nepsilon = 0", False),
        ("[privacy]\ndelta = 1", False),
        ("[privacy]\nnoise_multiplyer = 1.0", False),
        ("[privacy]\nunit = 'patent'", False),
        ("[privacy]\nenabled = 1", False),
        ("[modle]\nname = 'resnet9'", False),
        ("[model]\noptions = { width = [1] }", False),
        ("[model]\noptions = { width = 16, activation = 'relu' }", True),
        ("[training]\nbatch_size = 2.5", False),
        ("[training]\nema_decay = 2", False),
        ("[training]\nnum_steps = 3\nnum_epochs = 2", False),
        ("[data]\nchannels = 5", False),
        ("[data]\nmean = ['a']", False),
        ("[reference]\nalso = [{ epsilon = 1, valu = 2 }]", False),
        ("[reference]\nalso = [{ epsilon = 1, value = 2 }]", True),
    ],
)
def test_schema_and_reader_agree(text: str, fits: bool) -> None:
    assert CHECK.is_valid(tomllib.loads(text)) is fits
    if fits:
        recipe_from_toml(text)
    else:
        with pytest.raises(ConfigError):
            recipe_from_toml(text)


def test_every_setting_has_its_meaning_and_its_default_there() -> None:
    sections = recipe_schema()["properties"]
    for name, kind in typing.get_type_hints(Recipe).items():
        assert sections[name]["description"]
        assert sections[name]["additionalProperties"] is False
        for item in dataclasses.fields(without_none(kind)):
            entry = sections[name]["properties"][item.name]
            assert entry["description"] == item.metadata["help"]
            if isinstance(item.default, bool | int | float | str):
                assert entry["default"] == item.default
