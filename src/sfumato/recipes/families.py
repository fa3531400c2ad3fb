"""Families of recipes: a table or figure of a paper as one file, one recipe per row.

``families/PAPER/PLACE.toml`` holds what all rows share and the rows as the paper prints them. Each row
becomes a recipe with a name of its own, and the family is what ``sfumato reproduce PAPER/PLACE`` trains.
docs/reproduce.md describes the format.
"""

from __future__ import annotations

import functools
import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any, Literal

import msgspec
from msgspec import Struct

from sfumato.errors import ConfigError, did_you_mean

PAPERS = {
    "de2022": "De et al. 2022, Unlocking high-accuracy DP image classification through scale",
    "scalenorm2022": "Klause et al. 2022, Differentially private training of residual networks with scale "
    "normalisation",
    "smoothnets2022": "Remerscheid et al. 2022, SmoothNets: optimizing CNN architecture design for "
    "differentially private deep learning",
    "bao2024": "Bao & Bindschaedler 2024, R+R: Towards reliable and generalizable DP machine learning",
}
_KINDS = ("table", "figure")  # what is listed first
# Short names of columns: the settings that a value in that column becomes.
COLUMNS = {
    "data": ("data.name", "reference.data"),
    "size": ("data.image_size",),
    "model": ("model.name",),
    "trained": ("model.trained",),
    "budget": ("reference.epsilon", "privacy.epsilon"),  # the noise follows from it
    "epsilon": ("reference.epsilon",),  # what the given noise was found to cost
    "delta": ("privacy.delta",),
    "noise": ("privacy.noise_multiplier",),
    "clip": ("privacy.clip_norm",),
    "batch": ("training.batch_size",),
    "steps": ("training.num_steps",),
    "epochs": ("training.num_epochs",),
    "rate": ("training.learning_rate",),
    "ema": ("training.ema_decay",),
    "views": ("augmentation.views",),
    "value": ("reference.value",),
    "spread": ("reference.spread",),
    "top5": ("reference.further.top5_accuracy",),
    "training": ("reference.further.training_accuracy",),
}
ABSENT = "-"  # an empty cell: the setting is left out, or taken out of what is shared
Settings = Mapping[str, Any]  # "section.key" → value; None takes one out
Comparison = Literal["none", "previous", "first", "last"]
Statistic = Literal["median", "mean", "best"]


class _Part(Struct, forbid_unknown_fields=True, kw_only=True):
    """Rows of one form."""

    row: str
    column: str = "accuracy"
    mini_row: str | None = None  # the same at mini scale, where other names would mislead
    mini_column: str | None = None
    name: str | None = None  # of each row's recipe
    uses: str | None = None  # instead: the recipe of another family
    words: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    columns: list[str]
    rows: list[list[Any]]
    grid: dict[str, list[Any]] = {}  # every row once for each combination of these
    mini: dict[str, Any] = {}


class _Mini(Struct, forbid_unknown_fields=True, kw_only=True):
    note: str
    only: tuple[str, ...] = ("*",)
    settings: dict[str, Any] = {}


class _File(Struct, forbid_unknown_fields=True, kw_only=True):
    title: str
    claim: str
    compare: Comparison = "none"
    statistic: Statistic = "median"
    settings: dict[str, Any] = {}
    part: list[_Part]
    mini: _Mini | None = None
    full: str | None = None


@dataclass(frozen=True, kw_only=True)
class Member:
    """One row of a table, or one point of a figure."""

    recipe: str
    row: str
    column: str
    settings: Settings  # the whole recipe; of a recipe of another family only what is said of it here
    mini: Settings | None  # what makes it small; None: it is left out at that scale
    mini_row: str
    mini_column: str
    borrowed: bool


@dataclass(frozen=True, kw_only=True)
class Family:
    """A table or figure of a paper."""

    name: str
    title: str
    claim: str  # what the paper concludes from it
    compare: Comparison  # which rows of a column are compared: each with the previous, the first, or the last
    statistic: Statistic  # of the paper's runs
    members: tuple[Member, ...]
    mini_note: str | None  # what is smaller at mini scale; None: there is no such scale
    needs: str | None  # what has to be brought for the full scale, if it cannot be had here

    @property
    def paper(self) -> str:
        return PAPERS[self.name.partition("/")[0]]

    @property
    def recipes(self) -> tuple[str, ...]:
        """The names of its own recipes."""
        return tuple(member.recipe for member in self.members if not member.borrowed)


@functools.cache
def list_families() -> tuple[str, ...]:
    """Names such as ``de2022/table3``: by paper, tables before figures, ``table10`` after ``table7``."""
    root = resources.files("sfumato") / "recipes" / "families"
    names = [
        f"{paper}/{file.name.removesuffix('.toml')}" for paper in PAPERS for file in (root / paper).iterdir()
    ]
    return tuple(sorted(names, key=_place))


def _place(name: str) -> tuple[int, int, int, str]:
    paper, _, place = name.partition("/")
    kind = place.rstrip("0123456789")
    order = _KINDS.index(kind) if kind in _KINDS else len(_KINDS)
    return list(PAPERS).index(paper), order, len(place) if order < len(_KINDS) else 0, place


@functools.cache
def load_family(name: str) -> Family:
    """The family of this name; ConfigError if there is none."""
    if name not in list_families():
        raise ConfigError(
            "no-family",
            f"there is no table or figure {name!r}. {did_you_mean(name, list_families())}".rstrip(),
            fix="see `sfumato reproduce --list`",
        )
    text = (resources.files("sfumato") / "recipes" / "families" / f"{name}.toml").read_text(encoding="utf-8")
    file = msgspec.convert(tomllib.loads(text), _File)
    members = tuple(_member(name, file, part, values) for part in file.part for values in _combinations(part))
    return Family(
        name=name,
        title=file.title,
        claim=file.claim,
        compare=file.compare,
        statistic=file.statistic,
        members=members,
        mini_note=None if file.mini is None else file.mini.note,
        needs=file.full,
    )


@functools.cache
def member_index() -> dict[str, tuple[str, Member]]:
    """Each recipe that a family makes: its name → the family's name, and the row."""
    found: dict[str, tuple[str, Member]] = {}
    for family in list_families():
        for member in load_family(family).members:
            if not member.borrowed:
                assert member.recipe not in found, f"two rows are called {member.recipe}"
                found[member.recipe] = family, member
    return found


def member_table(name: str) -> dict[str, Any]:
    """The recipe of this name as TOML would give it."""
    table: dict[str, Any] = {}
    for path, value in member_index()[name][1].settings.items():
        if value is None:
            continue
        section, *middle, last = path.split(".")
        target = table.setdefault(section, {})
        for key in middle:
            target = target.setdefault(key, {})
        target[last] = value
    return table


def _combinations(part: _Part) -> Iterator[dict[str, Any]]:
    """The rows, column by column, each with every combination of the grid."""
    for row in part.rows:
        for chosen in itertools.product(*part.grid.values()):
            yield dict(zip(part.columns, row, strict=True)) | dict(zip(part.grid, chosen, strict=True))


def _member(family: str, file: _File, part: _Part, values: dict[str, Any]) -> Member:
    paper = family.partition("/")[0]
    shared = {} if part.uses else {**_flat(file.settings), **_flat(part.settings)}
    own: dict[str, Any] = {}
    small = {} if file.mini is None else {**_flat(file.mini.settings), **_flat(part.mini)}
    for column, value in values.items():
        target = small if column.startswith("mini.") else own
        column = column.removeprefix("mini.")
        for path in COLUMNS.get(column, (column,) if "." in column else ()):
            target[path] = value
    settings = {**shared, **own}
    named = {column.replace(".", "_"): value for column, value in values.items()}
    words = {**part.words, **named, **_work(settings, part.words)}
    words["data"] = settings.get("data.name")
    words["recipe"] = recipe = (part.uses or f"{paper}/{part.name}").format_map(words)
    if not part.uses:
        settings = {
            "reference.paper": PAPERS[paper],
            "reference.data": words["data"],
            "reference.claim": file.claim,
            "reference.command": "sfumato train {data} --recipe {recipe}",
            **settings,
        }
    used = file.mini is not None and any(fnmatchcase(recipe, pattern) for pattern in file.mini.only)
    return Member(
        recipe=recipe,
        row=part.row.format_map(words),
        column=part.column.format_map(words),
        settings={path: _filled(value, words) for path, value in settings.items()},
        mini={path: _filled(value, words) for path, value in small.items()} if used else None,
        mini_row=(part.mini_row or part.row).format_map(words),
        mini_column=(part.mini_column or part.column).format_map(words),
        borrowed=part.uses is not None,
    )


def _work(settings: Settings, words: Mapping[str, Any]) -> dict[str, str]:
    """``{passes}``, millions of images that go through the net, and ``{hours}`` of two cores for them."""
    steps, batch = settings.get("training.num_steps"), settings.get("training.batch_size")
    if steps is None or batch is None:
        return {}
    passes = steps * batch * max(1, settings.get("augmentation.views", 0))
    hours = {} if "ms" not in words else {"hours": f"{passes * words['ms'] / 3.6e6:,.0f}"}
    return {"passes": f"{passes / 1e6:,.0f}", **hours}


def _filled(value: Any, words: Mapping[str, Any]) -> Any:
    """Text with its words in place; None for an empty cell."""
    if value == ABSENT:
        return None
    return value.format_map(words) if isinstance(value, str) and "{" in value else value


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested tables as ``{"section.key": value}``."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = value
    return flat
