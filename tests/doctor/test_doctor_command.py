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
    assert size["num_rows"] == 48
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


def examined(*words: object) -> dict:
    result = CliRunner().invoke(cli, ["doctor", *map(str, words), "--json"])
    return json.loads(result.stdout)


def codes(report: dict) -> set[str]:
    return {finding["code"] for finding in report["findings"]}


def test_the_cure_of_a_class_of_one_cures_it(image_folder):
    folder = image_folder(train=1)
    words = ("--data", folder, "--unit", "image")
    report = examined(*words)
    assert "class-of-one" in codes(report)
    (cure,) = {finding["cure"] for finding in report["findings"] if finding["code"] == "class-of-one"}
    assert "classes.txt in the data's folder, one name a line" in cure
    (folder / "classes.txt").write_text("cat\ndog\n")
    assert examined(*words)["sound"]
    wrong = CliRunner().invoke(cli, ["doctor", *map(str, words), "--set", "data.classes=cat,dog"])
    assert 'such as ["a", "b"]' in wrong.exception.what  # how such a list is written


def test_the_summary_shows_splits_classes_patients_sizes_bits_and_ten_examples(image_folder):
    folder = image_folder(train=12, test=4)
    words = ("--data", folder, "--unit", "patient", "--patient-from", r"/(p\d+)-")
    summary = examined(*words)["summary"]
    assert summary["sensitive"] is True
    assert summary["images"] == {"train": {"cat": 12, "dog": 12}, "test": {"cat": 4, "dog": 4}}
    people = {"num_patients": 6, "fewest_images": 4, "median_images": 4, "most_images": 4}
    assert summary["patients"] == people
    assert (summary["sizes"], summary["bits"]) == ({"12x12": 32}, {"8": 32})
    assert len(summary["examples"]) == 10
    assert {"file": "train/cat/p0-0.png", "patient": "p0"} in summary["examples"]
    lines = CliRunner().invoke(cli, ["doctor", *map(str, words)]).stdout.splitlines()
    assert lines[0] == "Data       sensitive: of the private images, keep it local"
    assert lines[2].split() == ["cat", "12", "4"]
    assert "  train/cat/p0-0.png → p0" in lines
    assert examined("--data", "digits")["summary"]["examples"] == []


def test_an_expression_that_marks_whole_file_names_is_warned_of(image_folder):
    folder = image_folder(train=4)
    for path in sorted((folder / "train" / "dog").iterdir()):
        path.rename(path.with_name(f"other-{path.name}"))
    words = ("--data", folder, "--unit", "patient", "--patient-from")
    assert "patient-per-image" in codes(examined(*words, r"([^/]+)\.png"))
    assert "one-patient" in codes(examined(*words, "train"))
    assert not {"patient-per-image", "one-patient"} & codes(examined(*words, r"/((?:other-)?p\d+)-"))


def test_tiny_and_unequal_classes_are_noted(image_folder):
    folder = image_folder(train=50)
    assert not {"few-images", "class-imbalance"} & codes(examined("--data", folder))
    for path in sorted((folder / "train" / "dog").iterdir())[2:]:
        path.unlink()
    found = {finding["code"]: finding["sensitive"] for finding in examined("--data", folder)["findings"]}
    assert found["few-images"]
    assert found["class-imbalance"]
    assert not found["public-class-names"]  # public, as it says itself
    assert "few-images (sensitive):" in CliRunner().invoke(cli, ["doctor", "--data", str(folder)]).stdout


def test_a_patient_that_the_manifest_names_is_shown_as_a_number(image_folder):
    folder = image_folder(train=2)
    files = sorted((folder / "train").rglob("*.png"))
    rows = [f"{path.relative_to(folder).as_posix()},{path.parent.name},Jane Doe" for path in files]
    (folder / "manifest.csv").write_text("\n".join(["path,label,patient", *rows]))
    result = CliRunner().invoke(cli, ["doctor", "--data", str(folder), "--unit", "patient"])
    assert "→ patient 1" in result.stdout
    assert "jane doe" not in result.stdout.lower()
