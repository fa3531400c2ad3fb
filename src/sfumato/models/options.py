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
