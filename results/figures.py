"""The rows of results.csv in groups, and the published figures that they stand beside."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import median

from sfumato.recipes.families import member_index
from sfumato.recipes.recipe import list_recipes, load_recipe

HERE = Path(__file__).parent

# Rows of other tables and figures are what `sfumato reproduce` prints.
SHOWN = ("de2022/table3", "scalenorm2022/table1", "scalenorm2022/table2", "smoothnets2022/table2")
REFERENCES = {
    name: load_recipe(name).reference
    for name in list_recipes()
    if name not in member_index() or member_index()[name][0] in SHOWN
}


def best(pattern: str, data: str) -> dict[float, float]:
    """The highest published figure at each budget among the references of the recipes that match."""
    figures: dict[float, float] = {}
    for name, reference in REFERENCES.items():
        if fnmatch(name, pattern):
            for epsilon, value in reference.published(data).items():
                figures[epsilon] = max(value, figures.get(epsilon, 0.0))
    return dict(sorted(figures.items()))


# CIFAR-10, δ = 1e-5, accuracy in %; without real public data. What a recipe refers to stands in the recipe.
PUBLISHED = {
    "De et al. 2022, best from scratch": best("de2022/cifar10-*", "cifar10"),
    "ScatterNet, Tramèr & Boneh 2021": best("fast/scatter", "cifar10") | {4: 69.7, 8: 72.4},
    "DPSUR on ScatterNet features, 2024": {1: 64.4, 2: 69.4, 3: 70.8, 4: 71.5},
    "DP-RandP, learnt from synthetic images, 2023": {1: 72.3},
}
# The same with public ImageNet images: De et al. 2022, table 1; the last layer: table 5.
PUBLISHED_PRETRAINED = {
    "De et al. 2022, WRN-28-10 of ImageNet, all layers": {1: 94.7, 2: 95.4, 4: 96.1, 8: 96.7},
    "De et al. 2022, the same, last layer": best("fast/pretrained", "cifar10"),
}
PUBLISHED_CIFAR100 = {
    "De et al. 2022, WRN-28-10 of ImageNet, all layers": {1: 67.4, 2: 74.7, 4: 79.2, 8: 81.8},
    "De et al. 2022, the same, last layer": best("fast/pretrained", "cifar100"),
}
# Tramèr & Boneh 2021, as their repository Handcrafted-DP states for ε = 3, δ = 1e-5.
PUBLISHED_MNIST = {
    "ScatterNet, linear or CNN, Tramèr & Boneh 2021": {3: 98.7},
    "CNN from pixels, Tramèr & Boneh 2021": {3: 98.1},
}
WITHOUT_IMAGES = (
    "fast/aligned",
    "fast/wide",
    "fast/combined",
    "fast/patches",
    "fast/scatter",
    "fast/scatter-cnn",
)
WITH_IMAGENET = ("fast/pretrained", "fast/pretrained, Lite0 alone")
RECIPES = (*WITHOUT_IMAGES, *WITH_IMAGENET)
TRANSFER = ("finetune/cifar10-scratch", "finetune/generated-cifar10", "finetune/cifar100-cifar10")

Key = tuple[str, str, str, str]  # recipe, data, metric, epsilon
Groups = dict[Key, list[dict[str, str]]]
BUDGETS = (1, 2, 3, 4, 8)
HOW = (
    "Accuracy on the real test set in %: median over seeds (least to most). Minutes are processor time over "
    "2 cores, features included. Steps and learning rate of fast/* follow one rule, checked on a 45,000 / "
    "5,000 split of the CIFAR-10 training images (docs/features.md); the same values serve all data. "
    "That few units take more and smaller steps was seen on chest X-rays of held-out training patients; "
    "as with the other choices, that search is not counted in ε. "
    "Budgets are for one image more or less (chest X-ray: one patient), δ the largest power of ten below 1/N."
)


@dataclass(frozen=True)
class BudgetTable:
    """Our recipes and published figures on one data set, by ε."""

    title: str
    data: str
    recipes: tuple[str, ...]
    published: dict[str, dict[float, float]]
    note: str = ""


BUDGET_TABLES = (
    BudgetTable(
        "CIFAR-10 without real public data, beside published figures", "cifar10", WITHOUT_IMAGES, PUBLISHED
    ),
    BudgetTable("CIFAR-10 with public ImageNet weights", "cifar10", WITH_IMAGENET, PUBLISHED_PRETRAINED),
    BudgetTable(
        "CIFAR-10 after a public pre-training, a net of 157,000 parameters",
        "cifar10",
        TRANSFER,
        {},
        "All three are the same net. The first is trained from random weights; the others begin with weights "
        "that were trained without privacy, on generated images or on CIFAR-100.",
    ),
    BudgetTable(
        "CIFAR-100, the same settings; published figures are with ImageNet",
        "cifar100",
        RECIPES,
        PUBLISHED_CIFAR100,
    ),
    BudgetTable("MNIST, the same settings", "mnist", RECIPES, PUBLISHED_MNIST),
)


def grouped_rows() -> dict[Key, list[dict[str, str]]]:
    """The rows of results.csv, those that differ in their seed only together."""
    groups: dict[Key, list[dict[str, str]]] = defaultdict(list)
    with (HERE / "results.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            groups[row["recipe"], row["data"], row["metric"], row["epsilon"]].append(row)
    return groups


def summary(rows: list[dict[str, str]]) -> str:
    values = sorted(100 * float(row["value"]) for row in rows)
    return f"{median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f}, n = {len(values)})"


def cells_of(groups: Groups, recipe: str, data: str) -> list[str]:
    """Medians of a recipe at each budget and without privacy; empty where there is no run."""
    cells = []
    for budget in (*map(float, BUDGETS), ""):
        rows = groups.get((recipe, data, "accuracy", f"{budget}"))
        cells.append(f"{median(100 * float(row['value']) for row in rows):.1f}" if rows else "")
    return cells


def published_cells(figures: dict[float, float]) -> list[str]:
    return [f"{figures[e]:.1f}" if e in figures else "" for e in BUDGETS]


def in_order(item: tuple[Key, list]) -> tuple[str, str, str, float]:
    recipe, data, metric, epsilon = item[0]
    return recipe, data, metric, float(epsilon or "inf")
