"""Training by DP-SGD: the loop, what it is fed with, and what it updates."""

from sfumato.training.gradient_sums import ClosedFormSum, EngineSum, GradientSum
from sfumato.training.loop import fit, fit_without_privacy

__all__ = ["ClosedFormSum", "EngineSum", "GradientSum", "fit", "fit_without_privacy"]
