"""The doctor: what would void or weaken the guarantee, found before any budget is spent.

``check_model`` refuses a model that the mechanism cannot bound. ``examine_data`` and ``examine_plan``
return findings for people to read; those of severity "void" must be fixed.
"""

from sfumato.doctor.data_checks import examine_data
from sfumato.doctor.findings import Finding
from sfumato.doctor.gradient_check import check_engine
from sfumato.doctor.model_checks import check_forward, check_model
from sfumato.doctor.plan_checks import examine_plan, examine_precision, examine_surroundings
from sfumato.doctor.row_independence import check_augmentation, check_independence
from sfumato.doctor.summary import summarise

__all__ = [
    "Finding",
    "check_augmentation",
    "check_engine",
    "check_forward",
    "check_independence",
    "check_model",
    "examine_data",
    "examine_plan",
    "examine_precision",
    "examine_surroundings",
    "summarise",
]
