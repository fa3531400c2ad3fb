"""The papers' tables and figures, run again with paired seeds; and what is inside networks and runs."""

from sfumato.study.conditions import Condition, Scale, conditions_of
from sfumato.study.reproduction import Reproduction

__all__ = ["Condition", "Reproduction", "Scale", "conditions_of"]
