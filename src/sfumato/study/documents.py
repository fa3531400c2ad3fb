"""What a study leaves behind: NAME.json, NAME.csv, and a figure as NAME.png and NAME.pdf."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sfumato.errors import RunError
from sfumato.files import write_json, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = TypeVar("Draw", bound="Callable[..., Figure]")

# Okabe and Ito: told apart also by readers who see fewer colours, and in print by their lightness
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#882255")
MARKERS = ("o", "s", "^", "D", "v", "<", ">", "p")
INK, GREY = "#222222", "#8a8f98"
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.7,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e4e6ea",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "pdf.fonttype": 42,  # letters stay letters: journals ask for it
    "svg.fonttype": "none",
}


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """A study's figures as a document and as rows of a table, and the notice that they must carry."""

    study: str
    document: Mapping[str, Any]
    rows: Sequence[Mapping[str, object]]
    notice: str | None = None  # why it may not be shown; None: nothing in it is sensitive

    def as_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "study": self.study,
            "sensitive": self.notice is not None,
            "notice": self.notice,
            **self.document,
        }


def write_study(result: StudyResult, figure: Figure, folder: Path) -> list[Path]:
    """Write the document, the table and the figure; returns their places.

    Guarantee: a sensitive result says so in each of the files.
    """
    places = [folder / f"{result.study}.{ending}" for ending in ("json", "csv", "png", "pdf")]
    rows = [{**row, "sensitive": result.notice is not None} for row in result.rows]
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]) if rows else ["sensitive"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if result.notice is not None:
        figure.text(0.5, 1.0, result.notice, color="#b00020", ha="center", va="bottom", size=7, weight="bold")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(places[0], result.as_dict())
        write_text(places[1], table.getvalue())
        for place in places[2:]:
            figure.savefig(place, dpi=300, bbox_inches="tight", pad_inches=0.04)
    except OSError as error:
        raise RunError(
            "cannot-save", f"{folder} cannot be written: {error}", fix="Give another --out."
        ) from error
    return places


def styled(draw: Draw) -> Draw:
    """Draw in the style of all studies, whatever the user's own settings of matplotlib are."""

    @functools.wraps(draw)
    def drawn(*arguments: Any, **settings: Any) -> Any:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return draw(*arguments, **settings)

    return cast("Draw", drawn)


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **grid: Any
) -> tuple[Figure, Any]:
    """A figure in inches with its axes (rows, columns); to be called inside a ``styled`` function."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **grid)
    for one in axes.flat:
        one.tick_params(width=0.7, length=3, color=INK)
    return figure, axes
