"""Names from folders and manifests, made safe for the place where they are shown."""

from __future__ import annotations

import re

_MARKUP = re.compile(r"([\\`*_\[\]#|~$])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def one_line(name: str) -> str:
    """The name on one line of a terminal: what cannot be printed is written as an escape."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in name)


def markdown(name: str) -> str:
    """The name as plain text inside Markdown: neither markup, nor HTML, nor a second line."""
    text = _MARKUP.sub(r"\\\1", one_line(name))
    return "".join(_ENTITIES.get(sign, sign) for sign in text)
