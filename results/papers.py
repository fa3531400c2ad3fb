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

    ``verdict`` is what reproductions/verdicts.toml says of it, ``minutes`` the processor time that its runs
    took together (unknown ones count as the mean), ``stale`` how many stored runs are of other settings
    than the recipe has now: they are left out.
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
                reproduction = Reproduction(
                    family=family, scale=scale, conditions=conditions, seeds=seeds, store=store, replace=True
                )
                table = reproduction.document()
                table["verdict"] = verdicts.get(f"{name}-{scale}", "")
                shown = [run for c in conditions for n in seeds if (run := reproduction.result(c, n))]
                table["runs"], table["stale"] = len(shown), len(of_table) - len(shown)
                taken = [run for run in shown if "taken_from" not in run]
                timed = [run["processor_seconds"] for run in taken if run.get("processor_seconds")]
                table["minutes"] = sum(timed) / len(timed) * len(taken) / 60 if timed else None
                table["hardware"] = sorted({run["hardware"] for run in of_table})
                table["command"] = f"sfumato reproduce {name} --out results/reproductions"
                table["command"] += "" if scale == "mini" else " --scale full"
                found.append(table)
    return found


def unfinished(tables: list[dict[str, Any]], runs: Path = RUNS) -> dict[str, str]:
    """Verdicts on tables without a finished run, by their names: what it would take."""
    shown = {f"{table['name']}-{table['scale']}" for table in tables}
    return {name: text for name, text in _verdicts(runs / "verdicts.toml").items() if name not in shown}


def cost_words(table: dict[str, Any]) -> str:
    """How many runs a table has, what they took, and what was left out."""
    words = f"{table['runs']} runs"
    if table["minutes"] is not None:
        words += f", {table['minutes']:.0f} minutes of one core"
    if table["stale"]:
        words += (
            f"; {table['stale']} stored runs are of other settings than the recipe has now and are left out"
        )
    return words + "."


def answer(difference: dict[str, Any]) -> str:
    """What the interval of a difference says: ``higher``, ``lower``, ``open``, or nothing without one."""
    if difference["lower"] is None:
        return ""
    if difference["lower"] > 0:
        return "higher"
    return "lower" if difference["upper"] < 0 else "open"


def _verdicts(place: Path) -> dict[str, str]:
    return tomllib.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
