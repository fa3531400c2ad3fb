"""The finished runs under reproductions/ as documents: each table of a paper with ours beside it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

from sfumato.recipes.families import list_families, load_family
from sfumato.study import Reproduction, Scale, conditions_of
from sfumato.study.store import Store

HERE = Path(__file__).parent
RUNS = HERE / "reproductions"


def documents(runs: Path = RUNS) -> list[dict[str, Any]]:
    """Of every table and scale that has a finished run, as ``sfumato reproduce NAME --json`` prints it.

    ``verdict`` is what reproductions/verdicts.toml says of it, ``minutes`` what its runs took together.
    """
    store = Store(runs)
    finished: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in store.results():
        finished.setdefault((result["recipe"], result["scale"]), []).append(dict(result))
    verdicts = _verdicts(runs / "verdicts.toml")
    found = []
    for name in list_families():
        family = load_family(name)
        for scale in get_args(Scale):
            if scale == "mini" and family.mini_note is None:
                continue
            conditions = conditions_of(family, scale)
            of_table = [run for c in conditions for run in finished.get((c.recipe_name, scale), [])]
            if of_table:
                seeds = range(1 + max(run["seed"] for run in of_table))
                table = Reproduction(
                    family=family, scale=scale, conditions=conditions, seeds=seeds, store=store
                ).document()
                table["verdict"] = verdicts.get(f"{name}-{scale}", "")
                table["runs"] = len(of_table)
                table["minutes"] = sum(run["seconds"] for run in of_table) / 60
                table["hardware"] = sorted({run["hardware"] for run in of_table})
                table["command"] = f"sfumato reproduce {name} --out results/reproductions"
                table["command"] += "" if scale == "mini" else " --scale full"
                found.append(table)
    return found


def answer(difference: dict[str, Any]) -> str:
    """What the interval of a difference says: ``higher``, ``lower``, ``open``, or nothing without one."""
    if difference["lower"] is None:
        return ""
    if difference["lower"] > 0:
        return "higher"
    return "lower" if difference["upper"] < 0 else "open"


def _verdicts(place: Path) -> dict[str, str]:
    return tomllib.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
