"""Runs on images with several findings: from the manifest to the release, with every check on the way."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import sfumato
from sfumato.audit.run import audit_run
from sfumato.cli import cli
from sfumato.data import DataSplits, ImageSet
from sfumato.errors import ConfigError, DataError, SfumatoError
from sfumato.ledger.ledger import Ledger
from sfumato.recipes.recipe import load_recipe, with_settings
from sfumato.release.release import load
from sfumato.run.prepare import prepare
from sfumato.run.session import train
from sfumato.run.state import load_state
from sfumato.run.steps import gradient_sum
from sfumato.training.gradient_sums import ClosedFormSum, EngineSum
from sfumato.training.losses import BinaryCrossEntropy
from sfumato.training.private_counts import NUM_BINS
from small_runs import small_recipe, small_splits

NAMES = ("left", "right")


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))


def lit_set(count, *, seed, patients=None):
    """Grey 8 x 8 images: the left half is lit, the right one, both, or none."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(count, 2, generator=generator) < 0.4).float()
    images = torch.randint(0, 60, (count, 1, 8, 8), generator=generator)
    images[..., :4] += (labels[:, 0] * 150).long().view(-1, 1, 1, 1)
    images[..., 4:] += (labels[:, 1] * 150).long().view(-1, 1, 1, 1)
    owners = None if patients is None else torch.arange(count) % patients
    return ImageSet(images.byte(), labels, NAMES, owners, "lit")


def lit_splits(*, train=160, test=60, patients=None):
    return DataSplits(
        train=lit_set(train, seed=1, patients=patients),
        test=lit_set(test, seed=2),
        classes_are_declared=True,
    )


def trained(out, *, data=None, loss=None, recipe=None, **changes):
    with Ledger.open() as ledger:
        return train(
            recipe or small_recipe(**changes), out=out, data=data or lit_splits(), ledger=ledger, loss=loss
        )


def fixed_features(**changes):
    settings = {"model.options": {"num_directions": 40, "num_layers": 1, "num_patches": 16, "mirror": False}}
    settings |= {"features.num_images": 60, "privacy.epsilon": 30.0, "privacy.delta": 1e-3}
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    return with_settings(load_recipe("fast/patches"), settings)


def test_a_run_learns_findings_and_its_release_says_so(tmp_path):
    changes = {"training__num_steps": 25, "training__learning_rate": 2.0, "training__seed": 1}
    scores = trained(tmp_path / "run", **changes).scores
    assert scores.mean_auc > 0.8
    assert set(scores.auc) == set(NAMES)
    config = json.loads((tmp_path / "run/release/config.json").read_text())
    assert config["task"] == "multi-label"
    stored = json.loads((tmp_path / "run/scores.json").read_text())
    assert stored["per_finding"]["left"]["auc_interval"][0] < scores.auc["left"]
    assert json.loads((tmp_path / "run/resolved.json").read_text())["loss"] == "binary-cross-entropy"
    card, page = ((tmp_path / "run" / name).read_text() for name in ("release/README.md", "report.html"))
    assert "| left |" in card
    assert "2 findings" in card
    assert "<td>right</td>" in page

    released, test = load(tmp_path / "run"), lit_set(60, seed=2)
    predictions = released.predict(test.images)
    chances = torch.tensor([each.probabilities for each in predictions])
    assert torch.allclose(chances, released.logits(test.images).sigmoid())
    assert (chances.sum(1) - 1).abs().max() > 0.1  # each on its own: they do not add up to 1
    called = [tuple(name for name, p in zip(NAMES, row, strict=True) if p >= 0.5) for row in chances.tolist()]
    assert [each.findings for each in predictions] == called
    assert {each.label for each in predictions} == {"", "left", "right", "left|right"}


def test_patients_are_units_with_all_their_images(tmp_path):
    data = lit_splits(patients=40)
    result = trained(tmp_path / "run", data=data, privacy__unit="patient", privacy__delta=1e-2)
    assert result.privacy["num_examples"] == 40
    assert result.privacy["unit"] == "patient"


def test_a_head_on_fixed_features_is_summed_in_closed_form_as_the_engine_does(tmp_path):
    prepared = prepare(fixed_features(training__positive_weights=[2.0, 5.0]), data=lit_splits())
    closed = gradient_sum(prepared, prepared.plan, max_rows=8)
    assert isinstance(closed, ClosedFormSum)
    assert closed.sums.loss == BinaryCrossEntropy((2.0, 5.0))
    torch.nn.init.normal_(prepared.model.head.weight)
    engine = EngineSum(
        model=prepared.model,
        units=prepared.units,
        inputs=prepared.views,
        clip_norm=prepared.plan.clip_norm,
        source=prepared.source,
        max_rows=64,
        loss=prepared.loss,
    )
    batch = torch.arange(0, 160, 3)
    one, other = closed(batch, 0), engine(batch, 0)
    assert torch.allclose(one.norms, other.norms.double(), rtol=1e-4)
    for name, value in one.gradients.items():
        assert torch.allclose(value.double(), other.gradients[name].double(), atol=1e-3)
    learnt = trained(tmp_path / "run", recipe=fixed_features(training__seed=1))  # fresh noise would vary it
    assert learnt.scores.mean_auc > 0.7


def test_the_loss_follows_from_the_labels_and_one_that_does_not_fit_is_refused():
    assert prepare(small_recipe(), data=lit_splits()).loss == BinaryCrossEntropy()
    assert prepare(small_recipe(), data=small_splits()).loss is cross_entropy
    for data, name in (
        (lit_splits(), "cross-entropy"),
        (lit_splits(), "label-smoothing"),
        (small_splits(), "binary-cross-entropy"),
    ):
        with pytest.raises(ConfigError, match="loss-does-not-fit"):
            prepare(small_recipe(training__loss=name), data=data)
    for own, data in ((cross_entropy, lit_splits()), (BinaryCrossEntropy(), small_splits())):
        with pytest.raises(ConfigError, match="loss-does-not-fit"):
            sfumato.train(small_recipe(), out="never", data=data, loss=own)
    for weights in ([1.0, 2.0, 3.0], [0.0], [-1.0, 1.0], [1e6]):
        with pytest.raises(ConfigError, match="bad-positive-weights"):
            prepare(small_recipe(training__positive_weights=weights), data=lit_splits())
    with pytest.raises(ConfigError, match="bad-positive-weights"):
        prepare(small_recipe(training__positive_weights=[2.0]), data=small_splits())


def test_a_loss_of_ones_own_gets_the_matrix(tmp_path):
    shapes = set()

    def own(outputs, targets):
        shapes.add(tuple(targets.shape))
        return binary_cross_entropy_with_logits(outputs, targets)

    result = trained(tmp_path / "run", loss=own)
    assert shapes == {(1, 2)}  # a row at a time
    assert result.scores.num_examples == 60


@pytest.mark.parametrize("kind", ["gradient", "mislabelled"])
def test_canaries_audit_a_run_on_findings(tmp_path, kind):
    trained(tmp_path / "run", audit__canaries=40, audit__kind=kind)
    result = audit_run(tmp_path / "run")
    assert result.num_canaries == 40
    assert not result.violations
    assert 0 <= result.epsilon <= 8.0


def test_from_a_manifest_to_predictions_on_the_command_line(tmp_path):
    folder, data = tmp_path / "lit", lit_splits(train=60, test=20)
    folder.mkdir()
    rows = ["path,label,split"]
    for split, images in (("train", data.train), ("test", data.test)):
        for number, (image, labels) in enumerate(zip(images.images, images.labels, strict=True)):
            Image.fromarray(image[0].numpy()).save(folder / f"{split}{number}.png")
            label = "|".join(np.array(NAMES)[labels.bool().numpy()])
            rows.append(f"{split}{number}.png,{label},{split}")
    (folder / "manifest.csv").write_text("\n".join(rows))

    def sfumato_command(*words, code=0):
        done = CliRunner().invoke(cli, list(words))
        assert done.exit_code == code, done.output
        return done.stdout

    settings = ["data.image_size=8", "data.channels=1", "training.num_epochs=4", "privacy.delta=1e-3"]
    words = [word for setting in settings for word in ("--set", setting)]
    words += ["--recipe", "default/folder", "--set", "model.options.width=8"]
    run = str(tmp_path / "run")
    sfumato_command("train", str(folder), "--epsilon", "8", *words, "--out", run, code=1)  # not declared
    out = sfumato_command(
        *("train", str(folder), "--epsilon", "8", *words, "--out", run),
        *("--findings", "left, right", "--loss", "binary-cross-entropy"),
    )
    assert "Mean AUC" in out
    scores = json.loads(sfumato_command("evaluate", run, "--json"))
    assert {"accuracy", "num_examples", "auc", "mean_auc", "exact_match"} <= set(scores)
    assert set(scores["auc"]) == set(NAMES)
    assert "left" in sfumato_command("evaluate", run)
    shown = sfumato_command("predict", run, str(folder / "test0.png"))
    assert " %" in shown
    values = json.loads(sfumato_command("predict", run, str(folder / "test0.png"), "--json"))
    assert set(values[0]["probabilities"]) == set(NAMES)
    assert isinstance(values[0]["findings"], list)


def test_findings_are_called_from_their_frequency_once_it_is_released(tmp_path):
    changes = {"data__class_counts": "released", "decision__class_counts_noise_multiplier": 3.0}
    result = trained(tmp_path / "run", training__num_steps=4, **changes)
    decision = load(tmp_path / "run").decision
    assert decision.thresholds == pytest.approx((0.4, 0.4), abs=0.15)  # 40 % of the units have each
    assert "with and without each finding was released once" in result.privacy["statement"]
    stored = json.loads((tmp_path / "run/scores.json").read_text())
    assert stored["per_finding"]["left"]["threshold"] == decision.thresholds[0]
    weighted = trained(
        tmp_path / "declared", data__prevalence=(0.4, 0.1), training__positive_weights=(1.5, 9)
    )
    assert load(weighted.folder).decision.thresholds == pytest.approx(
        (0.5, 0.5)
    )  # the loss has balanced them


def test_thresholds_of_findings_are_chosen_on_training_units_and_paid_for(tmp_path):
    recipe = {"decision__threshold": "released", "decision__threshold_noise_multiplier": 2.0}
    result = trained(tmp_path / "run", training__num_steps=25, training__learning_rate=2.0, **recipe)
    released = load(tmp_path / "run")
    assert [item["what"] for item in result.privacy["releases"]] == ["score histogram"]
    assert len(released.decision.thresholds) == len(NAMES)
    saved = load_state(tmp_path / "run/state").values["released"]["score_histogram"]
    assert len(saved) == len(NAMES) * 2 * NUM_BINS
    images = lit_set(30, seed=4).images
    chances = released.logits(images).sigmoid()
    for row, prediction in zip(chances, released.predict(images), strict=True):
        cuts = zip(NAMES, row.tolist(), released.decision.thresholds, strict=True)
        assert prediction.findings == tuple(name for name, chance, cut in cuts if chance >= cut)


def test_public_images_choose_the_threshold_of_each_finding_and_few_are_refused(tmp_path):
    data = dataclasses.replace(lit_splits(), val=lit_set(100, seed=3))
    trained(tmp_path / "public", data=data, data__val_is_public=True, training__num_steps=3)
    assert all(cut != 0.5 for cut in load(tmp_path / "public").decision.thresholds)
    trained(tmp_path / "private", data=data, training__num_steps=3)
    assert load(tmp_path / "private").decision.thresholds is None
    given = {"data__val_is_public": True, "training__num_steps": 3, "decision__threshold": (0.3, 0.6)}
    trained(tmp_path / "declared", data=data, **given)
    assert load(tmp_path / "declared").decision.thresholds == (0.3, 0.6)
    few = dataclasses.replace(data, val=lit_set(10, seed=3))
    with pytest.raises(DataError, match="few-validation-images"):
        trained(tmp_path / "few", data=few, data__val_is_public=True, decision__threshold="public")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"decision__threshold": (0.3,)}, "bad-thresholds"),
        ({"decision__threshold": (0.3, 1.5)}, "bad-thresholds"),
        ({"data__prevalence": 0.3}, "bad-prevalence"),
        ({"decision__threshold": "public"}, "private-validation"),
        ({"decision__positive": "left"}, "classes-and-findings"),
    ],
)
def test_a_decision_that_does_not_fit_the_findings_is_refused(tmp_path, changes, code):
    with pytest.raises(SfumatoError, match=code):
        trained(tmp_path / "run", **changes)
