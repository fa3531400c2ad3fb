"""Fairness gaps by hand, fronts against a slow definition, curves out of records."""

from __future__ import annotations

import numpy as np
import pytest

from sfumato.errors import DataError
from sfumato.recipes.recipe import load_recipe
from sfumato.study.convergence import Curve, Point, draw_convergence
from sfumato.study.fairness import draw_fairness, fairness_result, measure_fairness, paired_gap
from sfumato.study.pareto import (
    TradeOff,
    draw_pareto,
    pareto_front,
    pareto_result,
    published_results,
    table_results,
)


def flags(*counts: tuple[int, float]) -> np.ndarray:
    return np.concatenate([np.full(count, value) for count, value in counts])


def test_the_gap_of_constructed_predictions() -> None:
    ordinary = flags((10, 1.0), (10, 1.0))  # two classes of ten images
    private = flags((5, 1.0), (5, 0.0), (9, 1.0), (1, 0.0))
    labels = np.repeat([0, 1], 10)
    groups = {"few": (ordinary[:4], private[:4])}
    found = measure_fairness(ordinary, private, labels, ("cat", "dog", "none"), groups=groups)
    assert [(gap.name, gap.gap) for gap in found.classes] == [("cat", 0.5), ("dog", pytest.approx(0.1))]
    assert found.overall.gap == pytest.approx(0.3)
    assert found.groups[0].gap == 0
    assert found.spread(found.classes) == pytest.approx(0.4)
    assert found.spread(found.groups) is None
    same = measure_fairness(ordinary, ordinary, labels, ("cat", "dog", "none"))  # the control
    assert same.overall.gap == same.spread(same.classes) == 0


def test_the_interval_is_that_of_agresti_and_min() -> None:
    ordinary = flags((60, 1.0), (20, 1.0), (5, 0.0), (15, 0.0))
    private = flags((60, 1.0), (20, 0.0), (5, 1.0), (15, 0.0))
    gap = paired_gap(ordinary, private, name="all", kind="all")
    mean = (20.5 - 5.5) / 102
    reach = 1.959964 * ((26 / 102 - mean**2) / 102) ** 0.5
    assert gap.gap == pytest.approx(0.15)
    assert (gap.lower, gap.upper) == pytest.approx((mean - reach, mean + reach))


def test_the_interval_covers_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    covered = {0.15: 0, 0.25: 0}  # the true gap, and a control
    for _ in range(400):
        draws = random.random(150)
        ordinary, private = (draws < 0.8) * 1.0, ((draws < 0.6) | (draws > 0.95)) * 1.0
        gap = paired_gap(ordinary, private, name="all", kind="all")
        for truth in covered:
            covered[truth] += gap.lower <= truth <= gap.upper
    assert 0.92 < covered[0.15] / 400 < 0.98
    assert covered[0.25] / 400 < 0.6


def test_other_images_are_not_compared() -> None:
    with pytest.raises(DataError, match="unpaired-scores"):
        paired_gap(np.ones(3), np.ones(4), name="all", kind="all")


def test_many_classes_and_groups_are_drawn(tmp_path) -> None:
    random = np.random.default_rng(1)
    labels = np.repeat(np.arange(60), 5)
    sides = (random.random(300) < 0.9) * 1.0, (random.random(300) < 0.7) * 1.0
    found = measure_fairness(*sides, labels, [f"class {i}" for i in range(60)], groups={"g": sides})
    assert len(fairness_result(found, {}, None).rows) == 62
    draw_fairness(found, private_label="private").savefig(tmp_path / "figure.png")


def trade_off(epsilon: float, accuracy: float, **fields: object) -> TradeOff:
    settings = {"series": "s", "data": "d", "delta": None, "deviation": None, "num_runs": 1, "where": ""}
    settings |= {"published": False, **fields}
    return TradeOff(epsilon=epsilon, accuracy=accuracy, **settings)  # type: ignore[arg-type]


def test_the_front_is_what_no_other_point_beats() -> None:
    random = np.random.default_rng(3)
    points = [trade_off(float(e), float(a)) for e, a in random.integers(1, 9, (40, 2))]
    unbeaten = {
        (point.epsilon, point.accuracy)
        for point in points
        if not any(
            other.epsilon <= point.epsilon
            and other.accuracy >= point.accuracy
            and (other.epsilon, other.accuracy) != (point.epsilon, point.accuracy)
            for other in points
        )
    }
    front = [(point.epsilon, point.accuracy) for point in pareto_front(points)]
    assert set(front) == unbeaten
    assert front == sorted(front)


def test_published_figures_agree_with_the_recipes_references() -> None:
    figures = {(p.series, p.epsilon): p.accuracy for p in published_results("cifar10")}
    recipes = {
        "de2022/cifar10-wrn16-4-eps8": ("De et al. 2022, WRN-16-4", 8.0),
        "scalenorm2022/cifar10-scale-resnet9-eps7.42": ("Klause et al. 2022, ScaleResNet-9", 7.42),
        "smoothnets2022/cifar10-smoothnet-eps7": ("Remerscheid et al. 2022, SmoothNet", 7.0),
    }
    for recipe, (series, epsilon) in recipes.items():
        assert load_recipe(recipe).reference.published("cifar10")[epsilon] == figures[series, epsilon]
    assert published_results("nowhere") == []


def test_a_table_of_results_becomes_medians_over_seeds(tmp_path) -> None:
    table = tmp_path / "results.csv"
    head = "recipe,data,seed,metric,value,epsilon,delta\n"
    lines = [f"a,cifar10,{seed},accuracy,{value},1.0,1e-5\n" for seed, value in enumerate((0.5, 0.9, 0.6))]
    table.write_text(head + "".join(lines) + "a,cifar10,0,auc,0.1,1.0,1e-5\nb,cifar10,0,accuracy,0.2,,\n")
    (point,) = table_results(table)
    assert (point.accuracy, point.num_runs, point.epsilon) == (60, 3, 1)
    assert table_results(table, only=["b*"]) == []
    draw_pareto("cifar10", [point, *published_results("cifar10")]).savefig(tmp_path / "figure.png")
    rows = pareto_result("cifar10", [point, *published_results("cifar10")]).rows
    assert next(row for row in rows if row["series"] == "a")["on_front_of_its_kind"]
    for text in (
        "recipe,data\na,b\n",
        head + "a,cifar10,0,accuracy,x,1.0,1e-5\n",
        head + "a,c,0,accuracy,1,inf,\n",
    ):
        table.write_text(text)
        with pytest.raises(DataError, match="bad-results"):
            table_results(table)
    with pytest.raises(DataError, match="bad-results"):
        table_results(tmp_path / "nothing.csv")


def test_a_curve_is_the_mean_where_all_runs_were_scored(tmp_path) -> None:
    def run(*scores: tuple[int, float]) -> tuple[Point, ...]:
        return tuple(Point(step=s, epsilon=s / 10, accuracy=a, split="test") for s, a in scores)

    curve = Curve(
        label="c", runs=("a", "b"), points=(run((1, 0.2), (2, 0.4), (3, 0.5)), run((1, 0.4), (3, 0.5)))
    )
    means = [(mean.step, mean.epsilon, mean.accuracy, spread) for mean, spread in curve.means()]
    assert means == [(1, 0.1, pytest.approx(0.3), pytest.approx(0.1 * 2**0.5)), (3, 0.3, 0.5, 0)]
    draw_convergence([curve]).savefig(tmp_path / "figure.png")
