"""accuracy.svg: accuracy against ε on CIFAR-10, results with public weights in a panel of their own."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from figures import PUBLISHED, PUBLISHED_PRETRAINED, Groups

TICKS = (1, 2, 3, 4, 6, 8)
PANELS = (
    (
        "no real public images",
        PUBLISHED,
        {
            "fast/aligned": "C5",
            "fast/wide": "C4",
            "fast/combined": "C3",
            "fast/patches": "C0",
            "fast/scatter": "C1",
        },
    ),
    (
        "weights of public ImageNet images",
        PUBLISHED_PRETRAINED,
        {"fast/pretrained": "C2", "fast/pretrained, Lite0 alone": "C4"},
    ),
)


def draw(groups: Groups, target: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sfumato"  # equal figures give equal files
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9.6, 4.6), width_ratios=(3, 2))
    for axes, (title, published, ours) in zip(panels, PANELS, strict=True):
        for (name, figures), marker in zip(published.items(), "sv^D", strict=False):
            budgets, values = list(figures), list(figures.values())
            axes.plot(budgets, values, f"{marker}--", color="0.55", markersize=5, linewidth=1, label=name)
        for recipe, colour in ours.items():
            points = curve(groups, recipe)
            if points:
                middle = [median(values) for _, values in points]
                below = [m - min(values) for m, (_, values) in zip(middle, points, strict=True)]
                above = [max(values) - m for m, (_, values) in zip(middle, points, strict=True)]
                axes.errorbar(
                    [epsilon for epsilon, _ in points],
                    middle,
                    yerr=[below, above],
                    fmt="o-",
                    color=colour,
                    label=recipe,
                    capsize=2,
                )
        axes.set(xscale="log", xlabel="ε at δ = 1e-5", xlim=(0.9, 9))
        axes.set_title(title, fontsize=10)
        axes.set_xticks(TICKS, [str(tick) for tick in TICKS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", fontsize=7, frameon=False)
    panels[0].set_ylabel("CIFAR-10 test accuracy, %")
    panels[1].set_ylim(85, 98)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None, "Description": drawn(groups)})
    plt.close(figure)


def curve(groups: Groups, recipe: str) -> list[tuple[float, list[float]]]:
    """Our accuracies in % at each ε, in order."""
    return sorted(
        (float(key[3]), [100 * float(row["value"]) for row in rows])
        for key, rows in groups.items()
        if key[:3] == (recipe, "cifar10", "accuracy") and key[3]
    )


def drawn(groups: Groups) -> str:
    """What the figure shows, in words: its description, by which a figure of other rows is told."""
    lines = []
    for title, published, ours in PANELS:
        lines += [f"{title}: {name} {figures}" for name, figures in published.items()]
        lines += [
            f"{title}: {recipe} "
            + ", ".join(f"{median(values):.1f} at {epsilon:g}" for epsilon, values in curve(groups, recipe))
            for recipe in ours
        ]
    return "; ".join(lines)
