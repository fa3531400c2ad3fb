"""What the doctor finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["void", "weak", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that voids the guarantee ("void"), weakens it ("weak"), or should be known ("note")."""

    severity: Severity
    code: str
    what: str
    cure: str

    def as_dict(self) -> dict[str, str]:
        return {"severity": self.severity, "code": self.code, "what": self.what, "cure": self.cure}
