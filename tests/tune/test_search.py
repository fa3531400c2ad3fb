"""Whole searches on small images: what comes out, what is on record or hidden, what a crash leaves."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest

from sfumato.errors import PrivacyError, RunError
from sfumato.ledger.ledger import Ledger
from sfumato.ledger.totals import total_of
from sfumato.release.release import read_description
from sfumato.tune import TuneSettings, tune
from sfumato.tune.ranges import parse_ranges
from small_runs import Watcher, small_recipe, small_splits

DATA = small_splits(train=240, test=30)


def settings(strategy: str = "scaled", over: str = "log:0.1:2", **changes: object) -> TuneSettings:
    # whole-set steps: their accounting is exact and takes no time
    recipe = small_recipe(
        training__num_steps=6, privacy__epsilon=6.0, privacy__sampling="full", training__batch_size=None
    )
    ranges = parse_ranges([f"training.learning_rate={over}"], (), recipe)
    values = {"num_trials": 3, "holdout": 0.2, **changes}
    return TuneSettings(recipe=recipe, ranges=ranges, strategy=strategy, **values)


@pytest.fixture(autouse=True)
def _without_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor has tests of its own, and would take most of the time here."""
    monkeypatch.setattr("sfumato.run.prepare.examine_network", lambda *arguments, **named: [])


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(tmp_path / "ledger.sqlite")


def spent(ledger: Ledger) -> float:
    records = ledger.records(DATA.train.fingerprint, unit="image")
    return total_of(records, unit="image", delta=1e-3).epsilon


def test_a_scaled_search_is_one_entry_and_its_statement_is_the_whole(tmp_path: Path, ledger: Ledger) -> None:
    told: list[str] = []
    result = tune(settings(), out=tmp_path / "out", data=DATA, ledger=ledger, tell=told.append)
    found = result.found
    assert found is not None
    assert len(told) == 3
    assert 0.97 * 6 < found.epsilon <= 6.0
    (parent,) = ledger.records(DATA.train.fingerprint)
    children = ledger.children(parent.run_id)
    assert sorted(child.label for child in children) == ["0000", "0001", "0002", "run"]
    assert spent(ledger) == pytest.approx(found.epsilon)
    _, privacy = read_description(found.run / "release")
    assert privacy["search"]["strategy"] == "scaled"
    assert privacy["epsilon"] == found.epsilon
    assert privacy["filing"]["earlier_runs"] == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "All trials, best first" in page
    # the same call again reads what is there
    again = tune(settings(), out=tmp_path / "out", data=DATA, ledger=ledger, tell=told.append)
    assert again.found == found
    assert len(told) == 3
    assert len(ledger.children(parent.run_id)) == 4
    with pytest.raises(RunError, match="changed-search"):
        tune(settings(num_trials=4), out=tmp_path / "out", data=DATA, ledger=ledger)


def test_random_stopping_lets_out_the_best_trial_and_nothing_of_the_others(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sfumato.tune.session.draw_trials", lambda *drawn: 3)  # so that some lose
    out = tmp_path / "out"
    found = tune(settings("random-stopping"), out=out, data=DATA, ledger=ledger).found
    assert found is not None
    scores = {
        place.stem: json.loads(place.read_text())["score"] for place in (out / "state/trials").glob("*.json")
    }
    best = max(scores, key=lambda name: scores[name])
    kept = out / "state" / "trials" / best / "release" / "model.safetensors"
    assert (found.run / "release" / "model.safetensors").read_bytes() == kept.read_bytes()
    assert not (found.run / "state").exists()
    assert list((out / "state" / "trials").glob("*/release")) == [kept.parent]
    (parent,) = ledger.records(DATA.train.fingerprint)
    assert len(ledger.children(parent.run_id)) == len(scores)
    assert spent(ledger) == pytest.approx(found.epsilon)
    planned = json.loads((out / "state" / "tune.json").read_text())["planned_trials"]
    assert planned == len(scores)
    assert stat.S_IMODE((out / "state").stat().st_mode) == 0o700
    shown = "".join(
        place.read_text() for place in (out / "result.json", out / "tune.json", out / "report.html")
    )
    assert "planned_trials" not in shown
    for score in scores.values():
        assert f"{100 * score:.2f} %" not in shown
        assert repr(score) not in shown
    assert "SENSITIVE" in (out / "state" / "report.html").read_text()


@pytest.mark.parametrize("strategy", ["scaled", "random-stopping"])
def test_a_search_that_was_killed_goes_on_and_nothing_is_paid_twice(
    tmp_path: Path, ledger: Ledger, strategy: str
) -> None:
    asked = settings(strategy, num_trials=2)
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="as if killed"):
        tune(asked, out=out, data=DATA, ledger=ledger, observer=Watcher(crash_after=1))
    before = spent(ledger)
    assert before == pytest.approx(6.0, rel=0.03)  # all of it, before the first trial was finished
    (parent,) = ledger.records(DATA.train.fingerprint)
    (begun,) = ledger.children(parent.run_id)
    result = tune(asked, out=out, data=DATA, ledger=ledger)
    assert result.found is not None
    assert spent(ledger) == before
    after = ledger.children(parent.run_id)
    assert begun.run_id in [child.run_id for child in after]  # the very trial went on
    assert len({child.label for child in after}) == len(after)
    planned = json.loads((out / "state" / "tune.json").read_text())["planned_trials"]
    assert len(after) == planned + (strategy == "scaled")


def test_a_copied_search_pays_again_for_what_it_runs_a_second_time(tmp_path: Path, ledger: Ledger) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    asked = settings(num_trials=2)
    with pytest.raises(RuntimeError, match="as if killed"):
        tune(asked, out=out, data=DATA, ledger=ledger, observer=Watcher(crash_after=1))
    shutil.copytree(out, copy)
    tune(asked, out=out, data=DATA, ledger=ledger)
    once = spent(ledger)
    tune(asked, out=copy, data=DATA, ledger=ledger, study="out")
    assert spent(ledger) > 1.2 * once


def test_a_search_over_the_cap_is_refused_with_nothing_recorded(tmp_path: Path, ledger: Ledger) -> None:
    from sfumato.ledger.totals import Cap

    cap = Cap(unit="image", epsilon=5.0, delta=1e-3)
    ids = DATA.train.content_ids
    ledger.set_cap(DATA.train.fingerprint, cap, unit="image", image_ids=ids)
    with pytest.raises(PrivacyError, match="over-cap"):
        tune(settings(), out=tmp_path / "out", data=DATA, ledger=ledger)
    assert ledger.records(DATA.train.fingerprint) == []
    assert not list((tmp_path / "out" / "state" / "trials").iterdir())


def test_an_uncounted_search_says_so_and_every_trial_is_in_the_ledger(tmp_path: Path, ledger: Ledger) -> None:
    found = tune(settings("uncounted", num_trials=2), out=tmp_path / "out", data=DATA, ledger=ledger).found
    assert found is not None
    _, privacy = read_description(found.run / "release")
    assert privacy["uncounted_search"]
    assert privacy["search"] is None
    assert "does NOT count that search" in privacy["statement"]
    assert len(ledger.records(DATA.train.fingerprint)) == 3
    assert spent(ledger) > 1.5 * found.epsilon
    assert "All trials" not in (tmp_path / "out" / "report.html").read_text()


def test_a_search_on_public_images_costs_nothing_and_says_where(tmp_path: Path, ledger: Ledger) -> None:
    asked = settings("public", num_trials=2, search_data="digits", sampler="grid", over="0.25,1")
    found = tune(asked, out=tmp_path / "out", data=DATA, ledger=ledger).found
    assert found is not None
    assert spent(ledger) == pytest.approx(found.epsilon)
    _, privacy = read_description(found.run / "release")
    assert privacy["search"]["strategy"] == "public"
    assert "on public images, scored on images of digits" in privacy["statement"]
    tried = [json.loads(place.read_text()) for place in (tmp_path / "out/state/trials").glob("*.json")]
    assert len(tried) == 2  # each point of the grid


def test_public_images_that_are_private_too_are_refused(tmp_path: Path, ledger: Ledger) -> None:
    from sfumato.data import load_data

    asked = settings("public", num_trials=2, search_data="digits")
    with pytest.raises(PrivacyError, match="private-search-data"):
        tune(asked, out=tmp_path / "out", data=load_data("digits"), ledger=ledger)


def test_a_study_of_another_search_is_refused(tmp_path: Path, ledger: Ledger) -> None:
    storage = f"sqlite:///{tmp_path / 'shared.sqlite'}"
    with pytest.raises(RuntimeError, match="as if killed"):
        tune(
            settings(),
            out=tmp_path / "one",
            data=DATA,
            ledger=ledger,
            storage=storage,
            study="both",
            observer=Watcher(crash_after=1),
        )
    with pytest.raises(RunError, match="other-study"):
        tune(settings(), out=tmp_path / "two", data=DATA, ledger=ledger, storage=storage, study="both")


def test_scores_have_the_noise_that_is_counted(tmp_path: Path) -> None:
    from sfumato.accounting import SampledGaussian
    from sfumato.privacy.search import Search
    from sfumato.randomness import SecureSource
    from sfumato.tune.scoring import noisy_score

    search = Search(
        strategy="scaled", num_trials=2, trial=(SampledGaussian(noise_multiplier=4.0),), scored_on="some"
    )
    source = SecureSource()
    draws = [
        100 * noisy_score(50.0, 100, search=search, noise_multiplier=4.0, source=source) for _ in range(2500)
    ]
    mean = sum(draws) / len(draws)
    spread = (sum((value - mean) ** 2 for value in draws) / len(draws)) ** 0.5
    assert abs(mean - 50) < 0.4
    assert abs(spread - 4.0) < 0.25
    assert abs(spread - 4.5) > 0.25  # the test can tell the difference


def test_the_noise_of_a_score_belongs_to_the_model(tmp_path: Path) -> None:
    from sfumato.tune.scoring import score_source

    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"weights")
    other.write_bytes(b"others")

    def drawn(key: bytes, weights: Path) -> bytes:
        return score_source(key, weights).random_bytes(16, purpose="score of a trial", step=0).tobytes()

    assert drawn(b"k" * 32, one) == drawn(b"k" * 32, one)
    assert len({drawn(b"k" * 32, one), drawn(b"k" * 32, other), drawn(b"l" * 32, one)}) == 3


def test_a_score_belongs_to_the_settings_that_it_was_drawn_for(tmp_path: Path, ledger: Ledger) -> None:
    tune(settings(), out=tmp_path / "out", data=DATA, ledger=ledger)
    with pytest.raises(RunError, match="changed-search"):
        tune(settings(), out=tmp_path / "out", data=DATA, ledger=ledger, study="another")
