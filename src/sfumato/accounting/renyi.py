"""Rényi differential privacy: the papers' accountant, and the only one with proofs for some events."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from sfumato.accounting.events import Event, Neighbouring, SampledGaussian, Selection
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from dp_accounting import DpEvent

_WHOLE_ORDERS = (*range(2, 64), 128, 256, 512, 1024)


@dataclass(frozen=True)
class RdpAccountant:
    """dp-accounting's Rényi accountant: looser than loss distributions, valid for every event here."""

    name = "rdp"
    title = "Rényi differential privacy"

    def check(self, events: Sequence[Event]) -> None:
        """Every event can be counted."""

    def curve(self, events: tuple[Event, ...], neighbouring: Neighbouring) -> RenyiCurve:
        return renyi_curve(events, neighbouring)


def needs_rdp(events: Sequence[Event]) -> bool:
    """Whether the events' proofs are in Rényi DP, so that no loss distribution is known for them."""
    return any(isinstance(event, Selection) or event.discrete for event in events)


def rough_epsilon(
    events: Sequence[SampledGaussian], *, delta: float = 1e-6, neighbouring: Neighbouring = "add-or-remove"
) -> float:
    """ε to some percent, from a few whole orders, which have a fast formula: for pictures and step sizes."""
    import numpy as np

    orders = np.array([*range(2, 13), 14, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512], dtype=float)
    reach = 2.0 if neighbouring == "replace-one" else 1.0
    halved = [replace(event, noise_multiplier=event.noise_multiplier / reach) for event in events]
    total = np.zeros_like(orders)
    for event in halved:
        total += _divergences(event, orders, "add-or-remove")
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
    because completing the square leaves the lattice as it was. A search among sampled runs: whole orders
    too, at which the divergence of a sampled sum is exact, and unlike runs can be compared.
    Sampled and replace-one: remove one unit, then add another, by the weak triangle inequality of Mironov
    (2017): D_α(P‖Q) <= (α−½)/(α−1)·D_2α(P‖R) + D_2α−1(R‖Q).
    """
    import numpy as np
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

    whole = any(_needs_whole_orders(event) for event in events)
    orders = np.array(_WHOLE_ORDERS if whole else DEFAULT_RDP_ORDERS, dtype=float)
    total = np.zeros_like(orders)
    for event in events:
        if neighbouring == "replace-one" and _is_sampled(event):
            twice = _divergences(event, 2 * orders, neighbouring)
            total += (orders - 0.5) / (orders - 1) * twice + _divergences(event, 2 * orders - 1, neighbouring)
        else:
            total += _divergences(event, orders, neighbouring)
    return RenyiCurve(orders, total)


def whole_order_divergences(events: Sequence[SampledGaussian]) -> np.ndarray:
    """Rényi divergences at the orders of a search among sampled runs, for add-or-remove neighbours."""
    import numpy as np

    orders = np.array(_WHOLE_ORDERS, dtype=float)
    return np.sum([_divergences(event, orders, "add-or-remove") for event in events], axis=0)


def _needs_whole_orders(event: Event) -> bool:
    if isinstance(event, Selection):
        return any(one.discrete or one.sampling_rate < 1 for one in event.events)
    return event.discrete


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
