"""results.csv → README.md and accuracy.svg: medians over seeds beside the published figures.

python results/page.py
"""

from __future__ import annotations

import csv
from collections import defaultdict
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
WITHOUT_IMAGES = ("fast/combined", "fast/patches", "fast/scatter", "fast/scatter-cnn")
WITH_IMAGENET = ("fast/pretrained", "fast/pretrained, Lite0 alone")
RECIPES = (*WITHOUT_IMAGES, *WITH_IMAGENET)
TRANSFER = ("finetune/cifar10-scratch", "finetune/generated-cifar10", "finetune/cifar100-cifar10")
COLOURS = {"fast/pretrained": "C2", "fast/combined": "C3", "fast/patches": "C0", "fast/scatter": "C1"}
Key = tuple[str, str, str, str]  # recipe, data, metric, epsilon


def main() -> None:
    groups = grouped_rows()
    draw(groups)
    (HERE / "README.md").write_text(page(groups), encoding="utf-8")


def grouped_rows() -> dict[Key, list[dict[str, str]]]:
    """The rows of results.csv, those that differ in their seed only together."""
    groups: dict[Key, list[dict[str, str]]] = defaultdict(list)
    with (HERE / "results.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            groups[row["recipe"], row["data"], row["metric"], row["epsilon"]].append(row)
    return groups


def page(groups: dict[Key, list[dict[str, str]]]) -> str:
    parts = [
        "# Results",
        "Written by `python results/page.py` from results.csv, where each row is one run. Accuracy on the "
        "real test set in %: median over seeds (least to most). Minutes are processor time over 2 cores, "
        "features included. Steps and learning rate of fast/* follow one rule, checked on a 45,000 / 5,000 "
        "split of the CIFAR-10 training images (docs/features.md); the same values serve all data. "
        "That few units take more and smaller steps was seen on chest X-rays of held-out training patients; "
        "as with the other choices, that search is not counted in ε. "
        "Budgets are for one image more or less (chest X-ray: one patient), δ the largest power of ten "
        "below 1/N.",
        "![Accuracy against ε on CIFAR-10](accuracy.svg)",
        "## CIFAR-10 without real public data, beside published figures",
        published_table(groups, "cifar10", WITHOUT_IMAGES, PUBLISHED),
        "## CIFAR-10 with public ImageNet weights",
        published_table(groups, "cifar10", WITH_IMAGENET, PUBLISHED_PRETRAINED),
        "## CIFAR-10 after a public pre-training, a net of 157,000 parameters",
        "All three are the same net. The first is trained from random weights; the others begin with weights "
        "that were trained without privacy, on generated images or on CIFAR-100.",
        published_table(groups, "cifar10", TRANSFER, {}),
        "## CIFAR-100, the same settings; published figures are with ImageNet",
        published_table(groups, "cifar100", RECIPES, PUBLISHED_CIFAR100),
        "## MNIST, the same settings",
        published_table(groups, "mnist", RECIPES, PUBLISHED_MNIST),
        "## Chest X-rays, one guarantee per patient",
        "Pneumonia or not, in 624 test images; 62.5 % have it, and 74 % of the training images, so that the "
        "area under the ROC curve says more than accuracy.",
        patient_table(groups),
        "## What the recipes refer to",
        "The figures of the papers behind the recipes, out of the recipes themselves, and ours for the same "
        "data and budget. The papers' own recipes, at full size, take days on two cores and have not been "
        "run here.",
        reference_table(groups),
        "## All runs",
        all_runs(groups),
    ]
    return "\n\n".join(parts) + "\n"


def summary(rows: list[dict[str, str]]) -> str:
    values = sorted(100 * float(row["value"]) for row in rows)
    return f"{median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f}, n = {len(values)})"


def published_table(
    groups: dict[Key, list[dict[str, str]]],
    data: str,
    recipes: tuple[str, ...],
    published: dict[str, dict[float, float]],
) -> str:
    """Our medians, bold, and the same recipe without privacy; then what others published."""
    budgets = (1, 2, 3, 4, 8)
    lines = ["| | " + " | ".join(f"ε = {e}" for e in budgets) + " | no privacy |"]
    lines.append("|---" * (len(budgets) + 2) + "|")
    for recipe in recipes:
        cells = []
        for budget in (*map(float, budgets), ""):
            rows = groups.get((recipe, data, "accuracy", f"{budget}"))
            cells.append(f"**{median(100 * float(row['value']) for row in rows):.1f}**" if rows else "")
        if any(cells):
            lines.append(f"| **{recipe}** | " + " | ".join(cells) + " |")
    for name, figures in published.items():
        cells = [f"{figures[e]:.1f}" if e in figures else "" for e in budgets]
        lines.append(f"| {name} | " + " | ".join(cells) + " | |")
    return "\n".join(lines)


def patient_table(groups: dict[Key, list[dict[str, str]]]) -> str:
    """Accuracy and area under the ROC curve beside the same recipe without privacy."""
    lines = ["| | accuracy, ε = 3 | AUC, ε = 3 | accuracy, no privacy | AUC, no privacy |", "|---" * 5 + "|"]
    for recipe in (*RECIPES, "finetune/efficientnet-lite0"):
        found = [
            groups.get((recipe, "chest-xray", metric, budget))
            for budget in ("3.0", "")
            for metric in ("accuracy", "auc")
        ]
        if any(found):
            lines.append(
                f"| {recipe} | " + " | ".join(summary(rows) if rows else "" for rows in found) + " |"
            )
    return "\n".join(lines)


def reference_table(groups: dict[Key, list[dict[str, str]]]) -> str:
    """Each figure that a recipe names with its source, beside what we measured."""
    lines = ["| recipe | source | ε | metric | published, % | ours |", "|---" * 6 + "|"]
    for name, reference in REFERENCES.items():
        if reference.paper is None:
            continue
        spread = "" if reference.spread is None else f" ± {reference.spread:g}"
        rows = groups.get((name, reference.data, "accuracy", f"{reference.epsilon}"))
        source = f"{reference.paper.partition(', ')[0]}, {reference.table}"
        value, ours = f"{reference.value}{spread}", summary(rows) if rows else ""
        metric = f"{reference.data}: {reference.metric}"
        lines.append("| " + " | ".join((name, source, f"{reference.epsilon:g}", metric, value, ours)) + " |")
    return "\n".join(lines)


def all_runs(groups: dict[Key, list[dict[str, str]]]) -> str:
    lines = ["| recipe | data | ε | metric | median (range, seeds) | minutes | command |", "|---" * 7 + "|"]
    for (recipe, data, metric, epsilon), rows in sorted(groups.items(), key=_order):
        minutes = median(float(row["minutes"]) for row in rows)
        budget = f"{float(epsilon):g}" if epsilon else "no privacy"
        command = rows[0]["command"].replace("|", "\\|")  # a bar would end the table's cell
        cells = [recipe, data, budget, metric, summary(rows), f"{minutes:.1f}", f"`{command}`"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _order(item: tuple[Key, list]) -> tuple[str, str, str, float]:
    recipe, data, metric, epsilon = item[0]
    return recipe, data, metric, float(epsilon or "inf")


def draw(groups: dict[Key, list[dict[str, str]]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sfumato"  # equal figures give equal files
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.6))
    for (name, figures), marker in zip(PUBLISHED.items(), "sv^D", strict=True):
        budgets, values = list(figures), list(figures.values())
        axes.plot(budgets, values, f"{marker}--", color="0.55", markersize=5, linewidth=1, label=name)
    for recipe, colour in COLOURS.items():
        points = sorted(
            (float(key[3]), [100 * float(row["value"]) for row in rows])
            for key, rows in groups.items()
            if key[:3] == (recipe, "cifar10", "accuracy") and key[3]
        )
        if points:
            middle = [median(values) for _, values in points]
            below = [m - min(values) for m, (_, values) in zip(middle, points, strict=True)]
            above = [max(values) - m for m, (_, values) in zip(middle, points, strict=True)]
            budgets = [epsilon for epsilon, _ in points]
            axes.errorbar(
                budgets, middle, yerr=[below, above], fmt="o-", color=colour, label=recipe, capsize=2
            )
    axes.set(xscale="log", xlabel="ε at δ = 1e-5", ylabel="CIFAR-10 test accuracy, %", xlim=(0.9, 9))
    axes.set_xticks([1, 2, 3, 4, 6, 8], ["1", "2", "3", "4", "6", "8"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(HERE / "accuracy.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
