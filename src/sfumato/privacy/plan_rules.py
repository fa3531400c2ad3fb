"""What a plan refuses: values out of range, and parts that contradict each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sfumato import accounting
from sfumato.errors import ConfigError, PrivacyError

if TYPE_CHECKING:
    from sfumato.privacy.plan import Plan


def check_plan(plan: Plan) -> None:
    if not (accounting.is_whole(plan.num_examples) and 1 <= plan.num_examples <= 2**53):
        raise ConfigError(
            "num-examples-out-of-range", f"num_examples is {plan.num_examples}.", fix="Give 1 or more."
        )
    if not (math.isfinite(plan.batch_size) and 0 < plan.batch_size <= plan.num_examples):
        raise ConfigError(
            "batch-size-out-of-range",
            f"batch_size is {plan.batch_size}, but there are {plan.num_examples} units.",
            fix="Give an expected batch size between 1 and the number of units.",
        )
    if not (math.isfinite(plan.clip_norm) and plan.clip_norm > 0):
        raise ConfigError(
            "clip-norm-out-of-range", f"clip_norm is {plan.clip_norm}.", fix="Give a number above 0."
        )
    if plan.noise_multiplier == 0:
        raise ConfigError(
            "noise-out-of-range",
            "noise_multiplier is 0: without noise there is no privacy.",
            fix="Give a number above 0, or train with --no-privacy.",
        )
    accounting.check_delta(plan.delta)
    if plan.delta > 1 / plan.num_examples and not plan.allow_large_delta:
        raise PrivacyError(
            "delta-too-large",
            f"delta is {plan.delta:g}, above 1/{plan.num_examples} (1 / number of units).",
            why="Publishing one unit at random in the clear would already satisfy such a delta.",
            fix=f"Use at most {0.5 / plan.num_examples:.1g}, or --force it, and the statement says so.",
        )
    _check_search(plan)
    for name, allowed in _CHOICES.items():
        if getattr(plan, name) not in allowed:
            raise ConfigError(
                "unknown-choice",
                f"{name} is {getattr(plan, name)!r}.",
                fix=f"Use one of: {', '.join(allowed)}.",
            )
    accounting.check_many(plan.extra_events)
    events = plan.events()  # checks noise, rate and steps
    accounting.ACCOUNTANTS[plan.accountant].check(events)


def _check_search(plan: Plan) -> None:
    said = {
        "counted (tuning_runs)": plan.tuning_runs is not None,
        "uncounted (uncounted_search)": plan.uncounted_search,
        "part of another (search)": plan.search is not None,
    }
    kinds = [words for words, given in said.items() if given]
    if len(kinds) > 1:
        raise ConfigError(
            "contradictory-search", f"the search is both {kinds[0]} and {kinds[1]}.", fix="Give one of them."
        )
    if plan.search is not None:
        plan.search.check_part(plan.search_part, plan.own_events())


_CHOICES = {
    "search_part": ("trial", "final"),
    "unit": ("image", "patient"),
    "accountant": accounting.ACCOUNTANTS,
    "neighbouring": ("add-or-remove", "replace-one"),
}


def wrong_number_given(missing: list[str]) -> ConfigError:
    if not missing:
        return ConfigError(
            "contradictory-budget",
            "epsilon, batch_size, num_steps and noise_multiplier are all given.",
            why="Any three of them determine the fourth.",
            fix="Leave one out.",
        )
    return ConfigError(
        "underdetermined-budget",
        f"{' and '.join(missing)} are not given.",
        why="Only one unknown can be solved for.",
        fix="Give all but one of epsilon, batch_size, num_steps and noise_multiplier.",
    )
