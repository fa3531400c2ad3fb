"""The mechanism audit: honest on the product as it is, and alarmed by each fault that it passes through."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from sfumato.audit import mechanism
from sfumato.audit.intervals import upper_mean
from sfumato.audit.mechanism import Batch, MechanismAudit, log_likelihood_ratio, sized
from sfumato.audit.mechanism_results import Trials, judge, repeated_noise, run_mechanism_audit
from sfumato.audit.mechanism_size import best_canaries, enough_trainings, total_error_above
from sfumato.audit.pipeline import PARTS, Pipeline
from sfumato.audit.sampled import refuted_epsilon, total_error
from sfumato.audit.score_file import ScoreFile
from sfumato.cli.audit_mechanism import PARTS as OFFERED
from sfumato.cli.audit_mechanism import command
from sfumato.errors import ConfigError, RunError
from sfumato.privacy.plan import Plan

EXACT = MechanismAudit(epsilon=8.0, over=("head",), num_canaries=8)
ALTOGETHER = ("views", "patients", "microbatches", "dropout", "ema", "resume", "ranks")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("canary", ["input", "gradient"])
@pytest.mark.parametrize("over", [(), *((part,) for part in PARTS), ALTOGETHER])
def test_each_canary_moves_every_step_by_exactly_the_clip_norm(over, canary):
    # so little noise that one training shows it
    plan = Plan(
        num_examples=13, batch_size=13, num_steps=4, noise_multiplier=1e-3, delta=1e-5, sampling="full"
    )
    pipeline = Pipeline(plan=plan, over=frozenset(over), canary=canary, num_canaries=4)
    present = np.array([True, False, False, True])
    seen, none = pipeline.observe(present), pipeline.observe([False] * 4)
    assert np.allclose(seen.projections, present, atol=0.01)
    assert np.allclose(none.projections, 0.0, atol=0.01)
    # of 4 steps, the last one counted less: halfway between is 0
    assert np.allclose(seen.averaged, np.where(present, 1, -1) * seen.averaged[0], atol=0.1)
    assert 1 < seen.averaged[0] < 2
    assert seen.silent_squares / (4 * 1600) == pytest.approx(1e-6, rel=0.2)
    assert len({*seen.fingerprints, *none.fingerprints}) == 8  # no noise twice, not even after resuming
    assert len(pipeline.observe(present, num_steps=2).projections) == 2


def test_a_sampled_canary_is_in_as_often_as_the_plan_says():
    plan = Plan(num_examples=11, batch_size=3.3, num_steps=400, noise_multiplier=1e-3, delta=1e-5)
    pipeline = Pipeline(plan=plan, over=frozenset({"head"}), num_canaries=2)
    seen = pipeline.observe([True, False]).projections
    assert set(np.round(seen[:, 0], 1)) == {0.0, 1.0}
    assert 0.2 < seen[:, 0].mean() < 0.4
    assert not np.round(seen[:, 1], 1).any()


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_the_score_is_the_ratio_of_the_densities(rate):
    random = np.random.default_rng(0)
    steps = random.normal(0.3, 2.0, (5, 7))

    def density(x, mean):
        return np.exp(-((x - mean) ** 2) / 8)

    expected = np.log((1 - rate) + rate * density(steps, 1) / density(steps, 0)).sum(1)
    found = log_likelihood_ratio(steps, sampling_rate=rate, noise_multiplier=2.0)
    assert np.allclose(found, expected)
    assert not np.allclose(log_likelihood_ratio(steps, sampling_rate=rate, noise_multiplier=2.1), expected)


@pytest.mark.parametrize("sampled", [False, True])
def test_the_family_s_bound_returns_the_epsilon_whose_errors_it_is_given(sampled):
    size, steps = (1.0, 50) if sampled else (10, 3)
    plan = Plan(
        num_examples=10,
        batch_size=size,
        num_steps=steps,
        noise_multiplier=2.0,
        delta=1e-5,
        sampling="poisson" if sampled else "full",
    )
    other = replace(plan, noise_multiplier=3.0)
    assert refuted_epsilon(plan, total_error(plan)) == pytest.approx(plan.epsilon, rel=0.01)
    assert refuted_epsilon(plan, total_error(other)) == pytest.approx(other.epsilon, rel=0.01)
    assert refuted_epsilon(other, total_error(plan)) == pytest.approx(plan.epsilon, rel=0.01)
    assert refuted_epsilon(plan, 1.0) == 0.0


@pytest.mark.parametrize("spread", ["independent", "all or nothing", "two values", "rarely all right"])
def test_the_bound_holds_however_guesses_of_a_training_depend_on_each_other(spread):
    """8 guesses in each of 150 trainings; over 4,000 audits the bound is below the truth in at most 5 %."""
    random = np.random.default_rng(1)
    shape = (4000, 150)
    shares = {
        "independent": lambda: random.binomial(8, 0.3, shape) / 8,
        "all or nothing": lambda: random.binomial(1, 0.3, shape),
        "two values": lambda: np.where(random.random(shape) < 0.5, 0.2, 0.4),
        "rarely all right": lambda: np.where(random.random(shape) < 0.02, 0.0, 0.3 / 0.98),
    }[spread]()

    def missed(one: np.ndarray, canaries: int) -> bool:
        return total_error_above(one, EXACT.plan, canaries=canaries, failure_probability=0.05) < 0.6

    share = np.mean([missed(one, 8) for one in shares])
    assert share <= 0.05 + 3 * (0.05 / 4000) ** 0.5
    if spread == "independent":
        assert share > 0.005  # not for being vacuous
    if spread == "all or nothing":  # a binomial count of all guesses would be no bound
        assert np.mean([missed(np.repeat(one, 8), 1) for one in shares[:500]]) > 0.15


def test_guesses_that_are_all_right_or_all_wrong_bound_the_mean_from_both_ends():
    assert upper_mean(np.ones(50), 0.05, bet=0.5) == 1.0
    assert 0 < upper_mean(np.zeros(50), 0.05, bet=0.5) < 0.2
    assert upper_mean(np.zeros(500), 0.05, bet=0.5) < upper_mean(np.zeros(50), 0.05, bet=0.5)
    one = np.array([1.0, 0.0, 0.0, 0.0])
    assert total_error_above(one, EXACT.plan, canaries=1, failure_probability=0.05) / 2 == pytest.approx(
        0.7514, abs=1e-3
    )


def test_over_20_audits_the_bound_is_never_above_nominal_beyond_its_confidence(monkeypatch):
    """20 audits at 95 %: more than 4 above nominal has probability 0.003. And they are not vacuous."""
    monkeypatch.setattr(mechanism, "PROBES", 20)
    results = [run_mechanism_audit(EXACT, trainings=40)[0] for _ in range(20)]
    assert sum(result.epsilon > result.nominal_epsilon for result in results) <= 4
    assert np.median([result.share for result in results]) > 0.5
    assert all(result.epsilon <= result.ceiling for result in results)
    assert sum(bool(result.violations) for result in results) <= 5


def test_half_the_noise_is_a_violation(monkeypatch):
    monkeypatch.setattr(mechanism, "PROBES", 20)
    sound, _ = run_mechanism_audit(EXACT, trainings=40)
    assert not sound.measured_noise_upper < EXACT.plan.noise_multiplier
    original = Plan.noise
    monkeypatch.setattr(
        Plan,
        "noise",
        lambda self, total, **options: original(
            replace(self, noise_multiplier=self.noise_multiplier / 2), total, **options
        ),
    )
    result, _ = run_mechanism_audit(EXACT, trainings=60)
    assert result.epsilon > result.nominal_epsilon
    assert "noise multiplier is at most" in " ".join(result.violations)


def _batch(**values) -> Batch:
    empty = {"present": [], "likelihood": [], "scale": [], "others": [], "fingerprints": [], "repeated": 0}
    return Batch(probe=False, **{**empty, **values})


def test_the_same_noise_twice_is_found_within_a_training_and_between_two():
    assert repeated_noise([_batch(fingerprints=[1, 2]), _batch(fingerprints=[3, 4])]) == 0
    assert repeated_noise([_batch(fingerprints=[1, 2]), _batch(fingerprints=[3, 2])]) == 1
    assert repeated_noise([_batch(fingerprints=[1, 2], repeated=5)]) == 5


def _judged(*, scale=None, others=None):
    """An audit that saw nothing, but for what its probes are given."""
    random = np.random.default_rng(0)
    present = np.arange(200) % 2 == 0
    trials = Trials(
        present=random.random((50, 8)) < 0.5,
        likelihood=random.normal(0, 1, (50, 8)),
        probe_present=present,
        scale=random.chisquare(1600, 200) * (1 if scale is None else np.where(present, *scale)),
        others=random.normal(0, 1, 200) if others is None else np.where(present, *others),
    )
    seen = _batch(present=trials.present.tolist(), scale=[1600.0] * 50, fingerprints=list(range(50)))
    return judge(EXACT, trials, [seen])


def test_a_scale_that_depends_on_the_canary_is_a_violation():
    assert _judged().scale_epsilon < 1
    assert not _judged().violations
    for scale in ((1, 1.4), (1.4, 1)):  # whichever side is the larger
        assert _judged(scale=scale).scale_epsilon > EXACT.epsilon
        assert "size of the noise" in " ".join(_judged(scale=scale).violations)


def test_other_units_that_depend_on_the_canary_are_a_violation():
    assert _judged().others_epsilon < 1
    assert _judged(others=(1.0, -1.0)).others_epsilon > EXACT.epsilon
    assert "other units" in " ".join(_judged(others=(1.0, -1.0)).violations)
    assert _judged(others=(0.0, 0.0)).others_epsilon == 0  # a replay that is always the same says nothing


@pytest.mark.parametrize("part", ["views", "dropout"])
def test_randomness_of_units_that_can_be_foretold_is_a_violation(part, monkeypatch):
    """The canary is the first unit: with it there, everybody else has another number, and other draws."""
    from sfumato.randomness import SeededSource, UnitRandomness

    monkeypatch.setattr(mechanism, "PROBES", 160)
    audit = MechanismAudit(epsilon=4.0, over=(part,))
    sound, _ = run_mechanism_audit(audit, trainings=20)
    assert sound.others_epsilon < audit.epsilon
    original = UnitRandomness.__init__
    monkeypatch.setattr(
        UnitRandomness,
        "__init__",
        lambda self, source, *, purpose, step: original(self, SeededSource(0), purpose=purpose, step=step),
    )
    result, _ = run_mechanism_audit(audit, trainings=20)
    assert result.others_epsilon > audit.epsilon
    assert "other units" in " ".join(result.violations)


def test_an_audit_goes_on_where_it_stopped_and_refuses_scores_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(mechanism, "PROBES", 5)
    path = tmp_path / "scores.jsonl"
    first, _ = run_mechanism_audit(EXACT, trainings=20, scores=path)
    kept = path.read_bytes()
    path.write_bytes(kept + b'{"scores": {"likeli')  # killed while it wrote
    seen = []
    result, trials = run_mechanism_audit(
        EXACT, trainings=25, scores=path, on_progress=lambda done, total: seen.append((done, total))
    )
    assert (first.trainings, result.trainings, seen) == (20, 25, [(30, 30)])
    assert path.read_bytes().startswith(kept)
    assert trials.likelihood.shape == (25, 8)
    with pytest.raises(RunError, match="changed-audit"):
        run_mechanism_audit(replace(EXACT, epsilon=4.0), trainings=25, scores=path)
    with path.open("ab") as file:
        file.write(b"no json\n")
    with pytest.raises(RunError, match="damaged-log"):
        ScoreFile(path, Batch).open(EXACT.identity())


@pytest.mark.parametrize("changed", ["scoring", "sfumato"])
def test_scores_of_other_code_are_not_mixed_in(tmp_path, monkeypatch, changed):
    path = tmp_path / "scores.jsonl"
    ScoreFile(path, Batch).open(EXACT.identity())
    assert ScoreFile(path, Batch).open(EXACT.identity()) == []  # control: the same code goes on
    if changed == "scoring":
        monkeypatch.setattr("sfumato.audit.mechanism.SCORING", 99)
    else:
        monkeypatch.setattr("sfumato.audit.score_file.version", lambda name: "99.0")
    with pytest.raises(RunError, match=f"another {changed}"):
        ScoreFile(path, Batch).open(EXACT.identity())


def test_workers_end_when_the_audit_is_killed(tmp_path):
    program = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from sfumato.audit.worker_processes import worker_pool
if __name__ == "__main__":
    pools = worker_pool(1), ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    print(*[pool.submit(os.getpid).result() for pool in pools], flush=True)
    time.sleep(60)
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    watched, left_alone = map(int, parent.stdout.readline().split())
    parent.kill()
    parent.wait()
    parent.stdout.close()  # not read to its end: the worker that is left holds the other side
    assert any(not _runs(watched) or time.sleep(0.05) for _ in range(400))
    assert _runs(left_alone)  # control: without the watch it stays
    os.kill(left_alone, signal.SIGKILL)


def _runs(process: int) -> bool:
    """Whether the process is there, and not only its entry that nobody has read."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_more_trainings_are_asked_for_where_less_is_to_be_seen():
    plans = [MechanismAudit(epsilon=epsilon).plan for epsilon in (1, 2, 4, 8)]
    for canaries in (1, 16):
        numbers = [
            enough_trainings(plan, canaries=canaries, share=0.9, failure_probability=0.045) for plan in plans
        ]
        assert numbers == sorted(numbers, reverse=True)
    assert 100_000 < enough_trainings(plans[0], canaries=1, share=0.9, failure_probability=0.045) < 300_000
    assert enough_trainings(plans[3], canaries=8, share=0.5, failure_probability=0.045) < numbers[3]
    assert best_canaries(plans[0], share=0.9, failure_probability=0.045) >= best_canaries(
        plans[3], share=0.9, failure_probability=0.045
    )


def test_as_many_trainings_as_are_asked_for_prove_the_share_in_99_of_100_audits():
    """Simulated: canaries that are guessed wrong at the planned rate, independently."""
    audit, trainings = sized(MechanismAudit(epsilon=8.0), share=0.9)
    random, rate = np.random.default_rng(0), total_error(audit.plan) / 2

    def proved(number: int) -> float:
        wrong = random.binomial(audit.num_canaries, rate, (300, number)) / audit.num_canaries
        options = {"canaries": audit.num_canaries, "failure_probability": audit.failure_probability}
        totals = [total_error_above(one, audit.plan, **options) for one in wrong]
        return np.mean([refuted_epsilon(audit.plan, total) > 0.9 * audit.epsilon for total in totals])

    assert proved(trainings) > 0.97
    assert proved(trainings // 2) < 0.9


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"over": ("head", "views")}, "audit-parts-exclude"),
        ({"over": ("head", "dropout")}, "audit-parts-exclude"),
        ({"over": ("resume",)}, "audit-needs-steps"),
        ({"sampling_rate": 1.5}, "sampling-rate-out-of-range"),
        ({"confidence": 1.0}, "confidence-out-of-range"),
    ],
)
def test_what_cannot_be_audited_is_refused(settings, code):
    with pytest.raises(ConfigError, match=code):
        MechanismAudit(epsilon=1.0, **settings).check()
    with pytest.raises(ConfigError, match="bad-repetitions"):
        run_mechanism_audit(EXACT, trainings=19)


def test_the_command_writes_scores_result_and_plots(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(mechanism, "PROBES", 20)
    arguments = ["--epsilon", "8", "--trainings", "20", "--over", "head", "--workers", "1", "--json"]
    done = CliRunner().invoke(command, [*arguments, "--out", str(tmp_path / "new")])
    assert done.exit_code in (0, 1), done.output
    (result,) = json.loads(done.output)["results"]
    assert result["trainings"] == 20
    assert result["nominal_epsilon"] == pytest.approx(8, rel=1e-3)
    assert (done.exit_code == 1) == bool(result["violations"])
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"scores-8.jsonl", "results.json", "audit.png", "audit.svg"}
    assert set(OFFERED) == set(PARTS)
