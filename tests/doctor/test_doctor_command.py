"""``sfumato doctor``: what it reports, and that it looks at the very model that a run would train."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from sfumato.cli import cli


def test_the_command_reports_and_fails_only_on_what_voids():
    sound = CliRunner().invoke(cli, ["doctor", "--data", "digits", "--json"])
    assert sound.exit_code == 0, sound.output
    assert json.loads(sound.stdout)["sound"] is True
    void = CliRunner().invoke(cli, ["doctor", "--model", "wrn_10_1", "--image-size", "8"])
    assert void.exit_code == 0
    assert "Nothing found" in void.output
    assert "Give --data" in CliRunner().invoke(cli, ["doctor"]).output


def test_the_command_fails_on_a_class_of_one(image_folder):
    folder = image_folder(train=3)
    (folder / "train" / "cat" / "p0-1.png").unlink()
    (folder / "train" / "cat" / "p1-2.png").unlink()
    result = CliRunner().invoke(cli, ["doctor", "--data", str(folder), "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["sound"] is False
    assert "class-of-one" in [finding["code"] for finding in found["findings"]]


@pytest.mark.parametrize(("norm", "sound"), [("groups = 4", True), ('norm = "batch"', False)])
def test_a_recipe_is_examined_with_the_model_that_it_builds(tmp_path, norm, sound):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[data]\nname = "digits"\n[model]\nname = "resnet9"\noptions = {{width = 8, {norm}}}\n'
        "[privacy]\nepsilon = 8.0\n[training]\nbatch_size = 64\nnum_steps = 4\nlearning_rate = 1.0\n"
    )
    result = CliRunner().invoke(cli, ["doctor", "--recipe", str(recipe), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    found = json.loads(result.stdout)
    assert found["sound"] is sound, found
    assert result.exit_code == (0 if sound else 1)
    assert ("mixes-examples" in [finding["code"] for finding in found["findings"]]) is not sound


def test_a_recipe_is_examined_with_its_channels_weights_and_trained_parts(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "sfumato.run.prepare.check_model",
        lambda model, images, **size: seen.append((model, images, size)) or [],
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[data]\nchannels = 1\nimage_size = 16\n[model]\nname = "resnet9"\noptions = {width = 8}\n'
        "[performance]\nmicrobatch_size = 48\n[privacy]\nepsilon = 8.0\n"
    )
    result = CliRunner().invoke(cli, ["doctor", "--recipe", str(recipe)])
    assert result.exit_code == 0, result.output
    (model, images, size) = seen[0]
    assert images.shape[1:] == (1, 16, 16)
    assert next(model.parameters()).shape[:2] == (8, 1)
    assert size == {"num_rows": 48}
    recipe.write_text(recipe.read_text().replace("width = 8}", 'width = 8}\ntrained = "last"'))
    refused = CliRunner().invoke(cli, ["doctor", "--recipe", str(recipe)])
    assert refused.exception.code == "nothing-to-fine-tune"  # as a run says: the layers to keep are random


def test_settings_reach_the_data_and_what_was_noticed_while_loading_is_shown(image_folder):
    folder = image_folder(train=4, grey=True)
    words = ["doctor", "--data", str(folder), "--unit", "image"]
    open_values = CliRunner().invoke(cli, words)
    assert "sensitive: all files are of 12x12 pixels and grey" in open_values.output
    (note,) = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)["notes"]
    assert "data.channels=1" in note
    fixed = ["--set", "data.channels=1", "--image-size", "12"]
    assert json.loads(CliRunner().invoke(cli, [*words, *fixed, "--json"]).stdout)["notes"] == []
    declared = CliRunner().invoke(cli, [*words, "--set", 'data.classes=["cat", "horse"]'])
    assert declared.exception is not None  # an image of a class that was not declared is refused, as by train


def test_without_data_the_declared_classes_and_channels_shape_the_model(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "sfumato.run.prepare.check_model", lambda model, images, **size: seen.append((model, images)) or []
    )
    settings = ["--set", "data.channels=1", "--set", 'data.classes=["a", "b", "c"]']
    result = CliRunner().invoke(cli, ["doctor", "--model", "wrn_10_1", "--image-size", "8", *settings])
    assert result.exit_code == 0, result.output
    ((model, images),) = seen
    assert images.shape[1:] == (1, 8, 8)
    assert model(images).shape[1] == 3
