"""Fine-tuning: what is trained, what stays, and which weights a private run may begin with."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sfumato.data import DataSplits
from sfumato.errors import ConfigError, ModelError, PrivacyError, SfumatoError
from sfumato.ledger.ledger import Ledger
from sfumato.models import create_model
from sfumato.run.prepare import prepare
from sfumato.run.session import train
from sfumato.run.weights import read_checkpoint, transfer_weights
from sfumato.training.finetuning import choose_trained, first_layer, last_layer, training_mode
from small_runs import small_recipe, small_set, small_splits

PARTS = ("last", "norms-and-biases", "first-and-last")


@pytest.fixture(autouse=True)
def own_ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))


def read(path):
    return json.loads(path.read_text())


def other_splits(classes=("dark", "middle", "bright")) -> DataSplits:
    """Images of the same form that share none with ``small_splits``."""
    from dataclasses import replace

    part = small_set(60, seed=77, name="others")
    return DataSplits(
        train=replace(part, classes=classes), test=replace(small_set(30, seed=78), name="others")
    )


@pytest.fixture
def public_run(tmp_path):
    """A finished run without privacy on other images."""
    recipe = small_recipe(
        privacy__enabled=False, privacy__epsilon=None, data__name="others", training__learning_rate=0.1
    )  # at rate 1 without clip, one net in some hundreds explodes
    train(recipe, out=tmp_path / "pre", data=other_splits(("a", "b", "c")))
    return tmp_path / "pre"


def from_weights(place, **changes):
    return small_recipe(model__weights=str(place), **changes)


def trained_names(model):
    return {name for name, value in model.named_parameters() if value.requires_grad}


def test_the_parts_are_what_their_names_say_and_hold_the_last_layer():
    net = create_model("wrn_10_1", num_classes=3)
    everything = trained_names(net)
    found = {}
    for part in PARTS:
        net.requires_grad_(True)
        choose_trained(net, part)
        found[part] = trained_names(net)
    assert found["last"] == {"head.weight", "head.bias"}
    assert found["first-and-last"] == found["last"] | {"stem.weight", "stem.gain", "stem.bias"}
    vectors = {name for name, value in net.named_parameters() if value.numel() == value.shape[0]}
    assert found["norms-and-biases"] == vectors | found["last"]
    assert all(part < everything for part in found.values())
    choose_trained(net, "all")  # frees nothing: what a model froze stays so
    assert trained_names(net) == found["first-and-last"]


def test_a_net_without_a_head_is_taken_by_its_order():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    assert (first_layer(net), last_layer(net)) == ("0", "3")
    with pytest.raises(ConfigError) as caught:
        last_layer(nn.Sequential(nn.ReLU()))
    assert caught.value.code == "no-layers"


class Backbone(nn.Module):
    """A net with batch norm and dropout, as many public ones have."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(4, num_classes)

    def forward(self, x):
        return self.head(self.trunk(x).mean((2, 3)))


@pytest.mark.parametrize("part", PARTS)
def test_batch_norm_in_frozen_parts_keeps_its_statistics(part, tmp_path):
    torch.manual_seed(0)
    net = Backbone()
    before = net.trunk[1].running_mean.clone()
    recipe = small_recipe(model__trained=part)
    train(recipe, out=tmp_path / "run", data=small_splits(), model=net)
    assert torch.equal(net.trunk[1].running_mean, before)
    assert not torch.equal(net.head.weight, Backbone().head.weight)


def test_batch_norm_that_would_be_trained_is_refused(tmp_path):
    with pytest.raises(PrivacyError) as caught:
        train(small_recipe(), out=tmp_path / "run", data=small_splits(), model=Backbone())
    assert caught.value.code in ("mixes-examples", "private-statistics")


def test_modes_follow_what_is_trained():
    net = nn.Sequential(Backbone(), nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3)))
    training_mode(net)
    assert all(module.training for module in net.modules())
    net[0].requires_grad_(False)
    training_mode(net)
    assert not any(module.training for module in net[0].modules())
    assert net[1][0].training  # a new head may have its dropout
    net[0].trunk[1].requires_grad_(True)
    training_mode(net)
    assert not net[0].trunk[1].training  # scale and shift are trained, statistics are not


@pytest.mark.parametrize("part", ["all", *PARTS])
def test_frozen_layers_end_exactly_as_the_weights_had_them(part, public_run, tmp_path):
    recipe = from_weights(public_run, model__weights_are_public=True, model__trained=part)
    train(recipe, out=tmp_path / "run", data=small_splits())
    before, after = (
        load_file(place / "release/model.safetensors") for place in (public_run, tmp_path / "run")
    )
    net = create_model("scale_resnet9", num_classes=3, in_channels=1, width=4, groups=2)
    choose_trained(net, part)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == trained_names(net)


def test_weights_come_from_a_run_a_release_or_a_file_and_give_a_head_start(public_run, tmp_path):
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(public_run / "release/model.safetensors"), bare)
    places = (public_run, public_run / "release", public_run / "release/model.safetensors", bare)
    nets = []
    for place in places:
        recipe = from_weights(place, model__weights_are_public=True, training__seed=1)
        nets.append(prepare(recipe, data=small_splits()).model)
    stems = [net.stem[0][0].weight for net in nets]
    assert all(torch.equal(stem, stems[0]) for stem in stems)
    assert not torch.equal(
        prepare(small_recipe(training__seed=1), data=small_splits()).model.stem[0][0].weight, stems[0]
    )
    heads = [net.head.weight for net in nets]
    assert not heads[0].any()  # other classes: a new head at zero
    assert heads[3].any()  # a bare file does not name its classes: an equal shape is taken over


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__options": {"width": 8, "groups": 2}}, "--set model.options.width=4"),
        ({"model__name": "resnet9"}, "--model scale_resnet9"),
    ],
)
def test_weights_of_another_net_are_refused_with_the_options_that_fit(changes, words, public_run):
    recipe = from_weights(public_run, model__weights_are_public=True, **changes)
    with pytest.raises(ModelError, match=words) as caught:
        prepare(recipe, data=small_splits())
    assert caught.value.code == "weights-do-not-fit"


def test_a_pickle_is_not_opened(tmp_path):
    (tmp_path / "net.pth").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(ModelError) as caught:
        read_checkpoint(tmp_path / "net.pth")
    assert caught.value.code == "bad-weights"


def test_taking_over_equal_classes_keeps_the_head(public_run):
    net = create_model("scale_resnet9", num_classes=3, in_channels=1, width=4, groups=2)
    checkpoint = read_checkpoint(public_run)
    assert not transfer_weights(net, checkpoint, classes=("a", "b", "c"))
    assert torch.equal(net.head.weight, checkpoint.weights["head.weight"])
    assert transfer_weights(net, checkpoint, classes=("a", "b", "d"))


def test_weights_without_a_guarantee_are_refused_unless_declared_public(public_run, tmp_path):
    with pytest.raises(PrivacyError, match="weights_are_public") as caught:
        train(from_weights(public_run), out=tmp_path / "run", data=small_splits())
    assert caught.value.code == "unprotected-weights"
    assert not (tmp_path / "run").exists()
    result = train(
        from_weights(public_run, model__weights_are_public=True), out=tmp_path / "run", data=small_splits()
    )
    assert "others, which are taken to be public" in result.privacy["statement"]
    assert result.privacy["weights_from"] == {"data": "others", "public": True, "unprotected": ["others"]}
    assert "taken to be public" in (tmp_path / "run/release/README.md").read_text()


@pytest.mark.parametrize("seeded", [False, True])
def test_weights_that_saw_the_private_images_are_refused_even_if_declared_public(seeded, tmp_path):
    if seeded:  # a guarantee whose noise can be subtracted is none
        first = small_recipe(training__seed=3)
    else:
        first = small_recipe(privacy__enabled=False, privacy__epsilon=None, training__learning_rate=0.1)
    train(first, out=tmp_path / "pre", data=small_splits())
    for public, code in ((False, "unprotected-weights"), (True, "weights-saw-these-images")):
        recipe = from_weights(tmp_path / "pre", model__weights_are_public=public)
        with pytest.raises(PrivacyError) as caught:
            train(recipe, out=tmp_path / "run", data=small_splits())
        assert caught.value.code == code


def test_one_shared_image_is_enough_for_the_ledger_to_refuse(public_run, tmp_path):
    mixed = small_splits()
    images = mixed.train.images.clone()
    images[5] = other_splits().train.images[7]
    from dataclasses import replace

    stained = replace(mixed, train=replace(mixed.train, images=images, content_ids=None, fingerprint=""))
    recipe = from_weights(public_run, model__weights_are_public=True)
    with pytest.raises(PrivacyError) as caught:
        train(recipe, out=tmp_path / "run", data=stained)
    assert caught.value.code == "weights-saw-these-images", caught.value
    train(recipe, out=tmp_path / "run", data=mixed)


def test_a_private_release_is_counted_in(tmp_path):
    first = small_recipe(privacy__epsilon=4.0, privacy__uncounted_search=True)
    train(first, out=tmp_path / "first", data=small_splits())
    recipe = from_weights(tmp_path / "first/release")
    second = prepare(recipe, data=small_splits())
    alone = prepare(small_recipe(), data=small_splits())
    assert second.plan.epsilon <= 8.0
    assert second.plan.noise_multiplier > 1.05 * alone.plan.noise_multiplier  # part of ε is spent already
    result = train(recipe, out=tmp_path / "second", data=small_splits())
    third = prepare(from_weights(tmp_path / "second", privacy__epsilon=20.0), data=small_splits())
    assert third.provenance.data == "shades and shades"  # every set on the way is named
    assert len(third.plan.extra_events) == 2
    assert "ε counts the steps that made them" in result.privacy["statement"]
    assert "does NOT count the search for their settings" in result.privacy["statement"]
    assert len(result.privacy["events"]) == 2
    with pytest.raises(SfumatoError):  # nothing is left of a budget that the weights have used up
        prepare(from_weights(tmp_path / "first", privacy__epsilon=3.9), data=small_splits())
    with pytest.raises(PrivacyError) as caught:
        prepare(from_weights(tmp_path / "first", privacy__neighbouring="replace-one"), data=small_splits())
    assert caught.value.code == "weights-other-unit"


def test_layers_with_random_weights_are_not_kept():
    with pytest.raises(ConfigError) as caught:
        prepare(small_recipe(model__trained="last"), data=small_splits())
    assert caught.value.code == "nothing-to-fine-tune"


def test_without_privacy_any_weights_will_do(public_run, tmp_path):
    recipe = from_weights(public_run, privacy__enabled=False, privacy__epsilon=None)
    result = train(recipe, out=tmp_path / "run", data=small_splits(), ledger=Ledger.open(tmp_path / "book"))
    assert not result.privacy["releasable"]


def test_the_last_layer_alone_is_trained_on_rows_as_the_engine_would(public_run, tmp_path, monkeypatch):
    """The closed form and the engine agree, step after step, under the same seed."""
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    recipe = from_weights(public_run, model__weights_are_public=True, model__trained="last", training__seed=4)
    train(recipe, out=tmp_path / "rows", data=small_splits())
    monkeypatch.setattr("sfumato.run.sums.head_gradients", lambda *_, **__: None)
    train(recipe, out=tmp_path / "engine", data=small_splits())
    rows, engine = (
        load_file(tmp_path / name / "release/model.safetensors")["head.weight"] for name in ("rows", "engine")
    )
    assert (rows - engine).abs().max() < 1e-3 * engine.abs().max()  # noisy sums are rounded to a lattice
    assert rows.abs().max() > 1e-2  # it moved
    assert list((tmp_path / "cache/features").iterdir())


def test_the_command_begins_with_weights_and_keeps_their_full_path(
    image_folder, tmp_path, monkeypatch, capsys
):
    from sfumato.cli import main

    data = image_folder(train=10, test=4, size=8)
    small = ["--set", "model.options.width=4", "--set", "model.options.groups=2"]
    small += [
        "--set",
        "data.image_size=8",
        "--set",
        "training.num_epochs=1",
        "--set",
        "training.learning_rate=0.05",
    ]
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return ended.value.code, capsys.readouterr()

    main(["train", str(data), "--no-privacy", "--out", "pre", *small, "--json"])
    private = ["train", data, "--epsilon", 8, "--delta", 1e-2, "--weights", "pre", "--out", "run", *small]
    code, shown = call(*private)
    assert (code, "unprotected-weights" in shown.err) == (1, True)
    code, shown = call(*private, "--set", "model.weights_are_public=true")
    assert (code, "weights-saw-these-images" in shown.err) == (1, True)
    assert not (tmp_path / "run").exists()
    main([str(item) for item in [*private, "--no-privacy", "--json"] if item not in ("--epsilon", 8)])
    assert f'weights = "{tmp_path / "pre"}"' in (tmp_path / "run/recipe.toml").read_text()
