"""The settings of the way from outputs to a class; those of all other parts are in ``recipe.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sfumato.recipes.settings import AboveZero, Inside, setting

Shares = Inside | tuple[float, ...]  # of the classes in their order; of two classes one number will do


@dataclass(frozen=True, kw_only=True)
class DecisionSettings:
    """[decision]: from outputs to a class. What is read off private images is released with counted noise."""

    positive: str | None = setting(None, "of two classes the one that is looked for; absent: the second")
    prevalence_at_use: Shares | None = setting(
        None, "how frequent classes are where the model is used; absent: all alike"
    )
    class_counts_noise_multiplier: AboveZero = setting(20.0, "of data.class_counts = released, in units")
    threshold: Inside | tuple[float, ...] | Literal["auto", "public", "released"] = setting(
        "auto", "of the positive class, or of each finding; auto: of public val/ images, else 0.5"
    )
    threshold_noise_multiplier: AboveZero = setting(8.0, "of threshold = released: counts of scores")
