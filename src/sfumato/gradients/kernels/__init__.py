"""Sums over memory that are worth one pass: compiled where a compiler was at hand, in PyTorch elsewhere.

A performance question only: all ways agree up to rounding, and the tests hold them to it. ``sums`` has both
forms of each sum, ``tiles`` and ``low_tiles`` what is only compiled, ``library`` finds and calls the compiled
functions, which kernels.h declares.
"""

from sfumato.gradients.kernels.low_tiles import (
    low_filter_sum,
    low_filters,
    offers_low_filter_sum,
    offers_low_filters,
)
from sfumato.gradients.kernels.sums import (
    channel_sums,
    filter_moments,
    group_norm_backward,
    position_products,
    position_sums,
    weighted_rows,
)
from sfumato.gradients.kernels.tiles import head_sums, offers_head_sums, offers_unit_filters, unit_filters

__all__ = [
    "channel_sums",
    "filter_moments",
    "group_norm_backward",
    "head_sums",
    "low_filter_sum",
    "low_filters",
    "offers_head_sums",
    "offers_low_filter_sum",
    "offers_low_filters",
    "offers_unit_filters",
    "position_products",
    "position_sums",
    "unit_filters",
    "weighted_rows",
]
