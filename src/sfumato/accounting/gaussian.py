"""Full-batch Gaussian sums, which compose to one Gaussian: exact formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sfumato.accounting.events import Event, Neighbouring, Selection


@dataclass(frozen=True)
class GaussianCurve:
    """The privacy curve of exact μ-GDP."""

    mu: float

    def epsilon(self, delta: float) -> float:
        import dp_accounting

        return float(dp_accounting.get_epsilon_gaussian(1.0 / self.mu, delta))

    def delta(self, epsilon: float) -> float:
        return gaussian_delta(epsilon, self.mu)


def exact_mu(events: Sequence[Event], neighbouring: Neighbouring) -> float | None:
    """μ if all events are full-batch continuous Gaussian sums, which compose to one Gaussian; else None."""
    squared = 0.0
    for event in events:
        if (
            isinstance(event, Selection)
            or event.discrete
            or event.sampling_rate < 1
            or not event.noise_multiplier
        ):
            return None
        squared += event.num_steps / event.noise_multiplier**2
    reach = 2.0 if neighbouring == "replace-one" else 1.0
    return reach * math.sqrt(squared) if squared else None


def gaussian_delta(epsilon: float, mu: float) -> float:
    """δ(ε) of exact μ-GDP (Dong, Roth and Su 2022, corollary 2.13), stable for small δ."""
    from scipy.special import log_ndtr

    first, second = float(log_ndtr(-epsilon / mu + mu / 2)), epsilon + float(log_ndtr(-epsilon / mu - mu / 2))
    return math.exp(first) * -math.expm1(min(0.0, second - first))
