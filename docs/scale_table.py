"""Writes the table of docs/scale.md: what recipes of the papers take on some hardware."""

from __future__ import annotations

import sys
from pathlib import Path

from sfumato.recipes.recipe import load_recipe
from sfumato.run.hardware import parse_hardware, project
from sfumato.run.workload import workload_of

PAGE = Path(__file__).resolve().parent / "scale.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
HARDWARE = ("cpu:2", "1xRTX8000", "8xA100")
RECIPES = (
    "de2022/cifar10-wrn16-4-eps8",
    "de2022/cifar10-wrn40-4-eps8",
    "scalenorm2022/cifar10-scale-wrn16-4-eps8",
    "scalenorm2022/cifar10-scale-resnet9-eps7.42",
    "scalenorm2022/imagenette-scale-resnet9-eps7.42",
    "scalenorm2022/tiny-imagenet-scale-resnet9-eps10",
    "smoothnets2022/cifar10-smoothnet-eps7",
    "de2022/pretraining-imagenet32-wrn40-4",
)


def rows(recipes: tuple[str, ...] = RECIPES) -> str:
    """The table in Markdown."""
    lines = [
        f"| recipe | rows | 10^15 operations | {' | '.join(f'{name}: time, cost' for name in HARDWARE)} |",
        f"|---|---|---|{'---|' * len(HARDWARE)}",
    ]
    for name in recipes:
        workload = workload_of(load_recipe(name))
        cells = []
        for text in HARDWARE:
            found = project(workload, parse_hardware(text))
            cells.append(
                f"{duration(found.seconds)}, ${found.dollars:,.0f}{'' if found.fits else ' (no room)'}"
            )
        count = workload.rows_per_step * workload.num_steps
        lines.append(
            f"| `{name}` | {count / 1e6:,.1f} M | {workload.flops / 1e15:,.1f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def duration(seconds: float) -> str:
    """In the unit that reads best."""
    for unit, size in (("d", 86_400), ("h", 3_600)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds / 60:,.0f} min"


def page_with(text: str, table: str) -> str:
    """The page with its table replaced."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), rows()), encoding="utf-8")
    sys.stdout.write(rows())
