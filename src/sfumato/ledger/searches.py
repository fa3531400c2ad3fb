"""Runs of a counted search: the search has an account of its own, which pays for all of them beforehand.

The account is the parent, the runs are its children. A child is on record like every run, so that it can be
resumed and is never forgotten, but its parent's entry is what counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sfumato.errors import PrivacyError
from sfumato.ledger.links import Links
from sfumato.ledger.receipt import Receipt
from sfumato.ledger.totals import Record

# SQL: rows that count. A child whose parent is not in this ledger pays for itself.
PAYS_ITSELF = "(parent = '' OR parent NOT IN (SELECT run_id FROM runs))"


def paid_by(
    parent: Record | None, child: Record, children: Sequence[Record], known: Mapping[str, Links], links: Links
) -> Record:
    """The child as the ledger takes it: paid by its parent, or a run that pays for itself.

    Guarantee: refused unless the parent is on record with the whole of the search spent, and the child is
    part of that very search, on images that the parent was opened for. Each part of a search is run once: the
    child of a folder that was copied, or was begun before under another id, pays for itself, and as much as
    the whole search; so does one trial more than the search counts, or a second last run.
    """
    if parent is None or parent.plan is None or child.plan is None or not _pays(parent, child):
        raise _not_paid(child, "is not what was paid for there")
    ours = known.get(parent.fingerprint, Links()).image_ids
    if links.image_ids is None or ours is None or not np.isin(links.image_ids, ours).all():
        raise _not_paid(child, "has images that are not known to be among those of the search")
    return replace(child, parent="" if is_used_up(child, children) else parent.run_id)


def is_used_up(child: Record, children: Sequence[Record]) -> bool:
    """Whether other runs have taken what the search paid for: this part itself, or as many as it counts.

    Under random stopping the number of trials is drawn, and secret: there the search's own folder knows it.
    """
    plan = child.plan
    assert plan is not None  # a run without privacy is no part of a counted search
    assert plan.search is not None
    taken = [other for other in children if other.run_id != child.run_id and other.reserved_steps]
    alike = [
        other for other in taken if other.plan is not None and other.plan.search_part == plan.search_part
    ]
    allowed = 1.0 if plan.search_part == "final" else plan.search.num_trials
    counted = plan.search_part == "final" or plan.search.strategy != "random-stopping"
    return any(other.label == child.label for other in taken) or (counted and len(alike) >= allowed)


def check_first_step(child: Record, known: Receipt | None, children: Sequence[Record]) -> None:
    """Refuse the first step of a child whose part another one has taken since both were begun."""
    is_first = known is not None and not known.record.reserved_steps
    if child.parent and is_first and is_used_up(child, children):
        raise _not_paid(child, "another run of it has taken that part meanwhile")


def _pays(parent: Record, child: Record) -> bool:
    plan, search = parent.plan, None if child.plan is None else child.plan.search
    if plan is None or child.plan is None or search is None or not search.is_counted:
        return False
    same = plan.search == search and (plan.unit, plan.delta) == (child.plan.unit, child.plan.delta)
    spent = parent.reserved_steps >= plan.num_steps and parent.releasable == child.releasable
    return same and spent and not parent.parent and plan.neighbouring == child.plan.neighbouring


def _not_paid(child: Record, why: str) -> PrivacyError:
    return PrivacyError(
        "not-paid-by-search",
        f"run {child.label!r} was to be paid for by the search {child.parent or '(unknown)'}, and {why}.",
        why="Whatever a search does not count is spent beside it.",
        fix="Begin the search first, with the same plan and images; or train without it.",
    )
