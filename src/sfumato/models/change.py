"""What a transformation did to a model, one line per layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Change:
    """One layer that was changed or added."""

    layer: str
    before: str
    after: str
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.layer or '(the model)'}: {self.before} → {self.after}"
        return f"{text} ({self.note})" if self.note else text
