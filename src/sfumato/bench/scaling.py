"""Steps on up to 512 devices, simulated: what they wait for, and from how many on a tenth is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sfumato.run.hardware import Hardware, Trouble, simulate
from sfumato.run.workload import Workload

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ENOUGH = 0.9  # of the speed of so many devices that need not wait for each other
_PARTS = ("compute", "imbalance", "stragglers", "communication", "noise")
_NAMES = {"noise": "noise, drawn once", "imbalance": "imbalance of Poisson shards"}


def bench_scaling(
    workload: Workload,
    hardware: Hardware,
    *,
    trouble: Trouble,
    counts: Sequence[int] = COUNTS,
    num_steps: int = 500,
) -> dict[str, Any]:
    """Efficiency and the parts of a step for every number of devices; ``limit`` is the last that suffices."""
    rows = []
    for sharding in (True, False):
        for count in counts:
            found = simulate(
                workload,
                replace(hardware, count=count),
                trouble=replace(trouble, sharding=sharding),
                num_steps=num_steps,
            )
            rows.append({"sharding": sharding, **found})
    return {
        "hardware": hardware.name,
        "rows_per_step": workload.rows_per_step,
        "rows_per_unit": workload.rows_per_unit,
        "num_trained": workload.num_trained,
        "flops_per_row": workload.flops_per_row,
        "rows": rows,
        "limit": {name: limit_of(rows, sharding=way) for name, way in (("shards", True), ("shares", False))},
    }


def limit_of(rows: Sequence[dict[str, Any]], *, sharding: bool) -> int | None:
    """The largest number of devices up to which the efficiency stays at 90 %; None if no number does."""
    enough = None
    for row in sorted((row for row in rows if row["sharding"] == sharding), key=lambda row: row["devices"]):
        if row["efficiency"] < ENOUGH:
            break
        enough = row["devices"]
    return enough


def save_scaling_chart(result: dict[str, Any], picture: Path, *, title: str) -> None:
    """Efficiency against devices, and of what a step consists."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for sharding, style, name in (
        (True, "o-", "each device samples a shard"),
        (False, "s--", "one batch, shared out evenly"),
    ):
        rows = [row for row in result["rows"] if row["sharding"] == sharding]
        counts, shares = [row["devices"] for row in rows], [100 * row["efficiency"] for row in rows]
        left.plot(counts, shares, style, label=name)
    left.axhline(100 * ENOUGH, color="grey", linewidth=1, linestyle=":")
    left.set(xscale="log", xlabel="devices", ylabel="efficiency, %", ylim=(0, 103), title=title)
    left.legend(frameon=False, loc="lower left")
    rows = [row for row in result["rows"] if row["sharding"]]
    counts, bottom = [str(row["devices"]) for row in rows], [0.0] * len(rows)
    for part in _PARTS:
        heights = [100 * row[part] / row["seconds_per_step"] for row in rows]
        right.bar(counts, heights, bottom=bottom, label=_NAMES.get(part, part))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    right.set(xlabel="devices", ylabel="share of a step, %", title="what a step consists of, with shards")
    right.legend(frameon=True, loc="lower left", fontsize=8)
    left.set_xticks([row["devices"] for row in rows], counts)
    left.minorticks_off()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)
