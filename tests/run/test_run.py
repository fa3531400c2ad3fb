"""Whole runs: resumable, refusing what they must, and leaving behind only what they may."""

from __future__ import annotations

import dataclasses
import json
import stat

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sfumato.doctor import examine_plan
from sfumato.errors import ConfigError, ModelError, PrivacyError, RunError, SfumatoError
from sfumato.ledger.ledger import Cap, Ledger
from sfumato.privacy.plan import Plan
from sfumato.recipes.recipe import with_settings
from sfumato.run.planning import default_delta
from sfumato.run.prepare import prepare
from sfumato.run.publish import CUSTOM_MODEL
from sfumato.run.session import train
from small_runs import SmallNet, Watcher, small_recipe, small_set, small_splits


@pytest.fixture(autouse=True)
def own_ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def read(path):
    return json.loads(path.read_text())


def test_a_run_learns_and_leaves_exactly_its_files(tmp_path):
    out = tmp_path / "run"
    result = train(small_recipe(training__num_steps=20), out=out, data=small_splits())
    assert result.scores.accuracy > 0.5  # chance is a third
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {
        "recipe.toml",
        "resolved.json",
        "metrics.jsonl",
        "environment.json",
        "report.html",
        "scores.json",
        "release/model.safetensors",
        "release/config.json",
        "release/privacy.json",
        "release/README.md",
        "state/state.safetensors",
        "state/sensitive.jsonl",
        "state/spending.json",
        "state/links.safetensors",
        "state/filing.json",
        "state/lock",
    }
    assert stat.S_IMODE((out / "state").stat().st_mode) == 0o700
    privacy = read(out / "release/privacy.json")
    needed = "epsilon delta unit neighbouring accountant noise_multiplier clip_norm sampling_rate num_steps"
    assert set((needed + " num_examples mu_gdp releasable statement").split()) <= set(privacy)
    assert privacy["releasable"] is True
    assert 7.9 < privacy["epsilon"] <= 8.0


def test_public_records_hold_nothing_computed_from_private_images(tmp_path):
    train(small_recipe(), out=tmp_path / "run", data=small_splits())
    metrics = lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 9))
    public = {"step", "epsilon", "learning_rate", "test_accuracy", "test_loss"}
    assert set().union(*metrics) == public
    private = lines(tmp_path / "run/state/sensitive.jsonl")
    assert {"loss", "median_norm", "clipped_share"} <= set(private[0])
    page = (tmp_path / "run/report.html").read_text()
    assert "median_norm" not in page


@pytest.mark.parametrize("optimizer", ["SGD", "NAdam"])
def test_a_seeded_run_broken_off_and_resumed_equals_the_whole_one_bit_for_bit(tmp_path, optimizer):
    recipe = small_recipe(
        training__seed=3, training__optimizer=optimizer, training__learning_rate=0.05, augmentation__views=2
    )
    train(recipe, out=tmp_path / "whole", data=small_splits())
    for step in (2, 5):
        watcher = Watcher(crash_after=step)
        with pytest.raises(RuntimeError, match="as if killed"):
            train(recipe, out=tmp_path / "parts", data=small_splits(), observer=watcher, resume=step > 2)
    train(recipe, out=tmp_path / "parts", data=small_splits(), resume=True)
    other = with_settings(recipe, {"training.seed": 4})
    train(other, out=tmp_path / "other", data=small_splits())
    whole, parts, control = (
        load_file(tmp_path / name / "release/model.safetensors") for name in ("whole", "parts", "other")
    )
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    assert not all(torch.equal(whole[key], control[key]) for key in whole)
    kept = [
        [line.get("test_accuracy") for line in lines(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "parts")
    ]
    assert kept[0] == kept[1]


def test_resuming_redoes_lost_steps_without_losing_or_repeating_a_line(tmp_path):
    recipe = small_recipe(performance__save_every_seconds=1e9)  # nothing is saved but what has been scored
    with pytest.raises(RuntimeError):
        train(recipe, out=tmp_path / "run", data=small_splits(), observer=Watcher(crash_after=5))
    watcher = Watcher()
    result = train(recipe, out=tmp_path / "run", data=small_splits(), observer=watcher, resume=True)
    assert watcher.start_step == 4  # its scores were seen, so it may not be taken again; step 5 was not
    assert watcher.notes[0].startswith("1 step is done again")
    assert [line["step"] for line in lines(tmp_path / "run/metrics.jsonl")] == list(range(1, 9))
    assert result.privacy["num_steps"] == 8
    assert result.privacy["epsilon"] <= 8.0


def test_an_interrupt_saves_the_step_and_a_finished_run_can_be_resumed(tmp_path):
    import os
    import signal

    class Interrupting(Watcher):
        def stepped(self, record, epsilon):
            super().stepped(record, epsilon)
            if record.step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    recipe = small_recipe(performance__save_every_seconds=1e9)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, out=tmp_path / "run", data=small_splits(), observer=Interrupting())
    watcher = Watcher()
    train(recipe, out=tmp_path / "run", data=small_splits(), observer=watcher, resume=True)
    assert watcher.start_step == 3
    assert not any("done again" in str(note) for note in watcher.notes)  # the interrupt saved its step
    again = train(recipe, out=tmp_path / "run", data=small_splits(), resume=True)
    assert again.num_steps == 8
    assert [line["step"] for line in lines(tmp_path / "run/metrics.jsonl")] == list(range(1, 9))


def test_a_changed_recipe_is_refused_on_resume_with_its_keys(tmp_path):
    recipe = small_recipe()
    with pytest.raises(RuntimeError):
        train(recipe, out=tmp_path / "run", data=small_splits(), observer=Watcher(crash_after=2))
    changed = with_settings(recipe, {"privacy.clip_norm": 2.0, "training.learning_rate": 3.0})
    with pytest.raises(
        RunError, match=r"privacy.clip_norm was 1.0, now 2.0, training.learning_rate"
    ) as caught:
        train(changed, out=tmp_path / "run", data=small_splits(), resume=True)
    assert caught.value.code == "changed-recipe"
    faster = with_settings(recipe, {"performance.microbatch_size": 8})
    train(faster, out=tmp_path / "run", data=small_splits(), resume=True)


def test_changed_images_are_refused_on_resume(tmp_path):
    with pytest.raises(RuntimeError):
        train(small_recipe(), out=tmp_path / "run", data=small_splits(), observer=Watcher(crash_after=2))
    splits = small_splits()
    splits.train.images[0] = 255 - splits.train.images[0]
    other = dataclasses.replace(
        splits, train=dataclasses.replace(splits.train, content_ids=None, fingerprint="")
    )
    with pytest.raises(RunError) as caught:
        train(small_recipe(), out=tmp_path / "run", data=other, resume=True)
    assert caught.value.code == "changed-data"


def test_a_run_is_never_overwritten_and_none_is_resumed_out_of_nothing(tmp_path):
    train(small_recipe(), out=tmp_path / "run", data=small_splits())
    with pytest.raises(RunError) as caught:
        train(small_recipe(), out=tmp_path / "run", data=small_splits())
    assert caught.value.code == "run-exists"
    with pytest.raises(RunError) as caught:
        train(small_recipe(), out=tmp_path / "nothing", data=small_splits(), resume=True)
    assert caught.value.code == "no-run"
    assert not (tmp_path / "nothing").exists()


class BatchNormNet(SmallNet):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)


@pytest.mark.parametrize(
    ("changes", "model", "kind", "code"),
    [
        ({"privacy__epsilon": None}, None, ConfigError, "no-budget"),
        ({"privacy__noise_multiplier": 1.0}, None, ConfigError, "contradictory-budget"),
        ({"privacy__epsilon": -1.0}, None, SfumatoError, "epsilon-out-of-range"),
        ({"privacy__delta": 2.0}, None, SfumatoError, "delta-out-of-range"),
        ({"privacy__delta": 0.5}, None, PrivacyError, "delta-too-large"),
        ({"training__batch_size": 97}, None, ConfigError, "batch-size-out-of-range"),
        ({"training__num_steps": None}, None, ConfigError, "underdetermined-budget"),
        ({"privacy__unit": "patient"}, None, SfumatoError, "no-patients"),
        ({"schedule__name": "plateau"}, None, PrivacyError, "private-validation"),
        ({"training__early_stopping": 2}, None, PrivacyError, "private-validation"),
        ({"model__name": "resnet10"}, None, ConfigError, "unknown-model"),
        ({"model__options": {"widht": 3}}, None, ConfigError, "unknown-model-option"),
        ({"model__options": {"width": 4, "norm": "batch"}}, None, PrivacyError, "mixes-examples"),
        ({"training__optimizer": "Adan"}, None, ConfigError, "unknown-optimizer"),
        ({"performance__device": "abacus"}, None, ConfigError, "no-device"),
        ({"performance__device": "mps"}, None, ConfigError, "device-without-float64"),
        ({"model__name": "densenet121", "model__options": {}}, None, ModelError, "wrong-image-shape"),
        ({"model__name": "lenet", "model__options": {}}, None, ModelError, "image-too-small"),
        ({"data__mean": [0.5, 0.5]}, None, ConfigError, "bad-normalisation"),
        ({"data__std": [0.0]}, None, ConfigError, "bad-normalisation"),
        ({"augmentation__padding": 9, "augmentation__views": 1}, None, ConfigError, "bad-augmentation"),
        ({"data__mean": []}, None, ConfigError, "bad-normalisation"),
        ({"model__options": {"width": 60_000}}, None, ConfigError, "model-too-large"),
        ({"model__name": "patches", "model__options": {}}, None, ConfigError, "no-features-section"),
        ({}, BatchNormNet, PrivacyError, "mixes-examples"),
    ],
)
def test_what_cannot_be_private_is_refused_and_nothing_is_left_behind(tmp_path, changes, model, kind, code):
    with pytest.raises(kind) as caught:
        train(
            small_recipe(**changes),
            out=tmp_path / "runs/run",
            data=small_splits(),
            model=model() if model else None,
        )
    assert caught.value.code == code
    assert not (tmp_path / "runs").exists()


def test_a_cap_refuses_the_run_before_its_first_step(tmp_path):
    with Ledger.open() as ledger:
        fingerprint = small_splits().train.fingerprint
        ledger.set_cap(fingerprint, Cap(unit="image", epsilon=4.0, delta=1e-3), unit="image")
    with pytest.raises(PrivacyError) as caught:
        train(small_recipe(), out=tmp_path / "run", data=small_splits())
    assert caught.value.code == "over-cap"
    assert not (tmp_path / "run").exists()
    train(small_recipe(privacy__epsilon=3.0), out=tmp_path / "run", data=small_splits())


def test_a_large_delta_can_be_forced_and_is_then_stated(tmp_path):
    recipe = small_recipe(privacy__delta=0.02)
    result = train(recipe, out=tmp_path / "run", data=small_splits(), force=True)
    assert "accepted explicitly" in result.privacy["statement"]


def test_a_seed_makes_the_run_unreleasable_everywhere(tmp_path):
    result = train(small_recipe(training__seed=1), out=tmp_path / "run", data=small_splits())
    assert result.privacy["releasable"] is False
    for name in ("release/README.md", "release/privacy.json", "report.html"):
        assert "NOT RELEASABLE" in (tmp_path / "run" / name).read_text()
    assert_labelled(tmp_path / "run", "NOT RELEASABLE", releasable=False)
    train(small_recipe(), out=tmp_path / "secure", data=small_splits())
    assert_labelled(tmp_path / "secure", "ε = 8", releasable=True)


def assert_labelled(folder, words, *, releasable):
    """Every JSON file that can be copied alone says whether the model may be released."""
    for name in ("scores.json", "release/config.json"):
        label = read(folder / name)
        assert label["releasable"] is releasable
        assert words in label["guarantee"]
    for name in ("release/privacy.json", "state/spending.json"):
        assert read(folder / name)["releasable"] is releasable


def test_no_privacy_is_said_everywhere(tmp_path):
    recipe = small_recipe(privacy__enabled=False, training__learning_rate=0.1)
    result = train(recipe, out=tmp_path / "run", data=small_splits())
    assert result.privacy["epsilon"] is None
    assert result.privacy["releasable"] is False
    for name in ("release/README.md", "release/privacy.json", "report.html"):
        assert "NO PRIVACY" in (tmp_path / "run" / name).read_text()
    assert_labelled(tmp_path / "run", "NO PRIVACY", releasable=False)
    assert "The guarantee covers" not in (tmp_path / "run/release/README.md").read_text()
    assert all(line["epsilon"] is None for line in lines(tmp_path / "run/metrics.jsonl"))
    train(small_recipe(), out=tmp_path / "private", data=small_splits())
    assert "NO PRIVACY" not in (tmp_path / "private/report.html").read_text()
    assert "The guarantee covers" in (tmp_path / "private/release/README.md").read_text()


def test_batch_norm_is_allowed_without_privacy(tmp_path):
    recipe = small_recipe(privacy__enabled=False, training__learning_rate=0.1)
    result = train(recipe, out=tmp_path / "run", data=small_splits(), model=BatchNormNet())
    assert result.privacy["releasable"] is False


def test_patients_are_the_units_of_the_statement(tmp_path):
    recipe = small_recipe(privacy__unit="patient", training__batch_size=12, privacy__delta=1e-2)
    result = train(recipe, out=tmp_path / "run", data=small_splits(patients=24))
    assert (result.privacy["unit"], result.privacy["num_examples"]) == ("patient", 24)
    assert "One patient is protected with all their images" in result.privacy["statement"]


def test_public_validation_images_may_steer_and_stopping_early_counts_every_step(tmp_path):
    recipe = small_recipe(
        data__val_is_public=True,
        training__early_stopping=1,
        training__evaluate_every=1,
        training__num_steps=40,
        training__learning_rate=30.0,
    )
    result = train(recipe, out=tmp_path / "run", data=small_splits(val=30))
    assert result.num_steps < 40
    assert result.privacy["num_steps"] == 40
    assert "stopped early" in result.privacy["statement"]
    assert "val_accuracy" in lines(tmp_path / "run/metrics.jsonl")[0]
    again = train(recipe, out=tmp_path / "run", data=small_splits(val=30), resume=True)
    assert again.num_steps == result.num_steps


def test_scores_on_held_out_private_images_stay_in_the_state(tmp_path):
    train(small_recipe(data__holdout=0.3), out=tmp_path / "run", data=held_out())
    metrics = lines(tmp_path / "run/metrics.jsonl")
    assert not any("accuracy" in key for line in metrics for key in line)
    assert not (tmp_path / "run/scores.json").exists()
    assert (tmp_path / "run/state/scores.json").exists()
    assert "Not stated" in (tmp_path / "run/release/README.md").read_text()
    assert any("val_accuracy" in line for line in lines(tmp_path / "run/state/sensitive.jsonl"))


def test_scores_on_held_out_private_images_do_not_change_a_constant_learning_rate(tmp_path):
    """Only a plateau looks at scores, and only at those of public images."""
    settings = {"training__evaluate_every": 1, "training__num_steps": 16, "training__learning_rate": 30.0}
    settings |= {"schedule__patience_epochs": 1.0, "performance__save_every_seconds": 1e9}

    def rates(name, data, **changes):
        train(small_recipe(**settings | changes), out=tmp_path / name, data=data)
        return {line["learning_rate"] for line in lines(tmp_path / name / "metrics.jsonl")}

    assert rates("held-out", held_out(), data__holdout=0.3) == {30.0}
    public = {"schedule__name": "plateau", "data__val_is_public": True}
    assert len(rates("plateau", small_splits(val=30), **public)) > 1  # the control: such scores do stagnate


def held_out():
    return dataclasses.replace(small_splits(), val=small_set(30, seed=8))


def test_weights_that_are_no_longer_numbers_stop_the_run(tmp_path):
    recipe = small_recipe(training__learning_rate=3e38, training__batch_size=1)
    with pytest.raises(RunError) as caught:
        train(recipe, out=tmp_path / "run", data=small_splits())
    assert caught.value.code == "diverged"
    huge = small_recipe(training__learning_rate=1e20)  # finite weights, but a loss beyond all numbers
    train(huge, out=tmp_path / "huge", data=small_splits())
    assert read(tmp_path / "huge/scores.json")["loss"] is None


def test_a_full_disk_stops_the_run_with_a_code_and_it_goes_on_afterwards(tmp_path, monkeypatch):
    import sfumato.run.state as state_module

    calls, real = [], state_module.save_file

    def full_later(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(state_module, "save_file", full_later)
    with pytest.raises(RunError) as caught:
        train(small_recipe(), out=tmp_path / "run", data=small_splits())
    assert caught.value.code == "cannot-save"
    result = train(small_recipe(), out=tmp_path / "run", data=small_splits(), resume=True)
    assert result.num_steps == 8
    assert [line["step"] for line in lines(tmp_path / "run/metrics.jsonl")] == list(range(1, 9))


def test_two_processes_cannot_work_on_one_run(tmp_path):
    from sfumato.release.run_folder import RunFolder

    folder = RunFolder(tmp_path / "run")
    with folder.opened(""), pytest.raises(RunError) as caught, folder.opened(""):
        pass
    assert caught.value.code == "run-in-use"


def test_the_default_delta_is_a_power_of_ten_that_the_doctor_does_not_call_weak():
    sizes = (1, 5, 9, 10, 99, 1000, 5000, 9000, 50_000, 60_000)
    deltas = [default_delta(n) for n in sizes]
    assert deltas == [0.1, 0.1, 0.01, 0.01, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5, 1e-6]
    for size, delta in zip(sizes, deltas, strict=True):
        assert delta <= 0.5 / size < 10.0001 * delta
    plan = Plan(
        num_examples=9000, batch_size=90, num_steps=10, noise_multiplier=2.0, delta=default_delta(9000)
    )
    assert examine_plan(plan) == []
    assert examine_plan(dataclasses.replace(plan, delta=1e-4)) != []  # the control: the next power of ten


def test_microbatch_size_is_chosen_or_taken(tmp_path):
    assert prepare(small_recipe(performance__microbatch_size=5), data=small_splits()).max_rows == 5
    assert prepare(small_recipe(), data=small_splits()).max_rows >= 64


def test_labels_and_patients_may_not_change_between_start_and_resume(tmp_path):
    recipe = small_recipe(privacy__unit="patient", training__batch_size=12, privacy__delta=1e-2)
    data = small_splits(patients=24)
    with pytest.raises(RuntimeError):
        train(recipe, out=tmp_path / "run", data=data, observer=Watcher(crash_after=4))
    images = data.train
    regrouped = dataclasses.replace(images, patients=torch.arange(96) // 4)
    relabelled = dataclasses.replace(images, labels=images.labels.roll(1))
    for other in (regrouped, relabelled):
        with pytest.raises(RunError) as caught:
            train(recipe, out=tmp_path / "run", data=dataclasses.replace(data, train=other), resume=True)
        assert caught.value.code == "changed-data"
    train(recipe, out=tmp_path / "run", data=data, resume=True)  # the control


def test_a_callers_network_never_holds_steps_that_were_not_saved(tmp_path):
    recipe = small_recipe(performance__save_every_seconds=1e9, training__evaluate_every=100)
    net = SmallNet()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    watcher = Watcher(crash_after=6)
    with pytest.raises(RuntimeError):
        train(recipe, out=tmp_path / "run", data=small_splits(), model=net, observer=watcher)
    assert len(watcher.records) == 6  # steps were taken, and are taken again
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    train(recipe, out=tmp_path / "run", data=small_splits(), model=net, resume=True)
    released = load_file(tmp_path / "run/release/model.safetensors")
    assert all(torch.equal(value, released[name]) for name, value in net.state_dict().items())
    assert not torch.equal(net.head.weight, before["head.weight"])


def test_the_statement_says_what_an_own_network_brings_along(tmp_path):
    for number, model in enumerate((SmallNet(), None)):
        recipe = small_recipe(training__num_steps=2)
        result = train(recipe, out=tmp_path / str(number), data=small_splits(), model=model)
        assert (CUSTOM_MODEL in result.privacy["statement"]) == (model is not None)
        assert (CUSTOM_MODEL in (tmp_path / str(number) / "release/README.md").read_text()) == (
            model is not None
        )


def test_a_network_that_cannot_be_copied_is_refused(tmp_path):
    net = SmallNet()
    net.history = net.head.weight * 2  # computed, with a gradient history
    with pytest.raises(ModelError) as caught:
        train(small_recipe(), out=tmp_path / "run", data=small_splits(), model=net)
    assert caught.value.code == "cannot-be-copied"
