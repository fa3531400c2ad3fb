"""Errors that a user can act on: each has a code, and each code a section in docs/errors.md.

That document is part of the wheel; ``sfumato errors show CODE`` prints a section of it.

The first argument of every error raised in the package is its code, written as a literal;
a test compares those literals with the headings of docs/errors.md.
"""

from __future__ import annotations


class SfumatoError(Exception):
    """An error that the user can fix: what happened, why it matters, how to fix it."""

    exit_code = 1

    def __init__(self, code: str, what: str, *, why: str = "", fix: str = "") -> None:
        self.code, self.what, self.why, self.fix = code, what, why, fix
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [f"{type(self).__name__} [{self.code}]: {self.what}"]
        if self.why:
            lines.append(f"  {self.why}")
        if self.fix:
            lines.append(f"  {self.fix}")
        lines.append(f"  More: sfumato errors show {self.code}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, str]:
        return {
            "error": type(self).__name__,
            "code": self.code,
            "what": self.what,
            "why": self.why,
            "fix": self.fix,
        }

    def __reduce__(self):  # keyword arguments survive a trip between processes
        return (_rebuild, (type(self), self.code, self.what, self.why, self.fix))


def _rebuild(kind: type[SfumatoError], code: str, what: str, why: str, fix: str) -> SfumatoError:
    return kind(code, what, why=why, fix=fix)


class ConfigError(SfumatoError):
    """A setting, argument or recipe that cannot be meant."""

    exit_code = 2


class DataError(SfumatoError):
    """Images, labels, manifests or archives that cannot be used as they are."""


class ModelError(SfumatoError):
    """A model that cannot be built, loaded or trained."""


class PrivacyError(SfumatoError):
    """Going on would void, or overstate, the guarantee."""


class RunError(SfumatoError):
    """A run that cannot be started, resumed or saved."""


def did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str:
    """'Did you mean resnet9?' for the nearest known word, else the empty string."""
    from difflib import get_close_matches

    near = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"Did you mean {near[0]}?" if near else ""
