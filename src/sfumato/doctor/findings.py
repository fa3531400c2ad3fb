"""What the doctor finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["void", "weak", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that voids the guarantee ("void"), weakens it ("weak"), or should be known ("note")."""

    severity: Severity
    code: str
    what: str
    cure: str
    sensitive: bool = False  # tells of the private images without noise: to be shown to their holder only

    @property
    def mark(self) -> str:
        """To stand behind its name, as behind scores on private images."""
        return " (sensitive)" if self.sensitive else ""

    def as_dict(self) -> dict[str, str | bool]:
        return asdict(self)
