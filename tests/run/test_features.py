"""A run on fixed features: steps and rate, the cost of the mean, the closed form, and the release."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import sfumato
import sfumato.run.features
import sfumato.training.fixed_rows
from sfumato.accounting import SampledGaussian
from sfumato.data import DataSplits, ImageSet
from sfumato.data.generated import dead_leaves
from sfumato.errors import ConfigError, DataError, ModelError
from sfumato.ledger.ledger import Ledger
from sfumato.models import create_model
from sfumato.randomness import SeededSource, UnitRandomness
from sfumato.recipes.recipe import load_recipe, with_settings
from sfumato.run.estimate import estimate
from sfumato.run.features import gaussian_mu, with_budget_settings, with_image_options
from sfumato.run.planning import build_plan
from sfumato.run.prepare import prepare
from sfumato.run.session import train
from sfumato.run.state import load_state
from sfumato.training.fixed_rows import FeatureViews
from sfumato.training.gradient_sums import clipped_total, head_gradients
from sfumato.training.inputs import Units
from small_runs import Watcher

SMALL = {"num_layers": 1, "num_patches": 12, "num_directions": 40}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))


def bright_and_dark(count: int, *, seed: int, patients: bool = False) -> ImageSet:
    """Two classes that differ in their texture: leaves, and leaves with columns blanked."""
    images = dead_leaves(count, seed=seed)
    labels = torch.arange(count) % 2
    images[labels == 1, :, :, ::3] = 0
    owners = torch.arange(count) // 4 * 2 + labels if patients else None  # two images each
    return ImageSet(images=images, labels=labels, classes=("whole", "striped"), patients=owners)


def recipe_for(**changes):
    settings = {"model.options": SMALL, "privacy.epsilon": 8.0, "training.seed": 0, "privacy.delta": 1e-3}
    settings["features.num_images"] = 80
    return with_settings(load_recipe("fast/patches"), settings | changes)


def test_a_run_learns_releases_one_whole_model_and_counts_the_mean(tmp_path):
    splits = DataSplits(train=bright_and_dark(300, seed=1), val=None, test=bright_and_dark(100, seed=2))
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        result = train(recipe_for(), out=tmp_path / "run", data=splits, ledger=ledger)
    assert result.scores.accuracy > 0.8
    assert result.privacy["epsilon"] <= 8.0
    loaded = sfumato.load(tmp_path / "run")
    predicted = loaded.logits(splits.test.images).argmax(1)
    assert (predicted == splits.test.labels).double().mean().item() == pytest.approx(result.scores.accuracy)
    assert loaded.model.centre.abs().sum() > 0


def test_a_run_on_wide_banks_releases_one_whole_model_with_its_row_norm(tmp_path):
    splits = DataSplits(train=bright_and_dark(300, seed=1), val=None, test=bright_and_dark(100, seed=2))
    options = {"num_patches": 12, "coarse_patches": 6, "num_directions": 40, "patch_directions": 50}
    changes = {"model.options": options, "privacy.epsilon": 8.0, "training.seed": 0, "privacy.delta": 1e-3}
    recipe = with_settings(load_recipe("fast/wide"), {**changes, "features.num_images": 80})
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        result = train(recipe, out=tmp_path / "run", data=splits, ledger=ledger)
    loaded = sfumato.load(tmp_path / "run")
    assert [part.num_features for part in loaded.model.extractor.parts] == [50, 50, 40]
    rows = loaded.model.features(splits.test.images[:5].float() / 255)
    assert torch.allclose(rows.norm(dim=1), torch.full((5,), 3.0), atol=1e-4)
    predicted = loaded.logits(splits.test.images).argmax(1)
    assert (predicted == splits.test.labels).double().mean().item() == pytest.approx(result.scores.accuracy)
    assert result.scores.accuracy > 0.8


def test_the_rate_grows_with_the_power_that_the_recipe_gives():
    def rate(epsilon, **changes):
        recipe = with_settings(load_recipe("fast/wide"), {"privacy.epsilon": epsilon, **changes})
        return with_budget_settings(recipe, num_units=50_000, delta=1e-5).training.learning_rate

    growth = gaussian_mu(8.0, 1e-5) / gaussian_mu(1.0, 1e-5)  # below the ratio where it ends, 6.3
    assert rate(1.0) == pytest.approx(7.35, rel=0.01)
    assert rate(8.0) / rate(1.0) == pytest.approx(min(growth, 6.3) ** 0.45, rel=0.01)
    flat = {"features.rate_power": 0.0}
    assert rate(8.0, **flat) == pytest.approx(rate(1.0, **flat), rel=0.01)


def test_the_wait_for_features_is_shown_once_and_not_when_they_are_cached(tmp_path):
    splits = DataSplits(train=bright_and_dark(300, seed=1), val=None, test=bright_and_dark(100, seed=2))
    first, second = Watcher(), Watcher()
    for name, watcher in (("one", first), ("two", second)):
        with Ledger.open(tmp_path / "ledger.db") as ledger:
            train(recipe_for(), out=tmp_path / name, data=splits, ledger=ledger, observer=watcher)
    assert "Fitting features on 80 generated images; kept for later runs." in first.notes
    training = [step for step in first.computations if "training" in step[0]]
    assert training == [("features of training images", done, 300) for done in (256, 300)]
    assert [step for step in first.computations if "test" in step[0]] == [
        ("features of test images", 100, 100)
    ]
    assert second.computations == []
    assert not any("done again" in str(note) for note in first.notes)  # the mean is no step
    assert not any("Fitting" in str(note) for note in second.notes)


def test_a_run_on_features_goes_on_after_a_crash_with_the_mean_it_released(tmp_path, monkeypatch):
    splits = DataSplits(train=bright_and_dark(300, seed=1), val=None, test=bright_and_dark(100, seed=2))
    changes = {"training.num_steps": 8, "training.learning_rate": 5.0}
    recipe = recipe_for(**{**changes, "performance.save_every_seconds": 0.0})
    releases, real = [], sfumato.training.fixed_rows.private_mean

    def counted(*arguments, **options):
        releases.append(real(*arguments, **options))
        return releases[-1]

    monkeypatch.setattr(sfumato.training.fixed_rows, "private_mean", counted)
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        train(recipe, out=tmp_path / "whole", data=splits, ledger=ledger)
        assert len(releases) == 1
        with pytest.raises(RuntimeError, match="as if killed"):
            train(
                recipe,
                out=tmp_path / "parts",
                data=splits,
                ledger=ledger,
                observer=Watcher(crash_after=3),
            )
        assert len(releases) == 2
        watcher = Watcher()
        train(recipe, out=tmp_path / "parts", data=splits, ledger=ledger, resume=True, observer=watcher)
        spent = ledger.records(splits.train.fingerprint)[-1].reserved_steps
    assert len(releases) == 2  # a second mean would be a second release of the same images
    assert watcher.start_step == 2
    assert watcher.notes[0].startswith("1 step is done again")
    assert spent == 8
    whole, parts = (sfumato.load(tmp_path / name).model for name in ("whole", "parts"))
    assert torch.equal(parts.centre, releases[1])
    assert torch.equal(whole.head.weight, parts.head.weight)


def test_a_secure_run_on_features_keeps_its_mean_and_another_run_draws_another(tmp_path):
    splits = DataSplits(train=bright_and_dark(60, seed=1), val=None, test=None)
    changes = {"training.num_steps": 4, "training.learning_rate": 5.0, "training.seed": None}
    recipe = recipe_for(**{**changes, "privacy.delta": 1e-2, "performance.save_every_seconds": 0.0})
    centres = {}
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        for name in ("one", "two"):
            with pytest.raises(RuntimeError, match="as if killed"):
                train(
                    recipe, out=tmp_path / name, data=splits, ledger=ledger, observer=Watcher(crash_after=2)
                )
            centres[name] = load_state(tmp_path / name / "state").tensors["model.centre"]
        train(recipe, out=tmp_path / "one", data=splits, ledger=ledger, resume=True)
    released = sfumato.load(tmp_path / "one").model.centre
    assert torch.equal(released, centres["one"])
    assert not torch.equal(released, centres["two"])


def test_the_private_mean_is_part_of_the_plan():
    recipe = replace(recipe_for(), training=replace(recipe_for().training, num_steps=50))
    with_mean = build_plan(recipe, num_units=1000)
    assert with_mean.extra_events == (SampledGaussian(noise_multiplier=200.0),)
    assert with_mean.mu_gdp**2 == pytest.approx(50 / with_mean.noise_multiplier**2 + 1 / 200**2, rel=1e-3)
    without = build_plan(
        replace(recipe, features=replace(recipe.features, mean_noise_multiplier=0.0)), num_units=1000
    )
    assert without.noise_multiplier < with_mean.noise_multiplier


@pytest.mark.parametrize("patients", [False, True])
def test_the_closed_form_is_the_engine_and_a_patient_counts_once(patients):
    data = bright_and_dark(40, seed=3, patients=patients)
    model = create_model("patches", num_classes=2, **SMALL)
    generator = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(40, 40, generator=generator))
    model.centre.normal_(generator=generator).mul_(0.01)
    views = FeatureViews(features=features)
    units = Units.patients(data, max_images=4) if patients else Units.images(data)
    indices = torch.arange(0, len(units), 2)
    draws = UnitRandomness(SeededSource(0), purpose="augmentation", step=0)
    parts = views.microbatches(units, indices, max_rows=7, randomness=draws, device=torch.device("cpu"))
    engine = clipped_total(model, parts, clip_norm=0.5)
    assert len(engine.norms) == len(indices)
    sums = head_gradients(model, views, units, clip_norm=0.5)
    if patients:
        assert sums is None
    else:
        fast = sums(indices, 0)
        assert fast.gradients.keys() == engine.gradients.keys()
        for name, value in engine.gradients.items():
            assert torch.allclose(fast.gradients[name], value, atol=1e-5)
        assert not torch.allclose(
            sums(indices[1:], 0).gradients["head.weight"], engine.gradients["head.weight"]
        )


def test_steps_and_rate_follow_the_budget_and_the_number_of_units():
    def chosen(epsilon, num_units):
        recipe = with_settings(recipe_for(), {"privacy.epsilon": epsilon})
        training = with_budget_settings(recipe, num_units=num_units, delta=1e-5).training
        return training.num_steps, training.learning_rate

    steps, rate = chosen(1.0, 50_000)
    assert (steps, rate) == (60, pytest.approx(20, rel=0.01))
    assert chosen(8.0, 50_000)[0] > steps
    assert chosen(8.0, 50_000)[1] > 3 * rate
    few_steps, few_rate = chosen(1.0, 5_000)  # a tenth of the signal: the way is shorter, the steps are more
    assert few_steps == round(60 * 0.1**-0.29)
    assert few_steps * few_rate == pytest.approx(60 * 20 * 0.1 ** (0.29 + 2 / 3), rel=0.02)
    assert chosen(0.1, 20)[1] > 0
    plain = with_settings(recipe_for(), {"privacy.epsilon": None, "privacy.enabled": False})
    plain = with_budget_settings(plain, num_units=50_000, delta=1e-5).training
    assert plain.num_steps > chosen(8.0, 50_000)[0]  # no noise limits it
    assert rate < plain.learning_rate < chosen(8.0, 50_000)[1]  # but nothing is clipped either
    assert (
        chosen(8.0, 500_000)[1] < 1.05 * chosen(8.0, 50_000)[1]
    )  # and no rate is too large for the noise-free sum


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"training.num_steps": 7, "training.learning_rate": 1.0}, (7, 1.0)),
        ({"training.learning_rate": 5.0}, (60, 5.0)),
        ({"training.num_steps": 120}, (120, 10.0)),
        ({"training.num_epochs": 30.0}, (None, 40.0)),
    ],
)
def test_steps_and_rate_that_are_given_are_taken_and_the_other_one_follows(given, expected):
    recipe = with_settings(recipe_for(), {"privacy.epsilon": 1.0} | given)
    training = with_budget_settings(recipe, num_units=50_000, delta=1e-5).training
    assert (training.num_steps, training.learning_rate) == (expected[0], pytest.approx(expected[1], rel=0.01))


def test_mu_is_that_of_the_gaussian_mechanism():
    # one Gaussian of noise 1/μ has this ε at δ = 1e-5 (computed with mpmath)
    assert gaussian_mu(1.0, 1e-5) == pytest.approx(0.26805, abs=1e-4)
    assert gaussian_mu(8.0, 1e-5) == pytest.approx(1.66603, abs=1e-4)


def test_a_full_disk_is_named_when_features_cannot_be_kept(monkeypatch):
    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(sfumato.run.features, "save_file", full)
    splits = DataSplits(train=bright_and_dark(20, seed=1), val=None, test=None)
    with pytest.raises(DataError, match=r"cache-not-writable.*the disk is full"):
        prepare(recipe_for(**{"privacy.delta": 1e-2}), data=splits)


@pytest.mark.parametrize("damage", ["cut off", "tensors missing"])
def test_a_damaged_extractor_is_fitted_again(tmp_path, damage):
    splits = DataSplits(train=bright_and_dark(20, seed=1), val=None, test=None)
    recipe = recipe_for(**{"privacy.delta": 1e-2})
    first = prepare(recipe, data=splits).model.extractor.state_dict()
    (entry,) = (tmp_path / "cache" / "features").glob("extractor-*")
    if damage == "cut off":
        entry.write_bytes(entry.read_bytes()[:200])
    else:
        save_file({"floor": torch.zeros(())}, entry)
    again = prepare(recipe, data=splits).model.extractor.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert load_file(entry).keys() == first.keys()


@pytest.mark.parametrize("patients", [False, True])
def test_the_time_of_a_run_on_features_does_not_count_them_in_every_step(patients):
    splits = DataSplits(train=bright_and_dark(200, seed=1, patients=patients), val=None, test=None)
    unit = "patient" if patients else "image"
    prepared = prepare(recipe_for(**{"privacy.delta": 1e-3, "privacy.unit": unit}), data=splits)
    assert prepared.in_closed_form is not patients
    computed = []
    prepared.model.extractor.register_forward_hook(lambda _, inputs, __: computed.append(len(inputs[0])))
    assert estimate(prepared).rows_per_step == 200
    assert sum(computed) < 100  # a few random images, timed once
    computed.clear()
    prepared.model(torch.rand(1, 3, 32, 32))
    assert computed


def test_a_small_net_on_scattering_maps_learns_and_is_released_whole(tmp_path):
    splits = DataSplits(train=bright_and_dark(300, seed=1), val=None, test=bright_and_dark(100, seed=2))
    recipe = load_recipe("fast/scatter-cnn")
    changes = {"model.options": {"width": 8}, "training.batch_size": 100, "training.num_steps": 30}
    changes |= {"privacy.epsilon": 20.0, "privacy.delta": 1e-3, "training.seed": 0}
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        recipe = with_settings(recipe, changes)
        result = train(recipe, out=tmp_path / "run", data=splits, ledger=ledger)
    assert result.scores.accuracy > 0.8
    loaded = sfumato.load(tmp_path / "run")
    predicted = loaded.logits(splits.test.images).argmax(1)
    assert (predicted == splits.test.labels).double().mean().item() == pytest.approx(result.scores.accuracy)
    assert not loaded.model.centre.any()  # this recipe releases no mean
    prepared = prepare(recipe, data=splits)
    assert not prepared.in_closed_form  # the engine's work


@pytest.mark.parametrize("name", ["patches", "scatter", "patches_scatter", "efficientnet_lite0_features"])
def test_writing_is_not_averaged_with_its_mirror_image(name):
    known = replace(bright_and_dark(4, seed=1), name="mnist")
    other = replace(known, name="photographs")
    recipe = with_settings(recipe_for(), {"model.name": name, "model.options": {}})
    assert with_image_options(recipe, known).model.options["mirror"] is False
    assert "mirror" not in with_image_options(recipe, other).model.options  # as the model has it
    said = with_settings(recipe, {"model.options": {"mirror": True}})
    assert with_image_options(said, known).model.options["mirror"] is True


def test_a_model_without_fixed_features_is_refused():
    recipe = with_settings(recipe_for(), {"model.name": "lenet", "model.options": {}})
    splits = DataSplits(train=bright_and_dark(20, seed=1), val=None, test=None)
    with pytest.raises(ConfigError, match="no-fixed-features"):
        prepare(recipe, data=splits)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model.options": {"num_layers": 3}}, "bad-model-option"),
        ({"model.options": {"spread": -1.0}}, "bad-model-option"),
        ({"model.options": {"grid": 50}}, "bad-model-option"),
        ({"model.options": {"in_channels": 3}}, "unknown-model-option"),
        ({"model.options": {"image_size": 5}}, "image-too-small"),
        ({"features.mean_noise_multiplier": 1e-320}, "bad-value"),
        ({"features.seed": 10**30}, "bad-value"),
        ({"model.name": "scatter_cnn", "model.options": {"image_size": 2}}, "image-too-small"),
        ({"model.name": "scatter_cnn", "model.options": {"width": 10**23}}, "bad-model-option"),
        ({"augmentation.views": 4}, "fixed-features"),  # as are mean and std: they would be ignored
        ({"data.mean": [0.5] * 3}, "fixed-features"),
        ({"data.std": [1.0] * 3}, "fixed-features"),
    ],
)
def test_what_cannot_be_is_refused_with_a_code(changes, code):
    splits = DataSplits(train=bright_and_dark(20, seed=1), val=None, test=None)
    with pytest.raises((ConfigError, ModelError)) as caught:
        prepare(recipe_for(**{"privacy.delta": 1e-2} | changes), data=splits)
    assert caught.value.code == code


def test_more_patches_than_were_looked_at_and_a_huge_budget_are_no_trouble():
    splits = DataSplits(train=bright_and_dark(20, seed=1), val=None, test=None)
    many = {"num_layers": 1, "num_patches": 1000, "num_directions": 40, "grid": 1}
    changes = {"model.options": many, "features.num_images": 50, "privacy.epsilon": 1000.0}
    assert prepare(recipe_for(**{"privacy.delta": 1e-2} | changes), data=splits).num_steps > 10


def test_heads_that_are_not_plain_are_left_to_the_engine_or_refused():
    splits = DataSplits(train=bright_and_dark(20, seed=1), val=None, test=None)

    def prepared(head):
        model = create_model("patches", num_classes=2, **SMALL)
        model.head = head
        return prepare(recipe_for(**{"privacy.delta": 1e-2}), data=splits, model=model)

    for head in (torch.nn.Linear(40, 2, bias=False), torch.nn.Sequential(torch.nn.Linear(40, 2))):
        ready = prepared(head)
        assert not ready.in_closed_form
    plain = prepared(torch.nn.Linear(40, 2))
    assert plain.in_closed_form
    with pytest.raises(ModelError, match="wrong-output-shape"):
        prepared(torch.nn.Linear(40, 5))


def test_patients_are_no_images_even_if_one_image_of_each_counts():
    patients = torch.tensor([0, 0, 0, 1, 2])
    data = ImageSet(
        images=torch.zeros(5, 1, 2, 2, dtype=torch.uint8),
        labels=torch.zeros(5, dtype=torch.int64),
        classes=("a", "b"),
        patients=patients,
        name="x",
        fingerprint="f",
    )
    assert not Units.patients(data, max_images=1).are_images
    assert Units.images(data).are_images


def test_an_estimate_says_that_features_are_still_to_be_fitted_and_not_once_they_are():
    splits = DataSplits(train=bright_and_dark(60, seed=1), test=bright_and_dark(20, seed=2))
    before, after = Watcher(), Watcher()
    prepare(recipe_for(), data=splits, rows=False, observer=before)
    prepare(recipe_for(), data=splits)  # fits and keeps them
    prepare(recipe_for(), data=splits, rows=False, observer=after)
    said = [text for text in before.notes if "draws 80 images for them first, about 1 min" in text]
    assert len(said) == 1
    assert after.notes == []  # control


@pytest.mark.parametrize("patients", [False, True])
def test_an_estimate_computes_no_features_and_fits_none(tmp_path, patients):
    splits = DataSplits(
        train=bright_and_dark(60, seed=1, patients=patients), test=bright_and_dark(20, seed=2)
    )
    recipe = recipe_for(**({"privacy.unit": "patient"} if patients else {}))
    prepared = prepare(recipe, data=splits, rows=False)
    cost = estimate(prepared)
    assert not list((tmp_path / "cache").rglob("*.npy")) + list((tmp_path / "cache").rglob("extractor*"))
    assert prepared.views.features.is_meta
    assert prepared.views.features.shape == prepare(recipe, data=splits).views.features.shape
    assert list((tmp_path / "cache").rglob("*.npy"))  # the control: a run computes and keeps them
    assert 0 < cost.feature_seconds < cost.seconds
    assert cost.microbatch_size == cost.rows_per_step  # rows are small: all at once


def test_an_estimate_of_a_last_layer_computes_no_rows_either(tmp_path):
    splits = DataSplits(train=bright_and_dark(60, seed=1), test=bright_and_dark(20, seed=2))
    settings = {"model.trained": "last", "privacy.epsilon": 8.0, "privacy.delta": 1e-3}
    settings |= {"data.image_size": None, "model.options.input_size": 32}
    recipe = with_settings(load_recipe("finetune/efficientnet-lite0"), settings)
    prepared = prepare(recipe, data=splits, rows=False)
    assert prepared.views.features.is_meta
    assert estimate(prepared).feature_seconds > 0
    assert not list((tmp_path / "cache").rglob("*.npy"))
