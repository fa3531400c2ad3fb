"""Frozen dataclasses out of plain tables, strictly: names, types and ranges are checked, nothing is ignored.

``recipe.py`` says which settings exist; this file only knows how to read and write them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, Literal

from sfumato.errors import ConfigError, did_you_mean

Scalar = bool | int | float | str


def setting(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    check: Callable[[Any], None] | None = None,
) -> Any:
    """A dataclass field that knows its one-line meaning and its range.

    ``low`` and ``high`` belong to the range, ``above`` does not. ``check`` raises what the same value raises
    elsewhere, so that a mistake is called the same in a recipe, a flag and a function.
    """
    limits = {"low": low, "high": high, "above": above, "check": check}
    return field(default=default, metadata={"help": help, **limits})


def options_table(help: str) -> Any:
    """A field that holds a table of plain values, checked by whoever receives them."""
    return field(default_factory=dict, metadata={"help": help})


def from_table(kind: type, table: Mapping[str, Any], *, origin: str, path: str = "") -> Any:
    """An instance of the dataclass ``kind``; ``origin`` is the file that errors name."""
    hints = typing.get_type_hints(kind)
    known = {item.name: item for item in fields(kind)}
    values = {}
    for key, value in table.items():
        where = f"{path}{key}"
        if key not in known:
            raise unknown_key(origin, where, list(known))
        wanted = without_none(hints[key])
        if dataclasses.is_dataclass(wanted):
            if not isinstance(value, dict):
                raise _wrong(origin, where, value, "a table")
            values[key] = from_table(wanted, value, origin=origin, path=f"{where}.")
        else:
            values[key] = _checked(wanted, value, known[key].metadata, origin=origin, path=where)
    return kind(**values)


def to_table(settings: Any) -> dict[str, Any]:
    """Nested plain values, without the absent ones."""
    table = {}
    for item in fields(settings):
        value = getattr(settings, item.name)
        if dataclasses.is_dataclass(value):
            table[item.name] = to_table(value)
        elif isinstance(value, Mapping):
            table[item.name] = dict(value)
        elif value is not None:
            table[item.name] = list(value) if isinstance(value, tuple) else value
    return table


def to_toml(settings: Any) -> str:
    """Sections of settings as TOML: every setting that has a value, with its meaning beside it."""
    lines: list[str] = []
    for section in fields(settings):
        inner = getattr(settings, section.name)
        if inner is None:
            continue
        lines.append(f"[{section.name}]")
        tables = {}
        for item in fields(inner):
            value = getattr(inner, item.name)
            if isinstance(value, Mapping):
                tables[item.name] = value
            elif value is not None:
                lines.append(f"{item.name} = {_toml_value(value)}".ljust(34) + f" # {item.metadata['help']}")
        for name, table in tables.items():
            if table:
                lines.append(f"[{section.name}.{name}]")
                lines += [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def unknown_key(origin: str, path: str, known: list[str]) -> ConfigError:
    """The error for a setting that does not exist, with the nearest one that does."""
    word = path.rpartition(".")[2]
    return ConfigError(
        "unknown-key",
        f"{origin}: {path} is not a setting. {did_you_mean(word, known)}".rstrip(),
        fix=f"known here: {', '.join(known)}",
    )


def without_none(kind: Any) -> Any:
    """``X`` for the type ``X | None``."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return next(arm for arm in typing.get_args(kind) if arm is not types.NoneType)
    return kind


def _checked(wanted: Any, value: Any, limits: Mapping[str, Any], *, origin: str, path: str) -> Any:
    """``value`` as a scalar, Literal, tuple of numbers or table of scalars; ConfigError otherwise."""
    shape = typing.get_origin(wanted)
    if shape is Literal:
        options = [str(option) for option in typing.get_args(wanted)]
        if value not in options:
            hint = did_you_mean(str(value), options)
            raise _wrong(origin, path, value, f"one of {', '.join(options)}. {hint}".rstrip())
        return value
    if shape is Mapping:
        if not isinstance(value, dict) or not all(isinstance(item, Scalar) for item in value.values()):
            raise _wrong(origin, path, value, "a table of plain values")
        return dict(value)
    if shape is tuple and typing.get_args(wanted)[0] is str:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise _wrong(origin, path, value, "a list of strings")
        return tuple(value)
    if shape is tuple:
        if not isinstance(value, list | tuple) or not all(map(_is_finite_number, value)):
            raise _wrong(origin, path, value, "a list of finite numbers")
        return tuple(float(item) for item in value)
    if wanted is float and _is_number(value):
        value = float(value)
    # True is an int to Python; here it is not a number.
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        names = {float: "a number", int: "a whole number", bool: "true or false", str: "a string"}
        raise _wrong(origin, path, value, names[wanted])
    if limits.get("check") is not None:
        _run_check(limits["check"], value, origin=origin)
    if _is_number(value) and not _inside(value, limits):
        raise _wrong(origin, path, value, _range_text(limits))
    return value


def _run_check(check: Callable[[Any], None], value: Any, *, origin: str) -> None:
    try:
        check(value)
    except ConfigError as error:
        if origin.endswith(".toml"):
            error.what = f"{origin}: {error.what}"
        raise


def _inside(value: float, limits: Mapping[str, Any]) -> bool:
    low, high, above = limits["low"], limits["high"], limits["above"]
    return (
        math.isfinite(value)
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
    )


def _range_text(limits: Mapping[str, Any]) -> str:
    words = {"above": "above {}", "low": "{} or more", "high": "at most {}"}
    parts = [text.format(limits[key]) for key, text in words.items() if limits[key] is not None]
    return "a finite number" + (f": {' and '.join(parts)}" if parts else "")


def _wrong(origin: str, path: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(
        "bad-value", f"{origin}: {path} = {value!r} is not {wanted}", fix="See docs/recipes.md."
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite_number(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a valid TOML basic string once DEL, which JSON leaves bare, is escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)
