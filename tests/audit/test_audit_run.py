"""The audit of one run: canaries are in by their coins, the others pay nothing, and faults are reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import sfumato
import sfumato.noise
import sfumato.run.canaries as run_canaries
from sfumato.audit.run import CanaryScores, audit_run, canary_scores, judge_scores
from sfumato.cli.audit_run import command
from sfumato.data import DataSplits, ImageSet
from sfumato.data.canaries import canary_images
from sfumato.data.generated import dead_leaves
from sfumato.errors import ConfigError, RunError
from sfumato.features.rare_images import rare_images
from sfumato.ledger.ledger import Ledger
from sfumato.privacy.plan import Plan
from sfumato.privacy.sampling_schemes import Poisson
from sfumato.randomness import SecureSource, SeededSource
from sfumato.recipes import load_recipe
from sfumato.recipes.recipe import with_settings
from sfumato.release.run_folder import CANARY_KEY, RunFolder
from sfumato.run.canaries import IMAGES, PROJECTIONS, Projections, RunCanaries, check_room, new_key
from sfumato.run.prepare import prepare
from sfumato.run.session import train
from sfumato.run.state import load_state
from sfumato.training.canaries import Directions, toss_coins
from small_runs import Watcher, small_recipe, small_splits

TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))


def trained(out, *, watcher=None, resume=False, data=None, **changes):
    recipe = small_recipe(**{"audit__canaries": 60, **changes})
    with Ledger.open() as ledger:
        return train(
            recipe, out=out, resume=resume, data=data or small_splits(), ledger=ledger, observer=watcher
        )


def keep_noisy_sums(monkeypatch) -> dict[int, dict[str, torch.Tensor]]:
    """Every noisy sum by its step; one that is taken again replaces the first."""
    seen, observe = {}, RunCanaries.observe

    def kept(self, step, noisy):
        seen[step] = {name: value.clone() for name, value in noisy.items()}
        observe(self, step, noisy)

    monkeypatch.setattr(RunCanaries, "observe", kept)
    return seen


def all_kept(out: Path) -> torch.Tensor:
    """What the run has kept of its canaries, step by step."""
    folder = RunFolder(out)
    kept = Projections(folder.state / PROJECTIONS, num_canaries=60)
    return kept.restored(load_state(folder.state), key=folder.canary_key(), white_box=True)


def straightforward_projections(key, count, model, noisy_sums, clip_norm):
    """One dense vector for each canary, and its product with each whole sum."""
    directions = Directions.draw(key, count, model)
    size = sum(shape.numel() for shape in directions.shapes.values())
    vectors = torch.zeros(count, size, dtype=torch.float64)
    for row, places, signs in zip(vectors, directions.places, directions.signs, strict=True):
        row[places] = signs
        row /= row.norm()
    flat = [torch.cat([noisy[name].flatten() for name in directions.shapes]) for noisy in noisy_sums]
    return torch.stack(flat).double() @ vectors.T / clip_norm


@pytest.mark.parametrize("clip_norm", [1.0, 0.3])
def test_kept_projections_are_those_of_the_noisy_sums_through_an_interruption(
    tmp_path, monkeypatch, clip_norm
):
    seen, out = keep_noisy_sums(monkeypatch), tmp_path / "run"
    settings = {"privacy__clip_norm": clip_norm, "performance__save_every_seconds": 1e9}
    settings["training__evaluate_every"] = 2
    with pytest.raises(RuntimeError, match="as if killed"):
        trained(out, watcher=Watcher(crash_after=6), **settings)
    key = RunFolder(out).canary_key()
    assert all_kept(out).shape == (4, 60)  # later steps are taken again
    first = dict(seen)
    trained(out, resume=True, **settings)
    assert not torch.equal(seen[4]["head.weight"], first[4]["head.weight"])
    assert RunFolder(out).canary_key() == key
    model = prepare(small_recipe(), data=small_splits()).model
    wanted = straightforward_projections(key, 60, model, [seen[step] for step in range(8)], clip_norm)
    kept = all_kept(out).double()
    assert (out / "state" / PROJECTIONS).stat().st_mode & 0o777 == 0o600
    torch.testing.assert_close(kept, wanted, atol=1e-5, rtol=1e-5)
    wrong = straightforward_projections(key + 1, 60, model, [seen[step] for step in range(8)], clip_norm)
    assert (kept - wrong).abs().max() > 0.1  # the test can tell canaries apart


def test_killed_without_warning_a_run_goes_on_with_the_same_canaries(tmp_path):
    program = """
import os, signal, sys
from small_runs import Watcher, small_recipe, small_splits
from sfumato.run.session import train
class Killer(Watcher):
    def stepped(self, record, epsilon):
        if record.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
train(small_recipe(audit__canaries=60), out=sys.argv[1], data=small_splits(), observer=Killer())
"""
    out = tmp_path / "run"
    paths = [str(TESTS), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    done = subprocess.run([sys.executable, "-c", program, str(out)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    before, key = all_kept(out), RunFolder(out).canary_key()
    assert before.shape == (4, 60)
    trained(out, resume=True)
    after = all_kept(out)
    assert after.shape == (8, 60)
    assert torch.equal(after[:4], before)
    assert RunFolder(out).canary_key() == key
    assert audit_run(out).num_members == int(toss_coins(key, 60).sum())
    os.truncate(out / "state" / PROJECTIONS, 100)
    with pytest.raises(RunError, match="damaged-run"):
        audit_run(out)
    os.remove(out / "state" / PROJECTIONS)
    with pytest.raises(RunError, match="damaged-run"):
        audit_run(out)


def test_a_run_goes_on_with_its_own_canaries_or_not_at_all(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(RuntimeError, match="as if killed"):
        trained(out, watcher=Watcher(crash_after=3))
    path = out / "state" / CANARY_KEY
    kept = path.read_text()
    path.write_text(f"{int(kept, 16) ^ 1:064x}\n")
    with pytest.raises(RunError, match="damaged-run"):
        trained(out, resume=True)
    path.unlink()
    with pytest.raises(RunError, match="damaged-run"):
        trained(out, resume=True)
    path.write_text(kept)
    trained(out, resume=True)


def test_the_real_units_are_drawn_noised_and_divided_as_without_canaries(tmp_path):
    """A run with a seed draws the same batches; its plan, statement and account do not know of canaries."""
    with_them, without = tmp_path / "with", tmp_path / "without"
    settings = {"training__seed": 3, "audit__kind": "noise"}
    one = trained(with_them, **settings)
    trained(without, **{**settings, "audit__canaries": 0})
    assert (with_them / "resolved.json").read_text() == (without / "resolved.json").read_text()
    stated = [json.loads((path / "release/privacy.json").read_text()) for path in (with_them, without)]
    for each in stated:
        del each["filing"]["run_id"]  # a random number
    assert stated[0] == stated[1]
    a, b = (load_state(path / "state").values for path in (with_them, without))
    assert {key: a[key] for key in ("plan", "fingerprint", "units")} == {
        key: b[key] for key in ("plan", "fingerprint", "units")
    }
    assert one.privacy["num_examples"] == 96
    spent = [json.loads((path / "state" / "spending.json").read_text()) for path in (with_them, without)]
    assert spent[0]["plan"] == spent[1]["plan"]
    assert spent[0]["fingerprint"] == spent[1]["fingerprint"]


def test_the_key_is_the_owners_and_nothing_of_it_is_released(tmp_path):
    out = tmp_path / "run"
    trained(out, audit__kind="mislabelled")
    audit_run(out)
    key = RunFolder(out).canary_key()
    path = out / "state" / CANARY_KEY
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    forms = [f"{key:064x}".encode(), key.to_bytes(32), str(key).encode()]
    assert any(form in path.read_bytes() for form in forms)
    others = [file for file in out.rglob("*") if file.is_file() and file != path]
    assert len(others) > 8
    assert not [file for file in others for form in forms if form in file.read_bytes()]
    assert {file.name for file in (out / "release").iterdir()} == {
        "model.safetensors",
        "config.json",
        "privacy.json",
        "README.md",
    }


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gradient", {"privacy__unit": "patient", "privacy__max_images_per_patient": 2}),
        ("mislabelled", {"privacy__unit": "patient", "augmentation__views": 2}),
        ("noise", {"augmentation__views": 2}),
    ],
)
def test_every_kind_goes_with_images_patients_and_views(tmp_path, kind, changes):
    data = small_splits(patients=40 if "privacy__unit" in changes else None)
    trained(tmp_path / "run", data=data, audit__kind=kind, training__num_steps=2, **changes)
    result = audit_run(tmp_path / "run")
    assert result.num_canaries == 60
    assert 0 <= result.epsilon <= result.ceiling
    assert (result.measured is None) == (kind != "gradient")


def test_optimised_canaries_are_made_once_for_public_features_and_kept(tmp_path, monkeypatch):
    images, labels = dead_leaves(120, seed=1), torch.arange(120) % 2
    splits = DataSplits(train=ImageSet(images, labels, ("a", "b"), name="leaves"))
    options = {"num_layers": 1, "num_patches": 8, "num_directions": 30}
    settings = {
        "model.options": options,
        "privacy.epsilon": 8.0,
        "privacy.delta": 1e-3,
        "training.num_steps": 2,
    }
    settings |= {"features.num_images": 60, "audit.canaries": 20, "audit.kind": "optimised"}
    recipe, out = with_settings(load_recipe("fast/patches"), settings), tmp_path / "run"
    with Ledger.open() as ledger:
        train(recipe, out=out, data=splits, ledger=ledger)
    kept = out / "state" / IMAGES
    assert kept.stat().st_mode & 0o777 == 0o600
    first, coins = load_file(kept)["images"], toss_coins(RunFolder(out).canary_key(), 20)
    extractor = sfumato.load(out).model.extractor
    drawn = canary_images(
        RunFolder(out).canary_key(), 20, kind="optimised", shape=(3, 32, 32), classes=("a", "b")
    )
    same = first == rare_images(extractor, drawn.images)  # neither coins nor the private centre
    assert same.double().mean() > 0.999  # some pixel may round the other way with other threads
    monkeypatch.setattr(run_canaries, "rare_images", None)  # an audit finds them there
    result = audit_run(out)
    assert (result.num_canaries, result.num_members) == (20, int(coins.sum()))
    kept.write_bytes(b"cut")
    with pytest.raises(RunError, match="cannot be read"):
        audit_run(out)
    with pytest.raises(ConfigError, match="no fixed patch features"):
        trained(tmp_path / "net", audit__kind="optimised")


def test_the_result_is_written_beside_the_run_into_its_card_and_its_report(tmp_path):
    out = tmp_path / "run"
    trained(out, training__seed=1)  # one run in a hundred or so is called a violation by chance
    assert "canaries" in (out / "release" / "README.md").read_text()
    done = CliRunner().invoke(command, [str(out), "--json"])
    assert done.exit_code == 0, done.output
    printed, kept = json.loads(done.output), json.loads((out / "audit.json").read_text())
    assert {key: kept[key] for key in printed} == printed
    plain = CliRunner().invoke(command, [str(out), "--confidence", "0.9"])  # again: one section, not two
    assert "Promised" in plain.output
    assert "Ceiling" in plain.output
    sentence = json.loads((out / "audit.json").read_text())["sentence"]
    card, report = (out / "release" / "README.md").read_text(), (out / "report.html").read_text()
    assert card.count("## Audit") == 1
    assert sentence in card
    assert "The audit" in report
    assert "ROC curve on logarithmic axes" in report
    trained(out, resume=True, training__seed=1)  # a finished run, published again, keeps its audit
    assert sentence in (out / "release" / "README.md").read_text()


def test_a_seeded_run_has_the_same_canaries_each_time_and_others_do_not():
    sources = [SeededSource(3), SeededSource(3), SeededSource(4), SecureSource(), SecureSource()]
    keys = [new_key(source) for source in sources]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


def test_what_cannot_be_audited_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="canaries-without-privacy"):
        prepare(
            small_recipe(audit__canaries=5, privacy__enabled=False, privacy__epsilon=None),
            data=small_splits(),
        )
    with pytest.raises(ConfigError, match="too-many-canaries"):
        prepare(small_recipe(audit__canaries=90_000), data=small_splits())
    recipe, square = small_recipe(audit__canaries=5, audit__kind="noise"), small_splits().train
    check_room(recipe, torch.nn.Linear(2, 2), square)  # control
    with pytest.raises(ConfigError, match="canaries-not-square"):
        check_room(recipe, torch.nn.Linear(2, 2), replace(square, images=square.images[:, :, 1:]))
    trained(tmp_path / "run", audit__canaries=0, training__num_steps=1)
    with pytest.raises(RunError, match="no-canaries"):
        canary_scores(RunFolder(tmp_path / "run"))
    trained(tmp_path / "noise", audit__canaries=5, audit__kind="noise", training__num_steps=1)
    folder = RunFolder(tmp_path / "noise")
    canary_scores(folder)  # control: its own key is taken
    (folder.state / CANARY_KEY).write_text(f"{7:064x}\n")
    with pytest.raises(RunError, match="damaged-run"):
        canary_scores(folder)


SURE = {"audit__canaries": 1000, "privacy__epsilon": 1.0, "training__num_steps": 4}


def test_an_honest_run_is_no_violation(tmp_path):
    trained(tmp_path / "run", **SURE)
    result = audit_run(tmp_path / "run")
    assert result.violations == ()
    assert 0.9 < result.measured.noise_multiplier / result.noise_multiplier < 1.5
    assert 0.5 < result.measured.sampling_rate / result.sampling_rate < 1.5


@pytest.mark.parametrize("fault", ["half noise", "no noise"])
def test_too_little_noise_is_a_violation(tmp_path, monkeypatch, fault):
    add_noise = sfumato.noise.add_noise

    def less(total, *, stddev, **rest):
        return add_noise(total, stddev=stddev * {"half noise": 0.5, "no noise": 1e-6}[fault], **rest)

    monkeypatch.setattr(sfumato.noise, "add_noise", less)
    trained(tmp_path / "run", **SURE)
    done = CliRunner().invoke(command, [str(tmp_path / "run")])
    assert done.exit_code == 1
    assert "VIOLATION  The noise multiplier is at most" in done.output
    assert "VIOLATION" in (tmp_path / "run" / "release" / "README.md").read_text()
    assert "VIOLATION" in (tmp_path / "run" / "report.html").read_text()
    if fault == "no noise":
        assert "VIOLATION  ε is at least" in done.output


def test_a_canary_that_is_not_clipped_is_a_violation(tmp_path, monkeypatch):
    added = Directions.added

    def unclipped(self, gradients, chosen, *, length):
        return added(self, gradients, chosen, length=20 * length)

    monkeypatch.setattr(Directions, "added", unclipped)
    trained(tmp_path / "run", **SURE)
    result = audit_run(tmp_path / "run")
    assert result.violations[0].startswith("ε is at least")
    assert result.measured.rate_lower is None  # of a network nobody knows how real gradients react
    assert result.epsilon > 1.3 * result.nominal_epsilon
    assert result.auc > 0.8


def test_scores_of_other_coins_show_nothing(tmp_path):
    trained(tmp_path / "run", **SURE)
    scores, plan = canary_scores(RunFolder(tmp_path / "run"))
    every = np.concatenate([scores.inner, scores.outer])
    coins = np.random.default_rng(0).random(len(every)) < 0.5
    result = judge_scores(replace(scores, inner=every[coins], outer=every[~coins]), plan, confidence=0.95)
    assert result.epsilon < 0.2
    told = judge_scores(replace(scores, inner=every[coins] + 1e9, outer=every[~coins]), plan, confidence=0.95)
    assert 5 < told.epsilon <= told.ceiling


def test_of_a_callers_own_scheme_the_bound_without_assumptions_is_left(tmp_path):
    class Sparse(Poisson):
        name = "sparse"

    plan = Plan(
        num_examples=100, batch_size=20, num_steps=30, noise_multiplier=1.0, delta=1e-5, sampling=Sparse()
    )
    recorded = Plan.from_dict(plan.as_dict())
    random = np.random.default_rng(0)
    scores = CanaryScores(kind="noise", inner=random.normal(3, 1, 200), outer=random.normal(0, 1, 200))
    found = judge_scores(scores, recorded, confidence=0.95)
    assert found.epsilon == found.plain_epsilon > 0
    known = judge_scores(scores, replace(plan, sampling="poisson"), confidence=0.95)
    assert known.epsilon > known.plain_epsilon  # control: of our own schemes the plan's curve is known
