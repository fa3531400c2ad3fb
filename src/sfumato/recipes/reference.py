"""[reference]: what a recipe is expected to give, as data: the paper's figure, our own, and the cost.

Nothing here reaches the training, and a run may be resumed under another reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from sfumato.recipes.settings import AboveZero, NotNegative, Scalar, options_table, setting

Percent = Annotated[float, Meta(ge=0, le=100)]


class Published(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A figure of the same source at another budget, or on other data."""

    epsilon: AboveZero
    value: Percent
    spread: Percent | None = None
    data: str | None = None


class Measured(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Runs of ours: the median over ``n`` seeds of one recipe, at one budget, on one set of images."""

    data: str
    epsilon: AboveZero
    metric: str = "accuracy"
    median: Percent
    n: Annotated[int, Meta(ge=1)]
    minutes: NotNegative


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings:
    """[reference]: what to expect, and who says so; read by people and the results page, never by a run."""

    title: str | None = setting(None, "the recipe in one line")
    paper: str | None = setting(None, "whose method or result this is")
    table: str | None = setting(None, "where in the paper the figure and the settings stand")
    data: str | None = setting(None, "the images that the figure is for")
    metric: str | None = setting(None, "what the figure is, in %")
    epsilon: AboveZero | None = setting(None, "the budget of the figure")
    value: Percent | None = setting(None, "the paper's figure, in %")
    spread: Percent | None = setting(None, "its standard deviation over runs")
    further: Mapping[str, Scalar] = options_table("its other scores of the same runs, in %: top5_accuracy, …")
    claim: str | None = setting(None, "what the paper concludes from the table or figure")
    also: tuple[Published, ...] = setting((), "the source's figures at other budgets or on other data")
    guarantee: str | None = setting(None, "what the paper's noise and steps come to here")
    cost: str | None = setting(None, "work and time")
    command: str | None = setting(None, "how to run it")
    notes: str | None = setting(None, "remarks; above all, where recipe and paper differ")
    ours: tuple[Measured, ...] = setting((), "what we measured: data, epsilon, median, n, minutes")

    def published(self, data: str) -> dict[float, float]:
        """The source's figures on ``data`` in %, by budget."""
        figures = {item.epsilon: item.value for item in self.also if (item.data or self.data) == data}
        if self.epsilon is not None and self.value is not None and self.data == data:
            figures[self.epsilon] = self.value
        return dict(sorted(figures.items()))
