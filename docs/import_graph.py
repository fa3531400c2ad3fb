"""Draw which part of the package imports which: python docs/import_graph.py [FILE.svg]

Parts stand in the order that tests/test_architecture.py holds, the mechanism at the bottom. Every arrow
points down; the script fails if one does not.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from test_architecture import ORDER, PACKAGE, TIERS, files, imported_parts, part_of  # noqa: E402

COLOURS = dict(zip(TIERS, ["#1b4965", "#2a6f97", "#468faf", "#61a5c2", "#89c2d9", "#a9d6e5"], strict=True))
HIDDEN = {"__init__", "__main__", "errors"}  # everything may import the errors; the front door imports all


def edges() -> set[tuple[str, str]]:
    """(importing part, imported part), without those of a part with itself."""
    found = set()
    for path in files():
        part = part_of(path)
        for other in imported_parts(ast.parse(path.read_text()), set(ORDER)):
            if other != part and not {part, other} & HIDDEN:
                found.add((part, other))
    return found


def places() -> dict[str, tuple[float, float]]:
    """One row for each tier, its parts side by side."""
    found = {}
    for height, parts in enumerate(TIERS.values()):
        shown = [part for part in parts if part not in HIDDEN]
        for number, part in enumerate(shown):
            found[part] = (
                (number + 0.5) / len(shown),
                height + 0.35 * (number % 2) - 0.17,  # two levels, so that arrows inside a tier show
            )
    return found


def main() -> int:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "import_graph.svg"
    at, upward = places(), []
    figure, axes = plt.subplots(figsize=(11, 7.5))
    for importer, imported in sorted(edges()):
        if ORDER.index(imported) > ORDER.index(importer):
            upward.append(f"{importer} imports {imported}")
        axes.annotate(
            "",
            xy=at[imported],
            xytext=at[importer],
            arrowprops={"arrowstyle": "-|>", "color": "#8d99ae", "lw": 0.7, "shrinkA": 14, "shrinkB": 14},
        )
    for tier, parts in TIERS.items():
        for part in parts:
            if part in at:
                count = sum(1 for path in files() if part_of(path) == part)
                axes.text(
                    *at[part],
                    f"{part}\n{count} file{'s' * (count != 1)}",
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color="white" if tier in ("mechanism", "coupling", "materials") else "black",
                    bbox={"boxstyle": "round,pad=0.4", "fc": COLOURS[tier], "ec": "none"},
                )
    for height, tier in enumerate(TIERS):
        axes.text(-0.02, height, tier, ha="right", va="center", fontsize=9, style="italic")
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.6, len(TIERS) - 0.4)
    axes.axis("off")
    plt.rcParams["svg.hashsalt"] = "sfumato"
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(f"{target.name}: {len(edges())} arrows among {len(at)} parts of {PACKAGE.name}")
    for line in upward:
        print(f"upwards: {line}")
    return 1 if upward else 0


if __name__ == "__main__":
    sys.exit(main())
