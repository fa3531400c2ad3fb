"""Trials as plain values: what pages, plots and the choice of the best are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.tune.ranges import Value

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One finished trial."""

    number: int
    settings: dict[str, Value]
    score: float
    is_whole: bool  # not pruned, and no failure of the worker


@dataclass(frozen=True, kw_only=True)
class Found:
    """The outcome, as ``result.json`` holds it: what may be shown."""

    strategy: str
    settings: dict[str, Value]
    epsilon: float
    delta: float
    releasable: bool
    accuracy: float | None
    num_examples: int | None
    run: Path

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**self.__dict__, "run": str(self.run)}


def records_of(study: optuna.Study, *, num_trials: int) -> list[TrialRecord]:
    """The finished trials of a search, in the order in which they began."""
    from optuna.trial import TrialState

    return [
        TrialRecord(
            number=trial.number,
            settings={key: trial.params[key] for key in sorted(trial.params)},
            score=trial.value if trial.value is not None else 0.0,
            is_whole=trial.state == TrialState.COMPLETE,
        )
        for trial in study.get_trials(deepcopy=False)
        if trial.number < num_trials and trial.state.is_finished()
    ]


def best_so_far(records: Sequence[TrialRecord]) -> list[float]:
    """The best score after each trial."""
    best, found = 0.0, []
    for record in records:
        best = max(best, record.score)
        found.append(best)
    return found


def importances(records: Sequence[TrialRecord]) -> dict[str, float]:
    """How much of the scores each setting explains (PED-ANOVA, Watanabe et al. 2023); {} if too few trials.

    Noise in the scores counts too: with few trials the shares are a hint.
    """
    import optuna

    whole = [record for record in records if record.is_whole]
    varied = sorted({key for record in whole for key in record.settings})
    if len(whole) < 4 or len({record.score for record in whole}) < 2 or not varied:
        return {}
    if len(varied) == 1:
        return {varied[0]: 1.0}
    study = optuna.create_study(direction="maximize")
    for record in whole:
        spread = {key: _distribution(whole, key) for key in varied}
        study.add_trial(
            optuna.trial.create_trial(params=record.settings, distributions=spread, value=record.score)
        )
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(evaluate_on_local=True)
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _distribution(records: Sequence[TrialRecord], key: str) -> optuna.distributions.BaseDistribution:
    """What the values that were tried span."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    values = [record.settings[key] for record in records]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values) or len(set(numbers)) < 2:
        return CategoricalDistribution(tuple(dict.fromkeys(values)))
    low, high = float(min(numbers)), float(max(numbers))
    return FloatDistribution(low, high, log=low > 0 and high / low > 8)
