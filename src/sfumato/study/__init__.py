"""The papers' tables and figures, run again: conditions, paired seeds, and what they show."""

from sfumato.study.conditions import Condition, Scale, conditions_of
from sfumato.study.reproduction import Reproduction

__all__ = ["Condition", "Reproduction", "Scale", "conditions_of"]
