"""The accountants by name, and what each of them has to offer.

To add one: a class with these methods, and its row in ``ACCOUNTANTS``, from which recipes and commands take
their choices. Plans hold an accountant by its name, never as an object: whoever reads a file must be able to
count it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sfumato.accounting.events import Accountant, Event, Neighbouring, Selection
from sfumato.accounting.loss_distributions import PldAccountant
from sfumato.accounting.renyi import RdpAccountant, needs_rdp
from sfumato.errors import ConfigError


class Curve(Protocol):
    """What composed events cost.

    Guarantee: neither function is below the truth, up to the arithmetic of dp-accounting.
    """

    def epsilon(self, delta: float) -> float:
        """The smallest ε that can be shown at this δ."""

    def delta(self, epsilon: float) -> float:
        """The smallest δ that can be shown at this ε."""


class PrivacyAccountant(Protocol):
    """Composes events."""

    @property
    def name(self) -> str:
        """As commands, recipes and files write it."""

    @property
    def title(self) -> str:
        """The method in the words of the statement."""

    def check(self, events: Sequence[Event]) -> None:
        """Refuse events that it cannot count."""

    def curve(self, events: tuple[Event, ...], neighbouring: Neighbouring) -> Curve:
        """The cost of at least one event, all of them noisy."""


ACCOUNTANTS: Mapping[str, PrivacyAccountant] = {
    each.name: each for each in (PldAccountant(), RdpAccountant())
}


def find_accountant(
    events: Sequence[Event], accountant: Accountant, neighbouring: Neighbouring
) -> PrivacyAccountant:
    """The accountant of this name; refuses unknown names, and one that cannot count these events."""
    if accountant not in ACCOUNTANTS:
        raise ConfigError(
            "unknown-accountant",
            f"there is no accountant {accountant!r}.",
            fix=f"Use one of: {', '.join(ACCOUNTANTS)}.",
        )
    if neighbouring not in ("add-or-remove", "replace-one"):
        raise ConfigError(
            "unknown-neighbouring",
            f"there is no neighbouring relation {neighbouring!r}.",
            fix="Use add-or-remove (default) or replace-one.",
        )
    chosen = ACCOUNTANTS[accountant]
    chosen.check(events)
    return chosen


def default_accountant(events: Sequence[Event]) -> Accountant:
    """The tight one, unless some event is proven in Rényi DP only."""
    return RdpAccountant.name if needs_rdp(events) else PldAccountant.name


def is_noiseless(events: Sequence[Event]) -> bool:
    """Whether some event publishes a private value as it is."""
    return any(
        is_noiseless(event.events) if isinstance(event, Selection) else event.noise_multiplier == 0
        for event in events
    )
