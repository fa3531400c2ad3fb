"""The plan of a private run and its statement: what is promised, in figures and in words."""

from sfumato.privacy.plan import Plan
from sfumato.privacy.statement import Statement, round_up

__all__ = ["Plan", "Statement", "round_up"]
