"""Frozen dataclasses out of plain tables, strictly: names, types and ranges are checked, nothing is ignored.

``recipe.py`` says which settings exist; this file only knows how to read and write them. msgspec checks types
and ranges, tomli-w writes values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Annotated, Any, Literal

import msgspec
import tomli_w
from msgspec import Meta

from sfumato.errors import ConfigError, did_you_mean

Scalar = bool | int | float | str
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
AboveZero = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
HalfTurn = Annotated[float, Meta(ge=0, le=180)]
FromOne = Annotated[float, Meta(ge=1)]
Inside = Annotated[float, Meta(gt=0, lt=1)]
Pair = Annotated[tuple[float, ...], Meta(min_length=2, max_length=2)]
_SHORT = 60  # characters


def setting(default: Any, help: str, *, check: Callable[[Any], None] | None = None) -> Any:
    """A dataclass field that knows its one-line meaning; its range is part of its type.

    ``check`` raises what the same number raises elsewhere, so that a mistake is called the same in a recipe,
    a flag and a function.
    """
    return field(default=default, metadata={"help": help, "check": check})


def options_table(help: str) -> Any:
    """A field that holds a table of plain values, checked by whoever receives them."""
    return field(default_factory=dict, metadata={"help": help, "check": None})


def from_table(kind: type, table: Mapping[str, Any], *, origin: str, path: str = "") -> Any:
    """An instance of the dataclass ``kind``; ``origin`` is the file that errors name."""
    # Field by field: msgspec ignores unknown names of dataclasses, and its messages leave out the value.
    hints = _hints(kind)
    known = {item.name: item for item in fields(kind)}
    values = {}
    for key, value in table.items():
        where = f"{path}{key}"
        if key not in known:
            raise unknown_key(origin, where, list(known))
        wanted = without_none(hints[key])
        if not (isinstance(wanted, type) and dataclasses.is_dataclass(wanted)):
            values[key] = _checked(wanted, value, known[key].metadata["check"], origin=origin, path=where)
        elif isinstance(value, dict):
            values[key] = from_table(wanted, value, origin=origin, path=f"{where}.")
        else:
            raise _wrong(origin, where, value, "a table")
    return kind(**values)


def to_table(settings: Any) -> dict[str, Any]:
    """Nested plain values, without the absent ones."""
    table: dict[str, Any] = {}
    for item in fields(settings):
        value = getattr(settings, item.name)
        if dataclasses.is_dataclass(value):
            table[item.name] = to_table(value)
        elif isinstance(value, Mapping):
            table[item.name] = dict(value)
        elif isinstance(value, tuple | list):
            table[item.name] = [msgspec.to_builtins(entry) for entry in value]
        elif value is not None:
            table[item.name] = value
    return table


def to_toml(settings: Any) -> str:
    """Sections of settings as TOML: every setting that has a value, with its meaning beside it."""
    table = {
        section: {key: value for key, value in inner.items() if value or not isinstance(value, dict | list)}
        for section, inner in to_table(settings).items()
    }
    return table_to_toml(type(settings), table)


def table_to_toml(kind: type, table: Mapping[str, Any]) -> str:
    """A table of the dataclass ``kind``, of sections of settings, as TOML with the meanings beside it."""
    sections = {name: without_none(hint) for name, hint in typing.get_type_hints(kind).items()}
    ordered = {
        name: {item.name: table[name][item.name] for item in fields(section) if item.name in table[name]}
        for name, section in sections.items()
        if name in table
    }
    lines: list[str] = []
    meanings: dict[str, str] = {}
    # tomli-w writes no comments. What it writes has each key at the beginning of a line, strings on one line.
    for line in tomli_w.dumps(ordered).rstrip("\n").split("\n"):  # splitlines would also cut at U+2028
        if line.startswith("["):
            section = sections.get(line.strip("[]"))  # tables inside a section have no such name
            meanings = (
                {} if section is None else {item.name: item.metadata["help"] for item in fields(section)}
            )
        key, equals, _ = line.partition(" = ")
        short = len(line) <= _SHORT  # a sentence needs no explanation, and would push it out of sight
        lines.append(f"{line:<34} # {meanings[key]}" if equals and key in meanings and short else line)
    return "\n".join(lines) + "\n"


def unknown_key(origin: str, path: str, known: list[str]) -> ConfigError:
    """The error for a setting that does not exist, with the nearest one that does."""
    word = path.rpartition(".")[2]
    return ConfigError(
        "unknown-key",
        f"{origin}: {path} is not a setting. {did_you_mean(word, known)}".rstrip(),
        fix=f"known here: {', '.join(known)}",
    )


def without_none(kind: Any) -> Any:
    """``X`` for the type ``X | None``; a setting may have several forms, such as a number or a word."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        arms = tuple(arm for arm in typing.get_args(kind) if arm is not types.NoneType)
        return functools.reduce(operator.or_, arms)
    return kind


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _checked(wanted: Any, value: Any, check: Callable[[Any], None] | None, *, origin: str, path: str) -> Any:
    """``value`` as the type ``wanted``, in its range and finite; ConfigError otherwise."""
    try:
        if check is not None and _is_number(value):
            _run_check(check, value, origin=origin)
        checked = msgspec.convert(_plain(value), wanted)
    except (msgspec.ValidationError, OverflowError) as error:
        raise _wrong(origin, path, value, _expected(wanted, value, str(error))) from None
    # msgspec has no such constraint, and inf keeps every lower bound. Options have checks of their own.
    if typing.get_origin(wanted) is not Mapping and not _all_finite(value):
        raise _wrong(origin, path, value, _expected(wanted, value, ""))
    return checked


def _run_check(check: Callable[[Any], None], value: Any, *, origin: str) -> None:
    try:
        check(value)
    except ConfigError as error:
        if origin.endswith(".toml"):
            error.what = f"{origin}: {error.what}"
        raise


def _expected(wanted: Any, value: Any, complaint: str) -> str:
    """What a setting of the type ``wanted`` would be, in words for a user who gave ``value``."""
    kind = without_none(wanted)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(_expected(arm, value, complaint) for arm in typing.get_args(kind))
    limits: Meta | None = None
    if typing.get_origin(kind) is Annotated:
        kind, limits = typing.get_args(kind)
    shape, arguments = typing.get_origin(kind), typing.get_args(kind)
    if shape is Literal:
        return f"one of {', '.join(arguments)}. {did_you_mean(str(value), arguments)}".rstrip()
    if shape is Mapping:
        return "a table of plain values"
    if shape is tuple:
        if limits is not None:
            return "a list of two finite numbers, such as [0, 4095]"
        plain = {float: "a list of finite numbers", str: 'a list of texts, such as ["a", "b"]'}
        return plain.get(arguments[0], f"a list of such tables: {complaint}")
    if kind in (int, float) and _is_number(value) and not (kind is int and isinstance(value, float)):
        return _range_text(limits)
    return {float: "a number", int: "a whole number", bool: "true or false", str: "a string"}[kind]


def _range_text(limits: Meta | None) -> str:
    words = {"gt": "above {}", "ge": "{} or more", "lt": "below {}", "le": "at most {}"}
    given = {key: getattr(limits, key, None) for key in words}
    parts = [words[key].format(limit) for key, limit in given.items() if limit is not None]
    return "a finite number" + (f": {' and '.join(parts)}" if parts else "")


def _wrong(origin: str, path: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(
        "bad-value", f"{origin}: {path} = {value!r} is not {wanted}", fix="See docs/recipes.md."
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """``value`` with numpy's floats as Python's, which alone are floats to msgspec."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, float) else value


def _all_finite(value: Any) -> bool:
    """Every number in ``value``, also inside lists and tables, is finite; whole ones fit TOML's 64 bits."""
    if isinstance(value, Mapping):
        return all(map(_all_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_all_finite, value))
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return not isinstance(value, float) or math.isfinite(value)
