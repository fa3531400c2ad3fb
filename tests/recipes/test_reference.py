"""What recipes promise: equal to the papers' tables and to the measured rows, and nothing to a run."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from statistics import median

import pytest

from sfumato.recipes.recipe import (
    list_recipes,
    load_recipe,
    recipe_from_toml,
    recipe_to_toml,
    with_settings,
)
from sfumato.run.planning import build_plan
from sfumato.run.session import train
from small_runs import Watcher, small_recipe, small_splits

ROOT = Path(__file__).resolve().parents[2]

# De et al. 2022, table 3: ε → (median, standard deviation)
TABLE_3 = {
    "wrn16-4": {
        1: (56.8, 0.6),
        2: (64.9, 0.5),
        3: (69.2, 0.3),
        4: (71.9, 0.3),
        6: (77.0, 0.8),
        8: (79.5, 0.7),
    },
    "wrn40-4": {
        1: (56.4, 0.6),
        2: (65.9, 0.5),
        3: (70.7, 0.2),
        4: (73.5, 0.6),
        6: (78.8, 0.4),
        8: (81.4, 0.2),
    },
}
# Klause et al. 2022, table 1 (top-1) and table 2: ε → median
TABLE_1 = {
    "cifar10-scale-resnet9": {2.89: 65.6, 7.42: 71.8, 9.88: 73.0},
    "cifar10-resnet9": {2.89: 65.0, 7.42: 71.4, 9.88: 72.4},
    "imagenette-scale-resnet9": {2.89: 56.6, 7.42: 64.8, 9.88: 67.1},
    "imagenette-resnet9": {2.89: 55.5, 7.42: 63.8, 9.88: 65.0},
    "tiny-imagenet-scale-resnet9": {5: 15.2, 10: 19.4, 70: 25.8},
    "tiny-imagenet-resnet9": {5: 14.2, 10: 18.7, 70: 24.7},
    "cifar10-scale-wrn16-4": {8: 82.5},
    "cifar10-wrn16-4": {8: 81.25},
}
# Remerscheid et al. 2022, table 2
TABLE_2 = {"cifar10-smoothnet": {7: 73.5}, "imagenette-smoothnet": {7: 69.7}}

PUBLISHED = {
    **{f"de2022/cifar10-{net}-eps{e}": row for net, rows in TABLE_3.items() for e, row in rows.items()},
    **{
        f"{paper}/{name}-eps{e}": (value, None)
        for paper, table in (("scalenorm2022", TABLE_1), ("smoothnets2022", TABLE_2))
        for name, row in table.items()
        for e, value in row.items()
    },
}


def measured(recipe: str, data: str, metric: str, epsilon: float) -> tuple[float, int, float]:
    """Median in %, number of runs and median minutes out of results.csv."""
    with (ROOT / "results" / "results.csv").open(encoding="utf-8") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["recipe"], row["data"], row["metric"]) == (recipe, data, metric)
            and row["epsilon"]
            and float(row["epsilon"]) == epsilon
        ]
    minutes = median(float(row["minutes"]) for row in rows)
    return round(median(100 * float(row["value"]) for row in rows), 1), len(rows), round(minutes, 1)


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_says_what_it_is_and_how_to_run_it(name: str) -> None:
    reference = load_recipe(name).reference
    assert reference.title
    assert reference.cost
    assert f"--recipe {name}" in reference.command or reference.command in (
        "sfumato demo",
        "sfumato train FOLDER --epsilon 3",
    )


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_with_a_paper_has_a_figure_and_its_place(name: str) -> None:
    recipe = load_recipe(name)
    reference = recipe.reference
    if reference.paper is None:
        assert name not in PUBLISHED
        assert reference.also == ()
        return
    assert None not in (reference.data, reference.metric, reference.table)
    assert reference.value is not None or reference.claim is not None  # not every figure prints its values
    assert (reference.epsilon is not None) == recipe.privacy.enabled
    if reference.value is not None and reference.epsilon is not None:
        assert reference.published(reference.data)[reference.epsilon] == reference.value
    if name in PUBLISHED:
        assert reference.data == recipe.data.name
        assert reference.epsilon == float(name.rpartition("-eps")[2])


def test_the_figures_are_those_of_the_papers_tables() -> None:
    stated = {
        name: (load_recipe(name).reference.value, load_recipe(name).reference.spread)
        for name in list_recipes()
        if name in PUBLISHED
    }
    assert stated == PUBLISHED
    assert len(set(PUBLISHED.values())) > 30  # a mix-up of two rows would be noticed


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("de2022")])
def test_the_guarantee_that_is_stated_is_the_one_that_is_accounted(name: str) -> None:
    recipe = load_recipe(name)
    split = name.endswith("wrn16-4-eps8")  # this row was computed for the training split
    plan = build_plan(recipe, num_units=45_000 if split else 50_000)
    assert f"ε = {plan.epsilon:.3f} with the RDP accountant" in recipe.reference.guarantee
    assert f"ε = {plan.epsilon + 0.002:.3f}" not in recipe.reference.guarantee


def test_our_figures_are_those_that_were_measured() -> None:
    checked = 0
    for name in list_recipes():
        for item in load_recipe(name).reference.ours:
            found = measured(name, item.data, item.metric, item.epsilon)
            assert (item.median, item.n, item.minutes) == found, name
            checked += 1
    assert checked > 25


def test_a_reference_changes_nothing_in_a_run_and_may_change_on_resume(tmp_path: Path) -> None:
    plain = small_recipe(training__seed=3)
    promising = with_settings(
        plain, {"reference.value": 99.0, "reference.epsilon": 0.1, "reference.data": "x"}
    )
    train(plain, out=tmp_path / "plain", data=small_splits())
    with pytest.raises(RuntimeError, match="as if killed"):
        train(plain, out=tmp_path / "promising", data=small_splits(), observer=Watcher(crash_after=3))
    train(promising, out=tmp_path / "promising", data=small_splits(), resume=True)
    first, second = (
        (tmp_path / name / "release" / "model.safetensors").read_bytes() for name in ("plain", "promising")
    )
    assert first == second


def test_a_reference_survives_the_round_trip_and_is_not_invented() -> None:
    recipe = load_recipe("fast/pretrained")
    assert recipe_from_toml(recipe_to_toml(recipe)) == recipe
    assert "[reference]" in recipe_to_toml(recipe)
    assert "[reference]" not in recipe_to_toml(dataclasses.replace(recipe, reference=None))


def test_figures_are_asked_for_by_data() -> None:
    reference = load_recipe("fast/pretrained").reference
    assert reference.published("cifar10") == {1.0: 93.1, 2.0: 93.6, 4.0: 94.0, 8.0: 94.2}
    assert reference.published("cifar100") == {1.0: 70.3, 2.0: 73.9, 4.0: 76.1, 8.0: 77.6}
    assert reference.published("mnist") == {}
