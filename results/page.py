"""results.csv, reproductions/ and studies/ → README.md, index.html and accuracy.svg.

python results/page.py
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from drawing import draw
from figures import (
    BUDGET_TABLES,
    BUDGETS,
    HOW,
    RECIPES,
    REFERENCES,
    BudgetTable,
    Groups,
    best,
    cells_of,
    grouped_rows,
    in_order,
    published_cells,
    summary,
)
from papers import answer, cost_words, documents, unfinished
from website import website

HERE = Path(__file__).parent
__all__ = ["best", "documents", "grouped_rows", "page", "website"]


def main() -> None:
    groups, tables = grouped_rows(), documents()
    draw(groups, HERE / "accuracy.svg")
    (HERE / "README.md").write_text(page(groups, tables), encoding="utf-8")
    (HERE / "index.html").write_text(website(groups, tables), encoding="utf-8")


def page(groups: Groups, tables: list[dict[str, Any]]) -> str:
    parts = [
        "# Results",
        "Written by `python results/page.py` from results.csv, where each row is one run, and from "
        f"reproductions/; [index.html](index.html) has the same with filters. {HOW}",
        "![Accuracy against ε on CIFAR-10](accuracy.svg)",
    ]
    for table in BUDGET_TABLES:
        parts += [f"## {table.title}", *([table.note] if table.note else []), budget_table(groups, table)]
    parts += [
        "## Chest X-rays, one guarantee per patient",
        "Pneumonia or not, in 624 test images; 62.5 % have it, and 74 % of the training images, so that the "
        "area under the ROC curve says more than accuracy.",
        patient_table(groups),
        "## The papers' tables and figures, run again",
        "Small forms on real CIFAR-10 at the papers' ε (`sfumato reproduce`, "
        "[docs/reproduce.md](../docs/reproduce.md)): differences in points by seed with Student's interval "
        "at 95 %. Levels are those of small nets, and of some thirty intervals one or two leave out zero by "
        "chance. Settings of the small forms follow rules or were chosen on held-out training images (rates "
        "of SmoothNet's tables, at another batch size). All but those of Klause's table 1 ran one after the "
        "other in one process, without reports and scores on training images, which the command adds.",
        *(f"**{name}**: {text}" for name, text in unfinished(tables).items()),
        *(reproduced(table) for table in tables),
        "## What the recipes refer to",
        "The figures of the papers behind the recipes, out of the recipes themselves, and ours for the same "
        "data and budget. The papers' own recipes, at full size, take days on two cores and have not been "
        "run here.",
        reference_table(groups),
        "## ImageNette and Tiny ImageNet",
        "Only samples were at hand: 10 classes with 550 images, 20 with 1,200, their val/ images as test."
        " So few units leave hardly more than chance (rows of fast/patches below, at 64 px). The plan for"
        " the whole sets, images of 64 px, whole-set steps: ImageNette (9,469 images, δ = 1e-5) 73 steps "
        "at σ = 11.9 for ε = 3 and 63 at σ = 4.8 for ε = 8; Tiny ImageNet (100,000, δ = 1e-6) 95 at σ = "
        "15.0 and 122 at σ = 7.2. Not run.",
        "## All runs",
        all_runs(groups),
    ]
    return "\n\n".join(parts) + "\n"


def budget_table(groups: Groups, table: BudgetTable) -> str:
    """Our medians, bold, and the same recipe without privacy; then what others published."""
    lines = ["| | " + " | ".join(f"ε = {e}" for e in BUDGETS) + " | no privacy |"]
    lines.append("|---" * (len(BUDGETS) + 2) + "|")
    for recipe in table.recipes:
        cells = [f"**{text}**" if text else "" for text in cells_of(groups, recipe, table.data)]
        if any(cells):
            lines.append(f"| **{recipe}** | " + " | ".join(cells) + " |")
    for name, figures in table.published.items():
        lines.append(f"| {name} | " + " | ".join(published_cells(figures)) + " | |")
    return "\n".join(lines)


def patient_table(groups: Groups) -> str:
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


def reproduced(table: dict[str, Any]) -> str:
    """One table or figure: what was concluded, what came of it, and the differences."""
    small = f" Small form: {table['note']}" if table["note"] else ""
    parts = [
        f"### {table['paper'].partition(', ')[0]}: {table['title']}",
        f"They conclude: {table['claim']}{small} {cost_words(table)} `{table['command']}`",
        *([table["verdict"]] if table["verdict"] else []),
    ]
    lines = ["| accuracy, % | | theirs | ours (range, seeds) |", "|---|---|---|---|"]
    for cell in table["cells"]:
        if cell["score"] == "accuracy":
            theirs = "" if cell["published"] is None else f"{cell['published']:g}"
            lines.append(f"| {cell['row']} | {cell['column']} | {theirs} | {_ours(cell)} |")
    parts.append("\n".join(lines))
    compared = [row for row in table["differences"] if row["n"] and row["score"] == "accuracy"]
    if compared:
        lines = ["| difference in points | | theirs | ours | 95 % interval | seeds | |", "|---" * 7 + "|"]
        for row in compared:
            theirs = "" if row["published"] is None else f"{row['published']:+.1f}"
            interval = "" if row["lower"] is None else f"{row['lower']:+.1f} to {row['upper']:+.1f}"
            cells = [f"{row['row']} − {row['minus']}", row["column"], theirs, f"{row['mean']:+.1f}", interval]
            lines.append("| " + " | ".join([*cells, str(row["n"]), answer(row)]) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _ours(cell: dict[str, Any]) -> str:
    if not cell["n"]:
        return ""
    return f"{cell['ours']:.1f} ({cell['lowest']:.1f} to {cell['highest']:.1f}, n = {cell['n']})"


def reference_table(groups: Groups) -> str:
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


def all_runs(groups: Groups) -> str:
    lines = ["| recipe | data | ε | metric | median (range, seeds) | minutes | command |", "|---" * 7 + "|"]
    for (recipe, data, metric, epsilon), rows in sorted(groups.items(), key=in_order):
        minutes = median(float(row["minutes"]) for row in rows)
        budget = f"{float(epsilon):g}" if epsilon else "no privacy"
        command = rows[0]["command"].replace("|", "\\|")  # a bar would end the table's cell
        cells = [recipe, data, budget, metric, summary(rows), f"{minutes:.1f}", f"`{command}`"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
