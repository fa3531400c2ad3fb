"""Checks of the options that a family takes."""

from __future__ import annotations

from typing import get_args

from sfumato.errors import ConfigError, did_you_mean


def check_option(name: str, value: object, choices: object) -> None:
    """Refuse a ``value`` that is not one of a Literal's ``choices``."""
    known = get_args(choices)
    if value not in known:
        hint = did_you_mean(str(value), [str(choice) for choice in known])
        raise ConfigError(
            "bad-model-option",
            f"{name}={value!r} is not a choice. {hint}".rstrip(),
            fix=f"Choose one of {', '.join(map(str, known))}.",
        )


def checked_value(name: str, value: object, default: object) -> object:
    """The value, if it has the type of its ``default``; a list, as TOML and JSON have it, becomes a tuple."""
    if isinstance(default, tuple):
        kind = f"a list of {len(default)} whole numbers above 0"
        fits = isinstance(value, list | tuple) and len(value) == len(default)
        fits = fits and all(type(item) is int and item > 0 for item in value)
        value = tuple(value) if fits else value
    elif isinstance(default, bool):
        fits, kind = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        fits, kind = type(value) is int and value > 0, "a whole number above 0"
    elif isinstance(default, float):
        fits, kind = type(value) in (int, float), "a number"
    else:
        fits, kind = isinstance(value, str), "a word"
    if not fits:
        raise ConfigError(
            "bad-model-option", f"{name}={value!r} is not {kind}.", fix=f"Its default is {default!r}."
        )
    return value
