"""The plan fits together, keeps its budget, refuses what it cannot bound, and says what it promises."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gaussianity import is_gaussian
from sfumato import accounting
from sfumato.accounting import SampledGaussian
from sfumato.errors import ConfigError, PrivacyError
from sfumato.gradients import ClippedSum
from sfumato.privacy.plan import Plan
from sfumato.privacy.statement import round_up
from sfumato.randomness import SecureSource
from sfumato.sampling import FullBatch, PoissonSampling

SMALL = {"num_examples": 5000, "batch_size": 250, "num_steps": 200, "delta": 1e-5}


def plan(**changes: object) -> Plan:
    return Plan(**{**SMALL, "noise_multiplier": 2.0, **changes})


def zero_sum(sensitivity: float, size: int = 200_000) -> ClippedSum:
    nothing = torch.zeros(0, dtype=torch.float64)
    return ClippedSum(
        gradients={"w": torch.zeros(size)}, norms=nothing, losses=nothing, sensitivity=sensitivity
    )


def test_a_plan_costs_what_its_events_cost():
    expected = accounting.epsilon(
        [SampledGaussian(noise_multiplier=2.0, sampling_rate=0.05, num_steps=200)], delta=1e-5
    )
    assert plan().epsilon == expected
    assert plan().sampling_rate == 0.05
    assert plan(noise_multiplier=1.9).epsilon > expected
    more = plan(extra_events=(SampledGaussian(noise_multiplier=20.0),))
    assert more.epsilon > expected


@pytest.mark.parametrize("missing", ["noise_multiplier", "num_steps", "batch_size"])
@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_calibration_finds_the_missing_value_and_keeps_the_budget(missing, epsilon):
    given = {**SMALL, "noise_multiplier": 3.0, missing: None}
    found = Plan.calibrate(epsilon=epsilon, **given)
    assert 0.97 * epsilon < found.epsilon <= epsilon
    assert getattr(found, missing) > 0


def test_a_budget_with_too_many_or_too_few_values_is_refused():
    with pytest.raises(ConfigError, match="contradictory-budget"):
        Plan.calibrate(epsilon=1.0, noise_multiplier=2.0, **SMALL)
    with pytest.raises(ConfigError, match="underdetermined-budget"):
        Plan.calibrate(epsilon=1.0, delta=1e-5, num_examples=5000, batch_size=250)


def test_the_sampler_draws_as_the_plan_accounts():
    assert plan().sampler() == PoissonSampling(sampling_rate=0.05, num_steps=200)
    full = plan(sampling="full", batch_size=5000)
    assert full.sampler() == FullBatch(num_steps=200)
    assert full.sampling_rate == 1.0


@pytest.mark.parametrize("mechanism", ["gaussian", "discrete-gaussian"])
def test_noise_has_the_multiplier_times_the_sensitivity_of_the_sum(mechanism):
    mine = plan(clip_norm=0.5, mechanism=mechanism, accountant="rdp")
    noisy = mine.noise(zero_sum(0.5), source=SecureSource(), step=0)["w"].double().numpy()
    assert is_gaussian(noisy, stddev=1.0)
    assert not is_gaussian(noisy, stddev=2.0)
    smaller = mine.noise(zero_sum(0.25), source=SecureSource(), step=0)["w"].double().numpy()
    assert is_gaussian(smaller, stddev=0.5)


@pytest.mark.parametrize("sensitivity", [0.5000001, 1.0, math.inf, 0.0, math.nan])
def test_a_sum_that_one_unit_can_move_too_far_is_refused(sensitivity):
    with pytest.raises(PrivacyError, match="sensitivity-above-plan"):
        plan(clip_norm=0.5).noise(zero_sum(sensitivity), source=SecureSource(), step=0)


def test_epsilon_grows_with_the_steps_and_is_never_understated():
    mine = plan()
    values = [mine.epsilon_after(step) for step in range(0, 201, 20)]
    assert values == sorted(values)
    assert values[0] == 0.0
    assert values[-1] == mine.epsilon
    for step in (1, 57, 133):
        assert mine.epsilon_after(step) >= plan(num_steps=step).epsilon
    steps, curve = mine.epsilon_curve()
    assert steps[0] == 0
    assert (steps[-1], curve[-1]) == (200, mine.epsilon)
    with pytest.raises(ConfigError, match="num-steps-out-of-range"):
        mine.epsilon_after(201)


def test_releases_beside_the_steps_count_from_the_beginning():
    assert plan(extra_events=(SampledGaussian(noise_multiplier=20.0),)).epsilon_after(0) > 0


def test_a_delta_above_one_over_n_is_refused_unless_forced_and_then_said():
    with pytest.raises(PrivacyError, match="delta-too-large"):
        plan(delta=3e-4)
    forced = plan(delta=3e-4, allow_large_delta=True)
    assert "above 1/5000" in forced.statement().text
    assert "above 1/" not in plan().statement().text


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"noise_multiplier": 0.0}, "noise-out-of-range"),
        ({"noise_multiplier": -1.0}, "noise-out-of-range"),
        ({"noise_multiplier": math.nan}, "noise-out-of-range"),
        ({"batch_size": 5001}, "batch-size-out-of-range"),
        ({"batch_size": 0}, "batch-size-out-of-range"),
        ({"batch_size": 100, "sampling": "full"}, "batch-size-out-of-range"),
        ({"num_examples": 0}, "num-examples-out-of-range"),
        ({"clip_norm": 0.0}, "clip-norm-out-of-range"),
        ({"clip_norm": math.inf}, "clip-norm-out-of-range"),
        ({"delta": 0.0}, "delta-out-of-range"),
        ({"num_steps": -1}, "num-steps-out-of-range"),
        ({"unit": "person"}, "unknown-choice"),
        ({"tuning_runs": 3.0, "uncounted_search": True}, "contradictory-search"),
        ({"tuning_runs": 0.3}, "search-out-of-range"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(changes, code):
    with pytest.raises(ConfigError, match=code):
        plan(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampling": "full", "batch_size": 5000, "neighbouring": "replace-one", "unit": "patient"},
        {"tuning_runs": 8.0, "accountant": "rdp", "mechanism": "discrete-gaussian"},
        {"extra_events": (SampledGaussian(noise_multiplier=200.0),), "max_images_per_unit": 4},
    ],
)
def test_a_plan_survives_a_file(changes):
    mine = plan(**changes)
    assert Plan.from_dict(json.loads(json.dumps(mine.as_dict()))) == mine
    with pytest.raises(ConfigError, match="unknown-plan-field"):
        Plan.from_dict({**mine.as_dict(), "noise_multiplyer": 3})


def test_the_statement_says_what_was_run_what_is_protected_and_what_is_assumed():
    text = plan().statement().text
    for part in (
        "200 steps",
        "5,000 images",
        "probability 0.05",
        f"ε = {round_up(plan().epsilon)}",
        "δ = 1e-05",
        "added to or removed from",
        "Only single images are protected",
        "2 images: ε = ",
        "Settings were fixed beforehand",
    ):
        assert part in text
    assert "NOT RELEASABLE" not in text


def test_the_statement_of_a_person_with_several_images_is_computed():
    told = plan().statement(images_per_person=3).as_dict()
    assert [group["images"] for group in told["groups"]] == [2, 3]
    expected, how = accounting.group_epsilon(plan().events(), delta=1e-5, group_size=3)
    assert told["groups"][1] == {"images": 3, "epsilon": expected, "method": how}
    assert told["groups"][1]["epsilon"] > told["epsilon"]


def test_the_statement_for_patients_promises_for_patients():
    text = plan(unit="patient", max_images_per_unit=4).statement().text
    assert "One patient is protected with all their images" in text
    assert "at most 4 of their images" in text
    assert "Only single images" not in text


def test_a_seeded_run_says_that_it_may_not_leave():
    told = plan().statement(releasable=False)
    assert told.text.startswith("NOT RELEASABLE")
    assert told.as_dict()["releasable"] is False


def test_a_search_is_counted_or_its_omission_is_printed():
    counted = plan(tuning_runs=10.0, accountant="rdp")
    assert counted.epsilon > plan(accountant="rdp").epsilon
    assert "10 on average" in counted.statement().text
    uncounted = plan(uncounted_search=True)
    assert uncounted.epsilon == plan().epsilon
    assert "does NOT count that search" in uncounted.statement().text
    assert "NOT count" not in plan().statement().text


def test_privacy_json_has_its_fields_and_is_json():
    fields = plan().statement().as_dict()
    required = (
        "epsilon delta unit neighbouring accountant noise_multiplier clip_norm sampling_rate num_steps "
        "num_examples mu_gdp releasable statement"
    )
    assert set(required.split()) <= set(fields)
    json.dumps(fields, allow_nan=False)
    awful = plan(noise_multiplier=0.02).statement().as_dict()
    json.dumps(awful, allow_nan=False)


def test_the_stated_test_power_is_that_of_the_best_test():
    full = plan(sampling="full", batch_size=5000, noise_multiplier=10.0, num_steps=100)  # μ = 1
    power = full.statement().as_dict()["largest_true_positive_rate_at_1_percent"]
    exact = 0.5 * math.erfc((2.3263478740408408 - 1.0) / math.sqrt(2))
    assert exact <= power < exact + 0.01


@given(value=st.floats(1e-12, 1e12), digits=st.integers(1, 8))
def test_a_figure_is_never_shown_below_its_value_nor_a_unit_of_its_last_digit_above(value, digits):
    shown = float(round_up(value, digits))
    assert value <= shown <= value * (1 + 10 ** (1 - digits) + 1e-12)
    assert round_up(shown, digits) == round_up(value, digits)


OWN_FORMAT = re.compile(r"epsilon[\w\[\]'\".()]*:[^{}]*\.\d+[gf]\}")


def test_no_place_formats_an_epsilon_by_itself():
    assert OWN_FORMAT.search("ε = {plan.epsilon:.4g}")
    assert OWN_FORMAT.search("ε = {privacy['epsilon']:<8.3f}")
    files = (Path(__file__).parents[2] / "src/sfumato").rglob("*.py")
    found = [(file.name, *OWN_FORMAT.findall(file.read_text(encoding="utf-8"))) for file in files]
    assert [entry for entry in found if len(entry) > 1] == []


def test_figures_of_a_guarantee_are_rounded_up():
    assert round_up(1.00001) == "1.001"
    assert round_up(2.99996) == "3"
    assert round_up(3.00001) == "3.001"
    assert f"{3.00001:.4g}" == "3"  # what rounding to the nearest would promise
    assert round_up(8.0) == "8"
    assert round_up(0.98771) == "0.9878"
    assert round_up(math.inf) == "no bound"
    assert round_up(0.0) == "0"
    assert round_up(123456.0, 3) == "1.24e+05"
