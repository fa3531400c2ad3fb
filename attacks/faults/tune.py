"""Planted faults in searches: how choosing among runs on private data is left out of ε, or shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

COVERING = "accounting/test_covering.py"
BUDGET = "tune/test_budget.py"
SEARCHES = "ledger/test_searches.py"
WHOLE = "tune/test_search.py"


@fault(
    "selection-is-free",
    tests=(f"{COVERING}::test_the_bound_of_random_stopping_holds_against_the_exact_attack",),
)
def selection_is_free(patch: MonkeyPatch) -> None:
    patch.setattr("dp_accounting.dp_event.RepeatAndSelectDpEvent", lambda event, mean, shape: event)


@fault(
    "equal-epsilon-covers",
    tests=(
        f"{COVERING}::test_unlike_runs_of_one_epsilon_do_not_cover_each_other_but_with_covered_noise_they_do",
    ),
)
def equal_epsilon_covers(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.accounting.covering:_largest_ratio", "np.max(", "np.median(")


@fault("sampled-runs-cover-by-their-sum", tests=(f"{COVERING}::test_what_is_not_known_to_be_covered_is_not",))
def sampled_runs_cover_by_their_sum(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.accounting.covering:_plain", "event.sampling_rate == 1 and ", "")


@fault("trials-left-out-of-the-events", tests=(BUDGET,))
def trials_left_out_of_the_events(patch: MonkeyPatch) -> None:
    rewrite(
        patch, "sfumato.privacy.search:Search.events", "return (*trials, *self.final)", "return self.final"
    )


@fault(
    "scores-left-out-of-the-events",
    tests=(f"{BUDGET}::test_events_of_a_search_are_all_its_trials_their_scores_and_the_last_run",),
)
def scores_left_out_of_the_events(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.privacy.search:Search.events",
        "for event in (*self.trial, *self.score))",
        "for event in self.trial)",
    )


@fault(
    "a-plan-need-not-be-covered",
    tests=(f"{BUDGET}::test_a_plan_refuses_to_cost_more_than_its_search_counts",),
)
def a_plan_need_not_be_covered(patch: MonkeyPatch) -> None:
    from sfumato.privacy.search import Search

    patch.setattr(Search, "check_part", lambda self, part, events: None)


@fault(
    "a-score-need-not-be-covered", tests=(f"{BUDGET}::test_a_score_with_less_noise_than_counted_is_refused",)
)
def a_score_need_not_be_covered(patch: MonkeyPatch) -> None:
    from sfumato.privacy.search import Search

    patch.setattr(Search, "check_score", lambda self, event: None)


@fault("scores-without-noise", tests=(f"{WHOLE}::test_scores_have_the_noise_that_is_counted",))
def scores_without_noise(patch: MonkeyPatch) -> None:
    rewrite(
        patch, "sfumato.tune.scoring:noisy_score", "stddev=noise_multiplier", "stddev=noise_multiplier / 100"
    )


@fault(
    "random-stopping-learns-from-scores",
    tests=(f"{BUDGET}::test_a_search_that_could_not_be_counted_is_refused",),
)
def random_stopping_learns_from_scores(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.tune.settings:_check_sampler",
        'settings.strategy == "random-stopping" and settings.chosen_sampler != "random"',
        "False",
    )


@fault("a-fixed-number-of-trials", tests=("tune/test_stopping.py",))
def a_fixed_number_of_trials(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.tune.stopping:draw_trials", "uniform < reached", "0.5 < reached")


@fault("children-of-anybody", tests=(f"{SEARCHES}::test_what_the_search_has_not_paid_for_is_refused",))
def children_of_anybody(patch: MonkeyPatch) -> None:
    patch.setattr("sfumato.ledger.searches._pays", lambda parent, child: True)


@fault("children-with-other-images", tests=(f"{SEARCHES}::test_what_the_search_has_not_paid_for_is_refused",))
def children_with_other_images(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.ledger.searches:paid_by",
        "not np.isin(links.image_ids, ours).all()",
        "False",
    )


@fault("a-part-is-paid-for-twice", tests=(f"{SEARCHES}::test_each_part_is_paid_for_once",))
def a_part_is_paid_for_twice(patch: MonkeyPatch) -> None:
    patch.setattr("sfumato.ledger.searches.is_used_up", lambda child, children: False)


@fault("more-trials-than-counted", tests=(f"{SEARCHES}::test_no_more_runs_are_paid_for_than_were_counted",))
def more_trials_than_counted(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.ledger.searches:is_used_up", "len(alike) >= allowed", "False")


@fault(
    "begun-at-once-and-paid-for-twice",
    tests=(f"{SEARCHES}::test_of_two_that_were_begun_at_once_one_goes_on",),
)
def begun_at_once_and_paid_for_twice(patch: MonkeyPatch) -> None:
    patch.setattr("sfumato.ledger.ledger.check_first_step", lambda child, known, children: None)


@fault("a-copy-scores-again", tests=(f"{WHOLE}::test_the_noise_of_a_score_belongs_to_the_model",))
def a_copy_scores_again(patch: MonkeyPatch) -> None:
    from sfumato.randomness import SecureSource

    patch.setattr("sfumato.tune.scoring.SeededSource", lambda seed: SecureSource())


@fault(
    "holdout-of-replaced-units", tests=(f"{BUDGET}::test_units_are_not_set_aside_where_they_are_replaced",)
)
def holdout_of_replaced_units(patch: MonkeyPatch) -> None:
    patch.setattr("sfumato.run.resolve.check_holdout", lambda recipe, fraction: None)


@fault(
    "orphans-are-free",
    tests=(f"{SEARCHES}::test_a_rebuilt_ledger_counts_the_search_once_and_a_run_without_it_by_itself",),
)
def orphans_are_free(patch: MonkeyPatch) -> None:
    patch.setattr("sfumato.ledger.ledger.PAYS_ITSELF", "parent = ''")


@fault(
    "other-trials-are-shown",
    tests=(f"{WHOLE}::test_random_stopping_lets_out_the_best_trial_and_nothing_of_the_others",),
)
def other_trials_are_shown(patch: MonkeyPatch) -> None:
    patch.setattr("sfumato.tune.page.trials_are_public", lambda budget: True)


@fault("public-images-not-compared", tests=(f"{WHOLE}::test_public_images_that_are_private_too_are_refused",))
def public_images_not_compared(patch: MonkeyPatch) -> None:
    patch.setattr("sfumato.tune.session.shared_images", lambda first, second: [])


@fault(
    "a-search-begins-unpaid", tests=(f"{WHOLE}::test_a_search_over_the_cap_is_refused_with_nothing_recorded",)
)
def a_search_begins_unpaid(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.ledger.ledger:Ledger.begin",
        "if not record.finished and not record.parent:",
        "if False:",
    )


@fault(
    "losers-may-go-out",
    tests=(f"{WHOLE}::test_random_stopping_lets_out_the_best_trial_and_nothing_of_the_others",),
)
def losers_may_go_out(patch: MonkeyPatch) -> None:
    patch.setattr("sfumato.tune.outcome._remove_losers", lambda trials, best: None)
