"""The conditions of a reproduction: each row of a table as a recipe, at full size or small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from sfumato.errors import ConfigError, did_you_mean
from sfumato.recipes.families import Family, Member
from sfumato.recipes.recipe import Recipe, load_recipe, with_settings

Scale = Literal["mini", "full"]
ONCE = 1_000_000_000  # steps between evaluations: scored once, at the end


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One cell of the table: what is trained, and what the paper says of it."""

    recipe_name: str
    row: str
    column: str
    recipe: Recipe  # without a seed

    @property
    def published(self) -> dict[str, float]:
        """The paper's figures in %, by the name of the score."""
        reference = self.recipe.reference
        assert reference is not None  # every shipped recipe has one
        first = {} if reference.value is None else {"accuracy": reference.value}
        return first | {name: float(value) for name, value in reference.further.items()}

    @property
    def scores(self) -> tuple[str, ...]:
        """The scores to take: those that the paper gives, and accuracy in any case."""
        return tuple(dict.fromkeys(("accuracy", *self.published)))


def conditions_of(
    family: Family,
    scale: Scale,
    *,
    data: Mapping[str, str] | None = None,
    only: str = "*",
    settings: Mapping[str, Any] | None = None,
) -> list[Condition]:
    """The conditions of a table or figure, in its order.

    ``data`` says where data sets lie that are not under their known name: ``{"imagenette": "/images"}``.
    ``only`` is a wildcard for the recipes' names. ``settings`` replace those of every recipe, last of all.
    """
    if scale == "mini" and family.mini_note is None:
        raise ConfigError(
            "no-mini",
            f"{family.name} has no small form: {family.needs}",
            fix="Bring what it needs and use --scale full, or run another table.",
        )
    at_scale = [member for member in family.members if scale == "full" or member.mini is not None]
    members = [member for member in at_scale if fnmatchcase(member.recipe, only)]
    if not members:
        names = [member.recipe for member in at_scale]
        raise ConfigError(
            "no-condition",
            f"no recipe of {family.name} ({scale}) matches {only!r}. {did_you_mean(only, names)}".rstrip(),
            fix=f"for example {names[0]}",
        )
    return [_condition(member, scale, data or {}, settings or {}) for member in members]


def _condition(
    member: Member, scale: Scale, data: Mapping[str, str], settings: Mapping[str, Any]
) -> Condition:
    recipe = load_recipe(member.recipe)
    if member.borrowed:  # another table says something else of the same training
        recipe = with_settings(recipe, {"reference.further": {}, **member.settings}, keep_options=True)
    if scale == "mini":
        assert member.mini is not None
        recipe = _small(recipe, member.mini)
    place = data.get(recipe.data.name or "")
    if place is not None:
        recipe = with_settings(recipe, {"data.name": place})
    return Condition(
        recipe_name=member.recipe,
        row=member.mini_row if scale == "mini" else member.row,
        column=member.mini_column if scale == "mini" else member.column,
        recipe=with_settings(recipe, settings),
    )


def _small(recipe: Recipe, mini: Mapping[str, Any]) -> Recipe:
    """The recipe at mini scale: the family's small settings at the recipe's own ε."""
    changes: dict[str, Any] = dict(mini)
    if recipe.privacy.enabled and recipe.privacy.epsilon is None:
        # the paper's noise belongs to the paper's steps; at the same ε fewer steps take less
        assert recipe.reference is not None
        changes |= {"privacy.epsilon": recipe.reference.epsilon, "privacy.noise_multiplier": None}
    changes.setdefault("training.evaluate_every", ONCE)
    return with_settings(recipe, changes, keep_options=True)
