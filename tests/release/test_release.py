"""The release folder: usable alone, and refused when anything in it does not fit."""

from __future__ import annotations

import json
import re
import shutil
import time

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file

import sfumato
from sfumato.accounting import SampledGaussian
from sfumato.cli import cli
from sfumato.errors import DataError, ModelError, RunError
from sfumato.models import efficientnet_lite
from sfumato.privacy.plan import Plan
from sfumato.release import release as release_module
from sfumato.release.card import model_card
from sfumato.release.release import WEIGHTS, write_release
from sfumato.run.session import train
from sfumato.training.evaluation import evaluate
from small_runs import CLASSES, SmallNet, small_recipe, small_splits


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFUMATO_LEDGER", str(folder / "ledger.sqlite"))
        train(small_recipe(training__num_steps=20), out=folder / "run", data=small_splits())
        train(small_recipe(), out=folder / "own", data=small_splits(), model=SmallNet())
    return folder / "run"


@pytest.fixture
def release(run, tmp_path):
    return shutil.copytree(run / "release", tmp_path / "elsewhere")


def test_a_release_works_alone_and_scores_as_the_run_did(run, release):
    test = small_splits().test
    mine, alone = sfumato.load(run), sfumato.load(release)
    assert alone.classes == CLASSES
    assert alone.privacy["epsilon"] <= 8
    shutil.rmtree(release)
    accuracy = evaluate(alone.model, test, mean=(0.5,), std=(0.25,)).accuracy
    assert accuracy == json.loads((run / "scores.json").read_text())["accuracy"]
    assert torch.equal(mine.logits(test.images), alone.logits(test.images))


def test_tensors_arrays_and_files_give_the_same_predictions(release, tmp_path):
    classifier, images = sfumato.load(release), small_splits().test.images[:4]
    files = []
    for number, image in enumerate(images):
        files.append(tmp_path / f"{number}.png")
        Image.fromarray(image[0].numpy()).save(files[-1])
    by_tensor, by_array = classifier.predict(images), classifier.predict(images.numpy())
    assert by_tensor == by_array == classifier.predict(files)
    assert all(each.label == CLASSES[each.index] and 1 / 3 <= each.probability <= 1 for each in by_tensor)
    assert classifier.predict([]) == []


def test_images_of_another_shape_are_refused_and_files_are_resized(release, tmp_path):
    classifier = sfumato.load(release)
    for wrong in (torch.zeros(1, 1, 9, 9).byte(), torch.zeros(1, 1, 8, 8), torch.zeros(1, 3, 8, 8).byte()):
        with pytest.raises(DataError) as caught:
            classifier.predict(wrong)
        assert caught.value.code == "wrong-images"
    Image.fromarray(np.zeros((50, 70, 3), np.uint8)).save(tmp_path / "large.png")
    assert len(classifier.predict([tmp_path / "large.png"])) == 1


def test_the_released_weights_are_the_averaged_ones(run):
    released = load_file(run / "release/model.safetensors")
    state = load_file(run / "state/state.safetensors")
    name = "head.weight"
    assert torch.equal(released[name], state[f"average.{name}"])
    assert not torch.equal(released[name], state[f"model.{name}"])


def test_a_model_of_ones_own_is_loaded_into_ones_own(run):
    own = run.parent / "own"
    with pytest.raises(ModelError) as caught:
        sfumato.load(own)
    assert caught.value.code == "own-model"
    classifier = sfumato.load(own, model=SmallNet())
    assert len(classifier.predict(small_splits().test.images)) == 30


@pytest.mark.parametrize(
    ("name", "built", "recorded"),
    [
        ("efficientnet_lite0", {"width": 0.25}, {"width": 0.25, "pretrained": True}),
        ("efficientnet_lite0_features", {"input_size": 32}, {"input_size": 32}),  # pretrained by default
    ],
)
def test_a_release_is_loaded_without_the_public_weights_it_began_with(
    tmp_path, monkeypatch, name, built, recorded
):
    model = sfumato.create_model(name, num_classes=3, pretrained=False, **built)
    config = {"model": {"name": name, "options": recorded}, "classes": list(CLASSES), "image_size": 32}
    config |= {"channels": 3, "mean": [0.0], "std": [1.0], "fit": "pad", "data": "shades"}
    privacy = {"epsilon": None, "delta": None, "unit": "image", "releasable": False, "statement": "none"}
    write_release(tmp_path / "release", model=model, config=config, privacy=privacy, card="")

    def missing(_):
        raise ModelError("pretrained-not-installed", "there is no such package")

    monkeypatch.setattr(efficientnet_lite, "public_weights", missing)
    loaded = sfumato.load(tmp_path / "release").model.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())
    with pytest.raises(ModelError, match="pretrained-not-installed"):
        sfumato.create_model("efficientnet_lite0", num_classes=3, pretrained=True)


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "config.json").write_text("[]"),
        lambda folder: change(folder / "config.json", format=99),
        lambda folder: change(folder / "config.json", classes=None),
        lambda folder: change(folder / "config.json", classes=["one", "two"]),
        lambda folder: change(folder / "config.json", model={"name": "resnet9"}),
        lambda folder: change(folder / "config.json", model={"name": "lenet", "options": {}}),
        lambda folder: (folder / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "privacy.json").unlink(),
        lambda folder: (folder / "privacy.json").write_text("{}"),
        lambda folder: change(folder / "privacy.json", epsilon="small"),
        lambda folder: change(folder / "privacy.json", releasable=None),
        lambda folder: change(folder / "privacy.json", delta=None),
        lambda folder: change(folder / "privacy.json", events=None),
        lambda folder: change(folder / "privacy.json", events=[{"kind": "sampled-gaussian"}]),
        lambda folder: change(folder / "privacy.json", events=[{"kind": "magic"}]),
        lambda folder: change(folder / "privacy.json", unit="<b>"),
        lambda folder: change(folder / "config.json", classes=[1, 2, 3]),
        lambda folder: change(folder / "config.json", image_size=10**9),
        lambda folder: change(folder / "config.json", mean=[1e308]),
        lambda folder: change(folder / "config.json", mean=[0.5, 0.5]),
        lambda folder: change(folder / "config.json", model={"name": "lenet", "options": {"num_classes": 3}}),
        lambda folder: change(folder / "config.json", image_size=-3),
        lambda folder: change(folder / "config.json", mean=["x"]),
        lambda folder: change(folder / "config.json", std=[0.0]),
        lambda folder: change(folder / "config.json", fit="zap"),
        lambda folder: change(folder / "config.json", data=None),
        lambda folder: change(folder / "config.json", model={"name": "resnet10", "options": {}}),
        lambda folder: change(folder / "config.json", model={"name": "resnet9", "options": {"width": 10**9}}),
        lambda folder: change(folder / "config.json", model={"name": "resnet9", "options": {"width": 512}}),
        lambda folder: change(folder / "config.json", model={"name": "wrn_6000004_1", "options": {}}),
        lambda folder: change(
            folder / "config.json", model={"name": "wrn_16_4", "options": {"depth": 10**7}}
        ),
        lambda folder: change(folder / "config.json", model={"name": ["resnet9"], "options": {}}),
        lambda folder: change(folder / "config.json", model={"name": "resnet9", "options": {"name": "x"}}),
        lambda folder: change(folder / "config.json", model={"name": "x" * 10**6, "options": {}}),
        lambda folder: change(folder / "config.json", channels=10**9),
        lambda folder: change(folder / "config.json", classes=["c"] * 10**5),
    ],
)
def test_a_release_that_does_not_fit_is_refused(release, spoil):
    sfumato.load(release)
    spoil(release)
    began = time.perf_counter()
    with pytest.raises(ModelError) as caught:
        sfumato.load(release)
    assert caught.value.code == "bad-release"
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_weights_beyond_all_numbers_predict_nothing(release, value):
    weights = load_file(release / "model.safetensors")
    images = small_splits().test.images[:2]
    assert len(sfumato.load(release).predict(images)) == 2
    save_file({**weights, "head.weight": torch.full_like(weights["head.weight"], value)}, release / WEIGHTS)
    with pytest.raises(ModelError) as caught:
        sfumato.load(release).predict(images)
    assert caught.value.code == "bad-release"


def test_whole_numbers_are_no_weights(release):
    weights = load_file(release / "model.safetensors")
    save_file({**weights, "head.weight": weights["head.weight"].long()}, release / WEIGHTS)
    with pytest.raises(ModelError, match=r"head\.weight is torch\.int64"):
        sfumato.load(release)


def test_a_network_larger_than_its_weights_is_never_built(release, monkeypatch):
    built = []

    def recorded(name, **options):
        built.append(name)
        return sfumato.create_model(name, **options)

    monkeypatch.setattr(release_module, "create_model", recorded)
    sfumato.load(release)
    assert len(built) == 1  # the control
    change(release / "config.json", model={"name": "resnet9", "options": {"width": 300}})
    with pytest.raises(ModelError, match="bad-release"):
        sfumato.load(release)
    assert len(built) == 1


def test_an_unfinished_run_and_a_strange_folder_are_told_apart(run, tmp_path):
    with pytest.raises(RunError) as caught:
        sfumato.load(tmp_path)
    assert caught.value.code == "no-run"
    shutil.copy(run / "recipe.toml", tmp_path)
    with pytest.raises(RunError) as caught:
        sfumato.load(tmp_path)
    assert caught.value.code == "not-finished"


CHANGES = {
    "plain": {},
    "replaced": {"neighbouring": "replace-one"},
    "discrete": {"mechanism": "discrete-gaussian", "accountant": "rdp"},
    "searched": {"tuning_runs": 4.0, "accountant": "rdp"},
    "patients": {"unit": "patient", "sampling": "full", "batch_size": 200},
    "large delta": {"delta": 0.02, "allow_large_delta": True},
    "a mean too": {"extra_events": (SampledGaussian(noise_multiplier=3.0),)},
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_the_command_on_the_card_gives_the_epsilon_above_it(name):
    known = {"num_examples": 200, "batch_size": 25.5, "num_steps": 20, "noise_multiplier": 1.23456789}
    plan = Plan(**{"delta": 1.2345678e-4, **known, **CHANGES[name]})
    config = {"model": {"name": "lenet"}, "data": "shades", "classes": ["a", "b"], "image_size": 28}
    card = model_card(
        config={**config, "channels": 1},
        privacy=plan.statement().as_dict(),
        scores=None,
        recipe=small_recipe(),
    )
    command = re.search(r"^sfumato (budget .+)$", card, re.MULTILINE)[1]
    shown = CliRunner().invoke(cli, [*command.split(), "--json"], catch_exceptions=False)
    found = json.loads(shown.stdout)["epsilon"]
    complete = "leaves out 1 further noisy release" not in card
    assert complete is (name != "a mean too")
    assert (found == pytest.approx(plan.epsilon, rel=1e-9)) is complete


def test_the_card_carries_guarantee_and_accuracy(run):
    card = (run / "release/README.md").read_text()
    privacy = json.loads((run / "release/privacy.json").read_text())
    assert all(line in card for line in privacy["statement"].splitlines())
    accuracy = json.loads((run / "scores.json").read_text())["accuracy"]
    assert f"{100 * accuracy:.2f} %" in card
    assert "sfumato budget --num-examples 96" in card
