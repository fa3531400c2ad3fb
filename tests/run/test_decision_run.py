"""Class counts and thresholds of a run: paid for in the plan, drawn once, told in words, and used."""

from __future__ import annotations

import json

import pytest
import torch

from sfumato.data import DataSplits, ImageSet
from sfumato.errors import ConfigError, PrivacyError
from sfumato.ledger.ledger import Ledger
from sfumato.release.release import load
from sfumato.run.planning import build_plan
from sfumato.run.session import train
from sfumato.run.state import load_state
from small_runs import Watcher, small_recipe


def shades(count, *, seed, share=0.75, patients=None):
    """Dark and bright images, of which ``share`` are bright."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(count) % 100 < 100 * share).long()
    noise = torch.randint(0, 120, (count, 1, 8, 8), generator=generator)
    images = (labels.view(-1, 1, 1, 1) * 60 + noise).clamp(0, 255).to(torch.uint8)
    owners = None if patients is None else torch.arange(count) % patients
    return ImageSet(images, labels, ("dark", "bright"), owners, "shades")


def splits(*, val=0, patients=None):
    return DataSplits(
        train=shades(200, seed=1, patients=patients),
        val=shades(val, seed=3, share=0.5) if val else None,
        test=shades(60, seed=2, share=0.5),
    )


def small(**changes):
    settings = {"decision__class_counts_noise_multiplier": 5.0, "decision__threshold_noise_multiplier": 5.0}
    return small_recipe(training__num_steps=6, **{**settings, **changes})


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "ledger.sqlite") as opened:
        yield opened


def records(ledger):
    return ledger.records(splits().train.fingerprint)


def noises(plan):
    return sorted(event.noise_multiplier for event in plan.extra_events)


def test_what_a_run_releases_is_in_its_plan_its_ledger_and_its_statement(tmp_path, ledger):
    recipe = small(data__class_counts="released", decision__threshold="released", training__seed=3)
    result = train(recipe, out=tmp_path / "run", data=splits(), ledger=ledger)
    plan = records(ledger)[0].plan
    assert noises(plan) == [5.0, 5.0]
    assert plan.epsilon <= 8
    assert result.privacy["epsilon"] == plan.epsilon
    assert [release["what"] for release in result.privacy["releases"]] == ["class counts", "score histogram"]
    assert "the number of images of each class was released once" in result.privacy["statement"]
    assert "a histogram of the trained model's scores" in result.privacy["statement"]
    alone = build_plan(small(), num_units=200)
    assert plan.noise_multiplier > alone.noise_multiplier  # the steps get less of the budget
    released = load(tmp_path / "run")
    shift = released.decision.shift
    assert shift[0] == pytest.approx(-shift[1])
    assert 0.3 < shift[0] < 0.9  # log(3) / 2 but for the noise
    assert released.decision.threshold != 0.5


def test_released_counts_are_drawn_once_even_if_the_run_is_interrupted(tmp_path, ledger):
    recipe = small(data__class_counts="released", training__class_weights="balanced")
    out = tmp_path / "run"
    with pytest.raises(RuntimeError, match="killed"):
        train(recipe, out=out, data=splits(), ledger=ledger, observer=Watcher(crash_after=3))
    before = load_state(out / "state").values["released"]
    assert before["class_counts"] is not None
    train(recipe, out=out, data=splits(), ledger=ledger, resume=True)
    assert load_state(out / "state").values["released"] == before
    first = json.loads((out / "release/config.json").read_text())["decision"]
    train(recipe, out=out, data=splits(), ledger=ledger, resume=True)
    assert json.loads((out / "release/config.json").read_text())["decision"] == first
    assert load(out).decision.shift == pytest.approx((0, 0))  # the weights have balanced it already


def test_a_threshold_is_drawn_once_even_if_the_records_are_written_anew(tmp_path, ledger):
    recipe = small(decision__threshold="released")
    out = tmp_path / "run"
    train(recipe, out=out, data=splits(patients=50), ledger=ledger)
    first, drawn = (
        load(out).decision.threshold,
        load_state(out / "state").values["released"]["score_histogram"],
    )
    train(recipe, out=out, data=splits(patients=50), ledger=ledger, resume=True)
    assert load(out).decision.threshold == first
    # the threshold is one of a few: two draws may agree on it, never on the histogram
    assert load_state(out / "state").values["released"]["score_histogram"] == drawn


def test_a_release_that_was_not_planned_is_refused_and_nothing_is_spent(tmp_path, ledger, monkeypatch):
    monkeypatch.setattr("sfumato.run.planning.private_releases", lambda recipe: ())
    for recipe in (small(data__class_counts="released"), small(decision__threshold="released")):
        with pytest.raises(PrivacyError, match="uncounted-release"):
            train(recipe, out=tmp_path / "run", data=splits(), ledger=ledger)
    assert not (tmp_path / "run" / "release").exists()


def test_spending_is_on_record_before_anything_is_counted(tmp_path, ledger, monkeypatch):
    spent = []

    def watched(*arguments, **settings):
        spent.append(records(ledger)[0].reserved_steps)
        raise RuntimeError("as if killed")

    monkeypatch.setattr("sfumato.run.decision.noisy_counts", watched)
    with pytest.raises(RuntimeError, match="killed"):
        train(small(data__class_counts="released"), out=tmp_path / "run", data=splits(), ledger=ledger)
    assert spent == [1]


def test_public_validation_images_choose_threshold_and_temperature_for_nothing(tmp_path, ledger):
    recipe = small(data__val_is_public=True, data__prevalence=0.75, training__seed=3)
    train(recipe, out=tmp_path / "run", data=splits(val=100), ledger=ledger)
    decision = load(tmp_path / "run").decision
    assert decision.threshold != 0.5
    assert decision.temperature != 1
    assert noises(records(ledger)[0].plan) == []
    private = small(data__prevalence=0.75, training__seed=3)
    train(private, out=tmp_path / "other", data=splits(val=100), ledger=ledger)
    untouched = load(tmp_path / "other").decision
    assert (untouched.threshold, untouched.temperature) == (0.5, 1)


def test_without_privacy_nothing_is_hidden_by_noise(tmp_path, ledger):
    recipe = small(data__class_counts="released", decision__threshold="released", privacy__enabled=False)
    recipe = recipe.__class__(**{**recipe.__dict__, "privacy": type(recipe.privacy)(enabled=False)})
    train(recipe, out=tmp_path / "run", data=splits(), ledger=ledger)
    assert load(tmp_path / "run").decision.shift == pytest.approx((0.5493, -0.5493), abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"training__class_weights": "balanced"}, "no-prevalence"),
        ({"decision__prevalence_at_use": 0.1}, "no-prevalence"),
        ({"data__prevalence": 0.7, "data__class_counts": "released"}, "prevalence-twice"),
        ({"data__prevalence": [0.2, 0.3, 0.5]}, "bad-prevalence"),
        ({"training__class_weights": [1.0, 2.0, 3.0]}, "bad-class-weights"),
        ({"decision__positive": "grey"}, "unknown-positive"),
        ({"decision__threshold": "public"}, "private-validation"),
    ],
)
def test_decisions_that_cannot_be_made_are_refused_before_anything_is_spent(tmp_path, ledger, changes, code):
    with pytest.raises((ConfigError, PrivacyError), match=code):
        train(small(**changes), out=tmp_path / "run", data=splits(), ledger=ledger)
    assert records(ledger) == []
