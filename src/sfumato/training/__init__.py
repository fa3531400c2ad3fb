"""Training by DP-SGD: the loop, what it is fed with, and what it updates."""

from sfumato.training.loop import fit, fit_without_privacy

__all__ = ["fit", "fit_without_privacy"]
