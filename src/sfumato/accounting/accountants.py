"""The two accountants of dp-accounting, and the cases that have a formula."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from sfumato.accounting.events import Accountant, Event, Neighbouring, SampledGaussian, Selection
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from dp_accounting import DpEvent
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_HOPELESS = 300.0
_MOST_COMPOSED_STEPS = 1_000_000
_DISCRETE_ORDERS = (*range(2, 64), 128, 256, 512, 1024)


def needs_rdp(events: Sequence[Event]) -> bool:
    """Whether the events' proofs are in Rényi DP, so that no loss distribution is known for them."""
    return any(isinstance(event, Selection) or event.discrete for event in events)


def is_hopeless(events: tuple[Event, ...], neighbouring: Neighbouring, *, group_size: int = 1) -> bool:
    """Whether ε is in the hundreds or the steps in the millions; RDP bounds them then.

    The loss distribution is not worth its memory in the first case, nor minutes of work in the second.
    """
    if sum(event.num_steps for event in events if event.sampling_rate < 1) > _MOST_COMPOSED_STEPS:
        return True
    if group_size > 1:
        events = tuple(
            replace(event, noise_multiplier=event.noise_multiplier / group_size) for event in events
        )
    return rough_epsilon(events, neighbouring=neighbouring) > _HOPELESS


def check_accountant(events: Sequence[Event], accountant: Accountant, neighbouring: Neighbouring) -> None:
    """Refuse unknown names, and accountants that cannot count these events."""
    if accountant not in ("pld", "rdp"):
        raise ConfigError(
            "unknown-accountant", f"there is no accountant {accountant!r}.", fix="Use pld (default) or rdp."
        )
    if neighbouring not in ("add-or-remove", "replace-one"):
        raise ConfigError(
            "unknown-neighbouring",
            f"there is no neighbouring relation {neighbouring!r}.",
            fix="Use add-or-remove (default) or replace-one.",
        )
    if accountant == "pld" and needs_rdp(events):
        raise ConfigError(
            "needs-rdp",
            "a counted search, or discrete noise, was to be accounted with pld.",
            why="Both have their proof in Rényi differential privacy; no tight loss distribution is known.",
            fix="Use the rdp accountant.",
        )


def is_noiseless(events: Sequence[Event]) -> bool:
    """Whether some event publishes a private value as it is."""
    return any(
        is_noiseless(event.events) if isinstance(event, Selection) else event.noise_multiplier == 0
        for event in events
    )


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


@lru_cache(maxsize=8)
def loss_distribution(
    events: tuple[SampledGaussian, ...], neighbouring: Neighbouring
) -> PrivacyLossDistribution:
    """The composed privacy loss distribution; cached, for plots and bisections ask it many times."""
    interval, total = discretisation(events, neighbouring), None
    for event in events:
        if event.sampling_rate == 1:  # full batches compose to one Gaussian, exactly
            part = _one_step(event.noise_multiplier / math.sqrt(event.num_steps), 1.0, neighbouring, interval)
        else:
            part = _one_step(event.noise_multiplier, event.sampling_rate, neighbouring, interval)
            part = part.self_compose(event.num_steps)
        total = part if total is None else total.compose(part)
    return total


@lru_cache(maxsize=8)
def _one_step(
    noise_multiplier: float, sampling_rate: float, neighbouring: Neighbouring, interval: float
) -> PrivacyLossDistribution:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    replace = neighbouring == "replace-one"
    return pld.from_gaussian_mechanism(
        standard_deviation=noise_multiplier,
        value_discretization_interval=interval,
        sampling_prob=sampling_rate,
        neighboring_relation=(
            NeighboringRelation.REPLACE_ONE if replace else NeighboringRelation.ADD_OR_REMOVE_ONE
        ),
    )


def discretisation(events: tuple[Event, ...], neighbouring: Neighbouring) -> float:
    """The interval of privacy losses that overstates ε by about one part in ten thousand.

    The overstatement was measured to be near 1.5·T·interval²/ε² of ε.
    """
    sampled_steps = sum(event.num_steps for event in events if event.sampling_rate < 1)
    wanted = 0.008 * rough_epsilon(events, neighbouring=neighbouring) / math.sqrt(max(sampled_steps, 64))
    return 2.0 ** math.floor(
        math.log2(min(max(wanted, 1e-7), 0.01))
    )  # a power of two: nearby plans share the cached part


def rough_epsilon(
    events: Sequence[SampledGaussian], *, delta: float = 1e-6, neighbouring: Neighbouring = "add-or-remove"
) -> float:
    """ε to some percent, from a few whole orders, which have a fast formula: for pictures and step sizes."""
    import numpy as np

    orders = np.array([*range(2, 13), 14, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512], dtype=float)
    reach = 2.0 if neighbouring == "replace-one" else 1.0
    halved = [replace(event, noise_multiplier=event.noise_multiplier / reach) for event in events]
    total = sum(_divergences(event, orders, "add-or-remove") for event in halved)
    return RenyiCurve(orders, total).epsilon(delta)


@dataclass(frozen=True)
class RenyiCurve:
    """Rényi divergences at orders, and what (ε, δ) follow from them."""

    orders: np.ndarray
    divergences: np.ndarray

    def epsilon(self, delta: float) -> float:
        from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

        return float(compute_epsilon(self.orders, self.divergences, delta)[0])

    def delta(self, epsilon: float) -> float:
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        return float(compute_delta(self.orders, self.divergences, epsilon)[0])


@lru_cache(maxsize=64)
def renyi_curve(events: tuple[Event, ...], neighbouring: Neighbouring) -> RenyiCurve:
    """Sum of the events' Rényi divergences.
    Discrete noise: only whole orders, at which a lattice shift gives the continuous formula exactly,
    because completing the square leaves the lattice as it was. Sampled and replace-one: remove one
    unit, then add another, by the weak triangle inequality of Mironov (2017): D_α(P‖Q) <=
    (α−½)/(α−1)·D_2α(P‖R) + D_2α−1(R‖Q).
    """
    import numpy as np
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

    discrete = any(
        any(one.discrete for one in (event.events if isinstance(event, Selection) else (event,)))
        for event in events
    )
    orders = np.array(_DISCRETE_ORDERS if discrete else DEFAULT_RDP_ORDERS, dtype=float)
    total = np.zeros_like(orders)
    for event in events:
        if neighbouring == "replace-one" and _is_sampled(event):
            twice = _divergences(event, 2 * orders, neighbouring)
            total += (orders - 0.5) / (orders - 1) * twice + _divergences(event, 2 * orders - 1, neighbouring)
        else:
            total += _divergences(event, orders, neighbouring)
    return RenyiCurve(orders, total)


def _is_sampled(event: Event) -> bool:
    if not isinstance(event, Selection):
        return event.sampling_rate < 1
    if any(one.sampling_rate < 1 for one in event.events):
        raise ConfigError(
            "search-needs-add-or-remove",
            "a counted search over sampled runs was to be accounted for replace-one neighbours.",
            why="The bound of Papernot and Steinke is applied to sampled runs under add-or-remove only.",
            fix="Use add-or-remove; replacing one unit then costs what a group of two costs.",
        )
    return False


def _divergences(event: Event, orders: np.ndarray, neighbouring: Neighbouring) -> np.ndarray:
    if isinstance(event, Selection):
        return _accountant_divergences(event, tuple(orders), neighbouring)
    one = SampledGaussian(noise_multiplier=event.noise_multiplier, sampling_rate=event.sampling_rate)
    return event.num_steps * _accountant_divergences(one, tuple(orders), neighbouring)


@lru_cache(maxsize=256)
def _accountant_divergences(
    event: Event, orders: tuple[float, ...], neighbouring: Neighbouring
) -> np.ndarray:
    from dp_accounting.rdp import RdpAccountant

    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(
        logging.ERROR
    )  # it warns of each order that it leaves out, which is safe and of no use to a reader
    try:
        return RdpAccountant(orders).compose(_dp_event(event, neighbouring)).rdp
    finally:
        log.setLevel(level)


def _dp_event(event: Event, neighbouring: Neighbouring) -> DpEvent:
    """dp-accounting's event; a replaced unit in a full batch moves the sum twice as far."""
    import dp_accounting as dp

    if isinstance(event, Selection):
        parts = [_dp_event(one, neighbouring) for one in event.events]
        return dp.dp_event.RepeatAndSelectDpEvent(dp.ComposedDpEvent(parts), event.mean_runs, event.shape)
    if event.sampling_rate == 1:
        reach = 2.0 if neighbouring == "replace-one" else 1.0
        return dp.SelfComposedDpEvent(dp.GaussianDpEvent(event.noise_multiplier / reach), event.num_steps)
    step = dp.PoissonSampledDpEvent(event.sampling_rate, dp.GaussianDpEvent(event.noise_multiplier))
    return dp.SelfComposedDpEvent(step, event.num_steps)
