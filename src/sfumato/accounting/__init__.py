"""What a series of noisy sums costs: events → ε(δ), δ(ε), trade-offs, μ-GDP, groups, search, calibration.

An event says what was done, an accountant what it costs. The arithmetic is dp-accounting's: privacy loss
distributions ("pld", tight, rounded upwards) or Rényi DP ("rdp", looser, the papers' choice). Every noise
multiplier is relative to what one unit **adds** to the sum (the clip norm), under both neighbouring
relations; replacing a unit can move the sum twice as far, and that is counted here.
"""

from sfumato.accounting.accountants import ACCOUNTANTS, Curve, PrivacyAccountant, default_accountant
from sfumato.accounting.calibration import solve_batch_size, solve_noise_multiplier, solve_num_steps
from sfumato.accounting.covering import covered_noise, is_covered, share_used
from sfumato.accounting.curves import delta, epsilon, mu_clt, mu_gdp, trade_off
from sfumato.accounting.events import (
    Accountant,
    Event,
    Neighbouring,
    SampledGaussian,
    Selection,
    check_budget,
    check_delta,
    check_epsilon,
    check_many,
    event_from_dict,
    event_to_dict,
    is_whole,
    without_selections,
)
from sfumato.accounting.groups import group_epsilon
from sfumato.accounting.renyi import needs_rdp, rough_epsilon

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "Curve",
    "Event",
    "Neighbouring",
    "PrivacyAccountant",
    "SampledGaussian",
    "Selection",
    "check_budget",
    "check_delta",
    "check_epsilon",
    "check_many",
    "covered_noise",
    "default_accountant",
    "delta",
    "epsilon",
    "event_from_dict",
    "event_to_dict",
    "group_epsilon",
    "is_covered",
    "is_whole",
    "mu_clt",
    "mu_gdp",
    "needs_rdp",
    "rough_epsilon",
    "share_used",
    "solve_batch_size",
    "solve_noise_multiplier",
    "solve_num_steps",
    "trade_off",
    "without_selections",
]
