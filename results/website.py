"""index.html: all results on one page that needs nothing from elsewhere and can be filtered."""

from __future__ import annotations

import base64
import hashlib
import tomllib
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from drawing import drawn
from figures import (
    BUDGET_TABLES,
    BUDGETS,
    HOW,
    RECIPES,
    REFERENCES,
    Groups,
    cells_of,
    in_order,
    published_cells,
    summary,
)
from forest import forest
from markupsafe import Markup
from papers import answer, cost_words, unfinished

from sfumato.recipes.recipe import load_recipe

HERE = Path(__file__).parent
TEMPLATES = HERE / "templates"
REPORT_STYLE = HERE.parent / "src" / "sfumato" / "reporting" / "templates" / "style.css"
POLICY = (
    "default-src 'none'; img-src 'self' file:; style-src 'sha256-{}'; script-src 'sha256-{}'; base-uri 'none'"
)
SCORES = {"top5_accuracy": "top 5", "training_accuracy": "on training images"}


def website(groups: Groups, tables: list[dict[str, Any]]) -> str:
    """The page: all rows of all parts are in it, the script only hides some."""
    style = REPORT_STYLE.read_text(encoding="utf-8") + (TEMPLATES / "website.css").read_text(encoding="utf-8")
    script = (TEMPLATES / "website.js").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown_studies = studies()
    parts = [("best", "Accuracy at each budget"), ("reproductions", "Papers run again")]
    parts += [("studies", "Studies")] if shown_studies else []
    parts += [("reported", "What the papers report"), ("runs", "All runs")]
    runs, reported = run_rows(groups), reported_rows(groups)
    return environment.get_template("website.html.j2").render(
        style=Markup(style),
        script=Markup(script),
        policy=POLICY.format(_checksum(style), _checksum(script)),
        parts=parts,
        sets=sorted({row["data"] for row in (*runs, *reported) if row["data"]}),
        how=HOW,
        accuracy_alt=drawn(groups),
        budgets=budget_tables(groups),
        unfinished=unfinished(tables),
        reproductions=[reproduction(table) for table in tables],
        studies=shown_studies,
        reported=reported,
        runs=runs,
    )


def budget_tables(groups: Groups) -> list[dict[str, Any]]:
    tables = []
    for table in BUDGET_TABLES:
        ours = [(name, cells_of(groups, name, table.data), True) for name in table.recipes]
        theirs = [(name, [*published_cells(row), ""], False) for name, row in table.published.items()]
        tables.append(
            {
                "title": table.title,
                "note": table.note,
                "data": table.data,
                "columns": [*(f"ε = {e}" for e in BUDGETS), "no privacy"],
                "rows": [
                    {"name": name, "cells": cells, "ours": is_ours, "words": _words(name, table.title)}
                    for name, cells, is_ours in (*ours, *theirs)
                    if any(cells)
                ],
            }
        )
    return [*tables, _patients(groups)]


def _patients(groups: Groups) -> dict[str, Any]:
    found = {
        recipe: [
            groups.get((recipe, "chest-xray", metric, budget))
            for budget in ("3.0", "")
            for metric in ("accuracy", "auc")
        ]
        for recipe in (*RECIPES, "finetune/efficientnet-lite0")
    }
    title = "Chest X-rays, one guarantee per patient"
    return {
        "title": title,
        "note": "Pneumonia or not in 624 test images; the area under the ROC curve (AUC) says more.",
        "data": "chest-xray",
        "columns": ["accuracy, ε = 3", "AUC, ε = 3", "accuracy, no privacy", "AUC, no privacy"],
        "rows": [
            {
                "name": recipe,
                "cells": [summary(rows) if rows else "" for rows in cells],
                "ours": True,
                "words": _words(recipe, title),
            }
            for recipe, cells in found.items()
            if any(cells)
        ],
    }


def reproduction(table: dict[str, Any]) -> dict[str, Any]:
    """A document of ``reproduce`` as the page shows it."""
    paper = table["paper"].partition(", ")[0]
    differences = [
        {
            "name": f"{row['row']} − {row['minus']}"
            + (f" ({SCORES[row['score']]})" if row["score"] in SCORES else ""),
            "column": row["column"],
            "theirs": "" if row["published"] is None else f"{row['published']:+.1f}",
            "ours": f"{row['mean']:+.1f}",
            "interval": "" if row["lower"] is None else f"{row['lower']:+.1f} to {row['upper']:+.1f}",
            "answer": answer(row),
            "n": row["n"],
            "data": "cifar10",
            "words": _words(row["row"], row["minus"], row["column"], paper, table["name"], answer(row)),
        }
        for row in table["differences"]
        if row["n"]
    ]
    several = len({row["column"] for row in differences}) > 1
    for row in differences:
        row["name"] += f" [{row['column']}]" if several else ""
    compared = [
        row for row in table["differences"] if row["lower"] is not None and row["score"] == "accuracy"
    ]
    return {
        "id": f"{table['name'].replace('/', '-')}-{table['scale']}",
        "paper": paper,
        "title": table["title"],
        "claim": table["claim"],
        "scale": "Full size." if table["scale"] == "full" else "Small form: ",
        "small": table["note"] or "",
        "verdict": table["verdict"],
        "cost": cost_words(table),
        "command": table["command"],
        "cells": [
            _cell(cell, paper, table["name"])
            for cell in table["cells"]
            if cell["n"] or cell["score"] == "accuracy"
        ],
        "differences": differences,
        "forest": forest(compared, several=several),
    }


def _cell(cell: dict[str, Any], paper: str, name: str) -> dict[str, Any]:
    score = f", {SCORES[cell['score']]}" if cell["score"] in SCORES else ""
    spread = f" ({cell['lowest']:.1f} to {cell['highest']:.1f})" if cell["n"] else ""
    return {
        "row": cell["row"],
        "column": cell["column"] + score,
        "theirs": "" if cell["published"] is None else f"{cell['published']:g}",
        "ours": f"{cell['ours']:.1f}{spread}" if cell["n"] else "",
        "n": cell["n"],
        "data": load_recipe(cell["recipe"]).data.name or "",
        "words": _words(cell["row"], cell["column"], cell["recipe"], paper, name, f"ε = {cell['epsilon']}"),
    }


def reported_rows(groups: Groups) -> list[dict[str, Any]]:
    rows = []
    for name, reference in REFERENCES.items():
        if reference.paper is None:
            continue
        found = groups.get((name, reference.data, "accuracy", f"{reference.epsilon}"))
        spread = "" if reference.spread is None else f" ± {reference.spread:g}"
        source = f"{reference.paper.partition(', ')[0]}, {reference.table}"
        rows.append(
            {
                "name": name,
                "source": source,
                "epsilon": f"{reference.epsilon:g}",
                "metric": f"{reference.data}: {reference.metric}",
                "data": reference.data,
                "theirs": f"{reference.value}{spread}",
                "ours": summary(found) if found else "",
                "words": _words(name, source, reference.data, f"ε = {reference.epsilon:g}"),
            }
        )
    return rows


def run_rows(groups: Groups) -> list[dict[str, Any]]:
    return [
        {
            "name": recipe,
            "data": data,
            "epsilon": f"{float(epsilon):g}" if epsilon else "no privacy",
            "metric": metric,
            "ours": summary(rows),
            "minutes": f"{median(float(row['minutes']) for row in rows):.1f}",
            "command": rows[0]["command"],
            "words": _words(recipe, data, metric, f"ε = {epsilon}" if epsilon else "no privacy"),
        }
        for (recipe, data, metric, epsilon), rows in sorted(groups.items(), key=in_order)
    ]


def studies(folder: Path = HERE / "studies") -> list[dict[str, Any]]:
    """Every studies/NAME/ with its figure, its data, and study.toml: title, text and command."""
    found = []
    for place in sorted(folder.glob("*/study.toml")):
        said = tomllib.loads(place.read_text(encoding="utf-8"))
        files = sorted(
            f"studies/{place.parent.name}/{file.name}"
            for file in place.parent.iterdir()
            if file.suffix in (".csv", ".json")
        )
        (image,) = place.parent.glob("*.png")
        found.append(said | {"image": f"studies/{place.parent.name}/{image.name}", "files": files})
    return found


def _words(*texts: str | None) -> str:
    """What the search looks in."""
    return " ".join(text for text in texts if text).lower()


def _checksum(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
