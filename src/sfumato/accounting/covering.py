"""Which series of noisy sums never cost more than another, whatever is composed with either.

An ε at one δ does not say that: of two runs with the same ε one can be the costlier in a composition, or
under a search. Adaptive searches and searches among unlike runs therefore compare whole curves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sfumato.accounting.calibration import solve_noise_multiplier
from sfumato.accounting.events import SampledGaussian, merge, without_selections
from sfumato.accounting.renyi import whole_order_divergences

_ROUNDING = 1e-9  # of sums of a few floats


def share_used(
    done: Sequence[SampledGaussian], allowed: Sequence[SampledGaussian], *, in_renyi: bool
) -> float:
    """How much of ``allowed`` the sums ``done`` use: at most 1 if they are covered, infinite if unknown.

    Guarantee: where the result is at most 1, ``allowed`` may stand for ``done`` in every composition, chosen
    adaptively or not: (1) each mechanism is among those allowed, no more often; or (2) all are Gaussian sums
    over all units, and Σ T/σ² is no larger; or (3), only where they are the runs of a ``Selection``
    (``in_renyi``), the Rényi divergence is no larger at any order that is ever looked at. Then sampled sums
    are among those allowed: such a search is never counted for replace-one neighbours.
    """
    spent, limit = without_selections(merge(done)), without_selections(merge(allowed))
    if not spent:
        return 0.0
    if _among(spent, limit):
        return 1.0
    if all(_plain(event) for event in (*spent, *limit)):
        return math.sqrt(_precision(spent) / _precision(limit)) if limit else math.inf
    sampled = any(event.sampling_rate < 1 for event in limit)
    if not (in_renyi and sampled) or any(event.discrete for event in (*spent, *limit)):
        return math.inf
    return _largest_ratio(spent, limit)


def is_covered(
    done: Sequence[SampledGaussian], allowed: Sequence[SampledGaussian], *, in_renyi: bool
) -> bool:
    """Whether ``allowed`` may stand for ``done``; see ``share_used``."""
    return share_used(done, allowed, in_renyi=in_renyi) <= 1 + _ROUNDING


def covered_noise(
    events_of: Callable[[float], Sequence[SampledGaussian]],
    allowed: Sequence[SampledGaussian],
    *,
    in_renyi: bool,
    guess: float = 1.0,
) -> float:
    """The least noise multiplier, to 1e-4, whose ``events_of(noise_multiplier)`` are covered by ``allowed``.

    The noise of ``allowed`` itself is taken as it is where its events come out: no bisection could hit it.
    """
    for event in allowed:
        if set(merge(events_of(event.noise_multiplier))) == set(merge(allowed)):
            return event.noise_multiplier

    def used(noise_multiplier: float) -> float:
        return share_used(events_of(noise_multiplier), allowed, in_renyi=in_renyi)

    return solve_noise_multiplier(used, 1.0, guess=guess)


def _among(spent: Sequence[SampledGaussian], limit: Sequence[SampledGaussian]) -> bool:
    """Whether each mechanism is allowed as it is, for at least as many steps."""
    allowed = {
        (event.noise_multiplier, event.sampling_rate, event.discrete): event.num_steps for event in limit
    }
    return all(
        event.num_steps <= allowed.get((event.noise_multiplier, event.sampling_rate, event.discrete), -1)
        for event in spent
    )


def _plain(event: SampledGaussian) -> bool:
    return event.sampling_rate == 1 and not event.discrete and event.noise_multiplier > 0


def _precision(events: Sequence[SampledGaussian]) -> float:
    return math.fsum(event.num_steps / event.noise_multiplier**2 for event in events)


def _largest_ratio(spent: tuple[SampledGaussian, ...], limit: tuple[SampledGaussian, ...]) -> float:
    import numpy as np

    if any(event.noise_multiplier == 0 for event in spent):
        return math.inf
    ours, theirs = whole_order_divergences(spent), whole_order_divergences(limit)
    usable = np.isfinite(theirs)  # an order that bounds nothing of what is allowed is never used
    return float(np.max(ours[usable] / theirs[usable])) if usable.any() else math.inf
