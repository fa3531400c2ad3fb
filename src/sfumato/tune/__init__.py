"""A search for settings, with its cost: ranges, budget, trials on Optuna, what comes out, a page of it."""

from sfumato.tune.session import TuneResult, tune
from sfumato.tune.settings import TuneSettings

__all__ = ["TuneResult", "TuneSettings", "tune"]
