"""The recipe format as a JSON schema (draft 7): with it, editors complete and check recipes.

docs/recipe.schema.json is what ``sfumato recipes schema`` prints; a test compares the two.
"""

from __future__ import annotations

import inspect
import typing
from dataclasses import fields
from typing import Any

import msgspec

from sfumato.recipes.recipe import Recipe
from sfumato.recipes.settings import without_none


def recipe_schema() -> dict[str, Any]:
    """Every section and setting with its type, range, default and meaning; unknown names are refused."""
    _, parts = msgspec.json.schema_components([Recipe])
    schema = _inlined(parts["Recipe"], parts)
    for name, kind in typing.get_type_hints(Recipe).items():
        _describe(schema["properties"][name], without_none(kind))
    # __post_init__ of Recipe says the same.
    schema["properties"]["training"]["not"] = {"required": ["num_steps", "num_epochs"]}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Sfumato recipe"}
    return (
        head | schema | {"description": "Everything that defines a run. An absent setting has its default."}
    )


def _describe(section: dict[str, Any], kind: type) -> None:
    """Give a section and its settings their meaning: the docstring and the ``help`` of the fields."""
    section["description"] = _sentence(inspect.getdoc(kind) or "")
    for item in fields(kind):
        section["properties"][item.name]["description"] = item.metadata["help"]


def _sentence(docstring: str) -> str:
    """``[data]: which images`` as ``Which images``."""
    text = " ".join(docstring.split()).partition("]: ")[2]
    return text[:1].upper() + text[1:]


def _inlined(node: Any, parts: dict[str, Any]) -> Any:
    """``node`` with references replaced by what they name, and without null, which TOML does not have."""
    if isinstance(node, list | tuple):
        return [_inlined(item, parts) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(parts[node["$ref"].rpartition("/")[2]], parts)
    arms = [arm for arm in node.get("anyOf", []) if arm != {"type": "null"}]
    if len(arms) == 1:
        return _inlined(arms[0], parts)
    if arms:
        node = {**node, "anyOf": arms}
        if node.get("default", "") is None:
            del node["default"]
    node = {key: _inlined(value, parts) for key, value in node.items()}
    if "properties" in node:
        del node["title"]  # the name of a class
        node["additionalProperties"] = False  # msgspec says so for its own structs only
        if not node["required"]:
            del node["required"]
    return node
