"""What a search costs: never more than ε, whatever its trials turn out to be; and what it refuses."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sfumato import accounting
from sfumato.accounting import SampledGaussian, Selection, is_covered
from sfumato.errors import ConfigError, PrivacyError, SfumatoError
from sfumato.privacy.plan import Plan
from sfumato.privacy.search import Search
from sfumato.recipes.recipe import Recipe, load_recipe, with_settings
from sfumato.tune.budget import Budget, events_of, plan_search
from sfumato.tune.ranges import parse_ranges
from sfumato.tune.settings import TuneSettings
from small_runs import small_recipe, small_splits

RATE = "training.learning_rate=log:0.1:10"
UNITS, ALL = 4500, 5000


def settings(*over: str, recipe: Recipe | None = None, **changes: object) -> TuneSettings:
    base = recipe or small_recipe(privacy__epsilon=3.0, privacy__delta=1e-5, training__batch_size=200)
    values = {"num_trials": 6, "strategy": "scaled", **changes}
    return TuneSettings(recipe=base, ranges=parse_ranges(over or (RATE,), (), base), **values)


def budget(*over: str, **changes: object) -> Budget:
    return plan_search(settings(*over, **changes), num_trial_units=UNITS, num_final_units=ALL, delta=1e-5)


def patches() -> Recipe:
    return with_settings(load_recipe("fast/patches"), {"privacy.epsilon": 1.0, "data.name": "cifar10"})


@pytest.mark.parametrize("strategy", ["scaled", "random-stopping"])
@pytest.mark.parametrize("whole_set", [False, True])
def test_the_whole_search_costs_epsilon_and_hardly_less(strategy: str, whole_set: bool) -> None:
    found = budget(strategy=strategy, **({"recipe": patches()} if whole_set else {}))
    asked = found.base.privacy.epsilon
    assert found.search is not None
    assert found.epsilon <= asked
    assert found.epsilon > 0.99 * asked
    again = accounting.epsilon(found.search.events(), delta=1e-5, accountant=found.accountant)
    assert again == pytest.approx(found.epsilon)
    assert found.trial_epsilon < asked  # one trial is a part of it


def test_events_of_a_search_are_all_its_trials_their_scores_and_the_last_run() -> None:
    search = budget().search
    trial, score, final = search.trial[-1], search.score[0], search.final[-1]
    separate = [*[trial] * 6, *[score] * 6, final]
    assert accounting.epsilon(separate, delta=1e-5) == pytest.approx(
        accounting.epsilon(search.events(), delta=1e-5), rel=1e-9
    )
    left_out = accounting.epsilon([*[trial] * 6, final], delta=1e-5)
    assert left_out < accounting.epsilon(search.events(), delta=1e-5)  # the score is counted


def test_trials_of_any_steps_and_batches_stay_below_the_reference_of_random_stopping() -> None:
    over = (RATE, "training.num_steps=int:5:60", "training.batch_size=50,200,800")
    found = budget(*over, strategy="random-stopping")
    rng = random.Random(5)
    curves = []
    for _ in range(6):
        chosen = {
            "training.num_steps": rng.randint(5, 60),
            "training.batch_size": rng.choice([50, 200, 800]),
        }
        noise = found.trial_recipe(chosen).privacy.noise_multiplier
        events = events_of(found.trial_recipe(chosen), UNITS, noise)
        assert is_covered(events, found.search.trial, in_renyi=True)
        curves.append(accounting.renyi.whole_order_divergences(events))
        smaller = events_of(found.trial_recipe(chosen), UNITS, noise * 0.998)
        assert not is_covered(smaller, found.search.trial, in_renyi=True)  # no more noise than needed
    # the oracle: the theorem applied to the worst curve of all, written out
    envelope = [max(curve[index] for curve in curves) for index in range(len(curves[0]))]
    orders = accounting.renyi._WHOLE_ORDERS
    assert theorem_epsilon(orders, envelope, mean=6.0, delta=1e-5) <= found.epsilon * (1 + 1e-9)


def theorem_epsilon(orders: tuple[int, ...], curve: list[float], *, mean: float, delta: float) -> float:
    """Theorem 2 of Papernot and Steinke for the geometric distribution, then the plain conversion to ε."""
    import math

    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    best = min(
        (1 - 1 / order) * value + math.log(mean) / order for order, value in zip(orders, curve, strict=True)
    )
    whole = [
        value + 2 * best + math.log(mean) / (order - 1) for order, value in zip(orders, curve, strict=True)
    ]
    return compute_epsilon(list(orders), whole, delta)[0]


def test_a_plan_refuses_to_cost_more_than_its_search_counts() -> None:
    search = budget().search
    trial = search.trial[-1]
    values = {"num_examples": UNITS, "batch_size": 200, "num_steps": trial.num_steps, "delta": 1e-5}
    noise = trial.noise_multiplier
    plan = Plan(**values, noise_multiplier=noise, search=search)
    assert plan.epsilon == pytest.approx(accounting.epsilon(search.events(), delta=1e-5))
    for wrong in (
        {"noise_multiplier": noise * 0.99},
        {"noise_multiplier": noise, "num_steps": trial.num_steps + 1},
        {"noise_multiplier": noise, "extra_events": (SampledGaussian(noise_multiplier=200.0),)},
        {"noise_multiplier": noise, "search_part": "final"},
    ):
        with pytest.raises(PrivacyError, match="beyond-search"):
            Plan(**{**values, **wrong}, search=search)
    with pytest.raises(ConfigError, match="contradictory-search"):
        Plan(**values, noise_multiplier=noise, search=search, uncounted_search=True)


def test_a_score_with_less_noise_than_counted_is_refused() -> None:
    for found in (budget(), budget(recipe=patches()), budget(strategy="random-stopping")):
        assert found.score_noise is not None
        found.search.check_score(SampledGaussian(noise_multiplier=found.score_noise))
        with pytest.raises(PrivacyError, match="beyond-search"):
            found.search.check_score(SampledGaussian(noise_multiplier=0.99 * found.score_noise))


def test_plans_and_searches_survive_a_file_and_old_plans_stay_as_they_were() -> None:
    search = budget().search
    assert Search.from_dict(search.as_dict()) == search
    final = search.final[-1]
    plan = Plan(
        num_examples=ALL,
        batch_size=200,
        num_steps=final.num_steps,
        noise_multiplier=final.noise_multiplier,
        delta=1e-5,
        search=search,
        search_part="final",
    )
    assert Plan.from_dict(plan.as_dict()) == plan
    assert "search" not in replace(plan, search=None).as_dict()
    with pytest.raises(ConfigError, match="bad-record"):
        Plan.from_dict({**plan.as_dict(), "search": {**search.as_dict(), "num_trials": "many"}})


def test_the_statement_says_how_the_search_was_paid_for() -> None:
    said = {}
    for strategy in ("scaled", "random-stopping"):
        found = budget(strategy=strategy)
        events = found.search.final or found.search.trial
        plan = Plan(
            num_examples=ALL if found.search.final else UNITS,
            batch_size=200,
            num_steps=events[-1].num_steps,
            noise_multiplier=events[-1].noise_multiplier,
            delta=1e-5,
            accountant=found.accountant,
            search=found.search,
            search_part="final" if found.search.final else "trial",
        )
        statement = plan.statement()
        assert statement.values["search"]["strategy"] == strategy
        assert statement.values["epsilon"] == pytest.approx(found.epsilon)
        said[strategy] = statement.text
    assert "Panda et al. 2024" in said["scaled"]
    assert "6 trials" in said["scaled"]
    assert "best of a random number of runs, 6 on average (geometric)" in said["random-stopping"]
    assert all("No run outside the counted search" in text for text in said.values())


@pytest.mark.parametrize(
    ("changes", "over", "code"),
    [
        ({"strategy": "random-stopping", "sampler": "tpe"}, (RATE,), "adaptive-search"),
        (
            {"strategy": "random-stopping", "sampler": "grid"},
            ("training.learning_rate=1,2",),
            "adaptive-search",
        ),
        ({}, (RATE, "training.num_steps=int:2:9"), "search-varies-steps"),
        ({}, (RATE, "training.batch_size=100,200"), "search-varies-steps"),
        ({"pruner": "median"}, (RATE,), "private-pruning"),
        ({"strategy": "random-stopping", "pruner": "threshold"}, (RATE,), "private-pruning"),
        ({"sampler": "grid"}, (RATE,), "no-grid"),
        ({"sampler": "grid", "num_trials": 3}, ("training.learning_rate=1,2",), "no-grid"),
        ({"strategy": "public"}, (RATE,), "no-search-data"),
        ({"search_data": "digits"}, (RATE,), "no-search-data"),
        ({"num_trials": 1}, (RATE,), "search-out-of-range"),
        ({"search_share": 1.0}, (RATE,), "search-out-of-range"),
        (
            {"recipe": small_recipe(privacy__epsilon=None, privacy__noise_multiplier=1.0)},
            (RATE,),
            "no-budget",
        ),
        ({"recipe": small_recipe(privacy__enabled=False)}, (RATE,), "no-budget"),
        ({"recipe": small_recipe(privacy__mechanism="discrete-gaussian")}, (RATE,), "search-needs-gaussian"),
        ({"recipe": small_recipe(privacy__uncounted_search=True)}, (RATE,), "contradictory-search"),
        ({"recipe": small_recipe(data__holdout=0.2)}, (RATE,), "contradictory-search"),
    ],
)
def test_a_search_that_could_not_be_counted_is_refused(
    changes: dict[str, object], over: tuple[str, ...], code: str
) -> None:
    with pytest.raises(SfumatoError) as refused:
        settings(*over, **changes)
    assert refused.value.code == code


def test_units_are_not_set_aside_where_they_are_replaced() -> None:
    from sfumato.run.resolve import resolve
    from sfumato.tune.session import plan_tuning

    splits, replaced = small_splits(train=60, test=10), {"privacy__neighbouring": "replace-one"}
    with pytest.raises(PrivacyError, match="holdout-with-replace-one"):
        resolve(small_recipe(data__holdout=0.2, **replaced), splits)
    with pytest.raises(PrivacyError, match="holdout-with-replace-one"):
        plan_tuning(settings(RATE, recipe=small_recipe(**replaced)), data=splits)
    resolve(small_recipe(data__holdout=0.2), splits)
    resolve(small_recipe(**replaced), splits)


def test_of_public_scores_pruning_is_no_release_but_a_median_depends_on_other_trials() -> None:
    public = small_recipe(data__val_is_public=True)
    settings(recipe=public, pruner="median")
    settings(recipe=public, pruner="threshold", strategy="random-stopping")
    with pytest.raises(PrivacyError, match="adaptive-search"):
        settings(recipe=public, pruner="median", strategy="random-stopping")


def test_the_reference_of_a_search_is_a_selection_of_whole_trials() -> None:
    found = budget(strategy="random-stopping", shape=0.0)
    (event,) = found.search.events()
    assert isinstance(event, Selection)
    assert (event.mean_runs, event.shape) == (6.0, 0.0)
    assert event.events == (*found.search.trial, *found.search.score)
