"""Training by DP-SGD: the loop, what it is fed with, and what it updates."""

from sfumato.training.gradient_sums import EngineSum, GradientSum, HeadGradients
from sfumato.training.loop import fit, fit_without_privacy

__all__ = ["EngineSum", "GradientSum", "HeadGradients", "fit", "fit_without_privacy"]
