"""Checks of the options that a family takes."""

from __future__ import annotations

import math
from typing import get_args

from sfumato.errors import ConfigError, did_you_mean

# The most that an option may be: building a model ends within seconds whatever a stranger's file asks for.
# Above every published network; how many weights that makes is checked apart, against the free memory.
LARGEST = {"depth": 400, "depths": 100, "num_layers": 10, "image_size": 1024, "input_size": 1024, "grid": 64}
_LARGEST_COUNT = 2**16
_LARGEST_FACTOR = {"depth": 10.0, "width": 50.0}  # of the floating-point options: multiples of a network
_LARGEST_FLOAT = 1e6


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
        most = LARGEST.get(name, _LARGEST_COUNT)
        kind = f"a list of {len(default)} whole numbers from 1 to {most}"
        items = tuple(value) if isinstance(value, list | tuple) else ()
        fits = len(items) == len(default) and all(type(item) is int and 0 < item <= most for item in items)
        value = items if fits else value
    elif isinstance(default, bool):
        fits, kind = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        most = LARGEST.get(name, _LARGEST_COUNT)
        fits = isinstance(value, int) and type(value) is int and 0 < value <= most
        kind = f"a whole number from 1 to {most}"
    elif isinstance(default, float):
        largest = _LARGEST_FACTOR.get(name, _LARGEST_FLOAT)
        number = value if isinstance(value, int | float) and type(value) in (int, float) else math.nan
        fits = abs(number) <= largest and math.isfinite(number)
        kind = f"a number up to {largest:g}"
    else:
        fits, kind = isinstance(value, str), "a word"
    if not fits:
        raise ConfigError(
            "bad-model-option", f"{name}={_short(value)} is not {kind}.", fix=f"Its default is {default!r}."
        )
    return value


def _short(value: object) -> str:
    """The value for a message: a number of a million digits is not one."""
    if isinstance(value, int) and abs(value) > 10**18:
        return "a number of more than 18 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
