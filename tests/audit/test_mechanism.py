"""The mechanism audit: honest on the product as it is, and alarmed by each fault that it passes through."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from sfumato.audit.mechanism import (
    MechanismAudit,
    enough_repetitions,
    judge,
    log_likelihood_ratio,
    repeated_noise,
    run_mechanism_audit,
)
from sfumato.audit.pipeline import PARTS, Pipeline
from sfumato.audit.sampled import refuted_epsilon, total_error, total_error_above
from sfumato.audit.score_file import Batch, ScoreFile
from sfumato.cli.audit_mechanism import command
from sfumato.errors import ConfigError, RunError
from sfumato.privacy.plan import Plan

EXACT = MechanismAudit(epsilon=8.0, over=("head",))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("canary", ["input", "gradient"])
@pytest.mark.parametrize(
    "over", [(), *((part,) for part in PARTS), ("views", "patients", "microbatches", "ema", "resume")]
)
def test_the_canary_moves_every_step_by_exactly_the_clip_norm(over, canary):
    # so little noise that one training shows it
    plan = Plan(
        num_examples=10, batch_size=10, num_steps=4, noise_multiplier=1e-3, delta=1e-5, sampling="full"
    )
    pipeline = Pipeline(plan=plan, over=frozenset(over), canary=canary)
    seen, unseen = pipeline.observe(member=True), pipeline.observe(member=False)
    assert np.allclose(seen.projections, 1.0, atol=0.01)
    assert np.allclose(unseen.projections, 0.0, atol=0.01)
    assert seen.averaged > 2.5 > 0.1 > abs(unseen.averaged)  # of 4 steps, the last one counted less
    assert seen.silent_squares / (4 * 640) == pytest.approx(1e-6, rel=0.2)
    assert len({*seen.fingerprints, *unseen.fingerprints}) == 8  # no noise twice, not even after resuming


def test_a_sampled_canary_is_in_as_often_as_the_plan_says():
    plan = Plan(num_examples=10, batch_size=3, num_steps=400, noise_multiplier=1e-3, delta=1e-5)
    seen = Pipeline(plan=plan, over=frozenset({"head"})).observe(member=True).projections
    assert set(np.round(seen, 1)) == {0.0, 1.0}
    assert 0.2 < seen.mean() < 0.4


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


def test_the_sum_of_unequal_error_rates_is_bounded_as_often_as_promised():
    """All errors counted as one binomial: valid for unequal rates, with little margin for equal ones."""
    random = np.random.default_rng(1)
    for rates in ((0.05, 0.35), (0.2, 0.2), (0.0, 0.4), (0.4, 0.0)):
        errors = random.binomial(200, rates[0], 20_000) + random.binomial(200, rates[1], 20_000)
        bounds = {count: total_error_above(count, 400, 0.05) for count in np.unique(errors)}
        missed = np.mean([bounds[count] < sum(rates) for count in errors])
        assert missed <= 0.055
        if rates[0] == rates[1]:
            assert missed > 0.03


def test_over_20_audits_the_bound_is_never_above_nominal_beyond_its_confidence():
    """20 audits at 95 %: more than 4 above nominal has probability 0.003. And they are not vacuous."""
    results = [run_mechanism_audit(EXACT, repetitions=40)[0] for _ in range(20)]
    assert sum(result.epsilon > result.nominal_epsilon for result in results) <= 4
    assert np.median([result.share for result in results]) > 0.5
    assert all(result.epsilon <= result.ceiling for result in results)
    assert sum(bool(result.violations) for result in results) <= 5


def test_half_the_noise_is_a_violation(monkeypatch):
    from sfumato.privacy.plan import Plan

    assert (
        not run_mechanism_audit(EXACT, repetitions=60)[0].measured_noise_upper < EXACT.plan.noise_multiplier
    )
    original = Plan.noise
    monkeypatch.setattr(
        Plan,
        "noise",
        lambda self, total, **options: original(
            replace(self, noise_multiplier=self.noise_multiplier / 2), total, **options
        ),
    )
    result, _ = run_mechanism_audit(EXACT, repetitions=60)
    assert result.epsilon > result.nominal_epsilon
    assert "noise multiplier is at most" in " ".join(result.violations)


def test_the_same_noise_twice_is_found_within_a_training_and_between_two():
    def batch(prints, repeated=0):
        return Batch(scores={}, fingerprints=prints, repeated=repeated)

    assert repeated_noise([batch([1, 2]), batch([3, 4])]) == 0
    assert repeated_noise([batch([1, 2]), batch([3, 2])]) == 1
    assert repeated_noise([batch([1, 2], repeated=5)]) == 5


def test_a_scale_that_depends_on_the_canary_is_a_violation():
    random = np.random.default_rng(0)
    likelihood = random.normal(0, 1, 200), random.normal(0, 1, 200)
    equal = random.chisquare(640, 200), random.chisquare(640, 200)
    smaller = equal[0], equal[1] * 1.4

    def judged(scale):
        return judge(EXACT, {"likelihood": likelihood, "scale": scale}, [])

    assert judged(equal).scale_epsilon < 1
    assert judged(smaller).scale_epsilon > judged(smaller).nominal_epsilon
    assert judged(smaller[::-1]).scale_epsilon > EXACT.epsilon  # whichever side is the larger


def test_an_audit_goes_on_where_it_stopped_and_refuses_scores_of_another(tmp_path):
    path = tmp_path / "scores.jsonl"
    first, _ = run_mechanism_audit(EXACT, repetitions=10, scores=path)
    kept = path.read_bytes()
    path.write_bytes(kept + b'{"scores": {"likeli')  # killed while it wrote
    seen = []
    result, sides = run_mechanism_audit(
        EXACT, repetitions=15, scores=path, on_progress=lambda done, total: seen.append((done, total))
    )
    assert (first.repetitions, result.repetitions, seen) == (10, 15, [(15, 15)])
    assert path.read_bytes().startswith(kept)
    assert len(sides["likelihood"][0]) == 15
    with pytest.raises(RunError, match="changed-audit"):
        run_mechanism_audit(replace(EXACT, epsilon=4.0), repetitions=15, scores=path)
    with path.open("ab") as file:
        file.write(b"no json\n")
    with pytest.raises(RunError, match="damaged-log"):
        ScoreFile(path).open(EXACT.identity())


def test_more_trainings_are_asked_for_where_less_is_to_be_seen():
    numbers = [enough_repetitions(MechanismAudit(epsilon=epsilon), share=0.9) for epsilon in (1, 2, 4, 8)]
    assert numbers == sorted(numbers, reverse=True)
    assert 30_000 < numbers[0] < 100_000
    assert enough_repetitions(EXACT, share=0.5) < enough_repetitions(EXACT, share=0.9)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"over": ("head", "views")}, "audit-parts-exclude"),
        ({"over": ("resume",)}, "audit-needs-steps"),
        ({"sampling_rate": 1.5}, "sampling-rate-out-of-range"),
        ({"confidence": 1.0}, "confidence-out-of-range"),
    ],
)
def test_what_cannot_be_audited_is_refused(settings, code):
    with pytest.raises(ConfigError, match=code):
        MechanismAudit(epsilon=1.0, **settings).check()
    with pytest.raises(ConfigError, match="bad-repetitions"):
        run_mechanism_audit(EXACT, repetitions=1)


def test_the_command_writes_scores_result_and_plots(tmp_path: Path):
    arguments = ["--epsilon", "8", "--repetitions", "20", "--over", "head", "--workers", "1", "--json"]
    done = CliRunner().invoke(command, [*arguments, "--out", str(tmp_path / "new")])
    assert done.exit_code in (0, 1), done.output
    (result,) = json.loads(done.output)["results"]
    assert result["repetitions"] == 20
    assert result["nominal_epsilon"] == pytest.approx(8, rel=1e-3)
    assert (done.exit_code == 1) == bool(result["violations"])
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"scores-8.jsonl", "results.json", "audit.png", "audit.svg"}
