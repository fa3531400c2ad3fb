"""Planted faults in the statistics of an audit: each would let it claim more than was found."""

from __future__ import annotations

from planting import fault, rewrite

VALID = "audit/test_bounds.py::test_a_bound_exceeds_the_truth_no_more_often_than_it_says"
BINARY = "audit/test_bounds.py::test_bounds_hold_on_scores_of_two_values"
NULL = "audit/test_bounds.py::test_gdp_shows_nothing_on_scores_that_are_alike_or_the_wrong_way_round"
TOGETHER = "audit/test_bounds.py::test_bounds_at_all_candidates_hold_together_with_ties_too"
DELTA = "audit/test_bounds.py::test_delta_is_taken_off_before_anything_is_claimed"
ONE_RUN = "audit/test_one_run.py::test_a_bound_exceeds_the_truth_no_more_often_than_it_says"
NAMED = "audit/test_one_run.py::test_an_output_that_names_everybody_with_probability_delta_is_allowed"
TIES = "audit/test_one_run.py::test_tied_scores_do_not_tell_who_is_a_member"
BEST_NUMBER = (
    "audit/test_one_run.py::test_the_best_number_of_guesses_without_correction_exceeds_the_truth_too_often"
)

CLUSTERS = "audit/test_mechanism.py::test_the_bound_holds_however_guesses_of_a_training_depend_on_each_other"
FORETOLD = "audit/test_mechanism.py::test_randomness_of_units_that_can_be_foretold_is_a_violation"


@fault("audit-both-rates-at-full-miss", tests=(BINARY,))
def both_rates_at_full_miss(patch):
    """Each of the two rates' bounds may miss as often as both together should."""
    rewrite(patch, "sfumato.audit.thresholds:bounds_at", "failure_probability / 2", "failure_probability")


@fault("audit-threshold-on-the-same-half", tests=(NULL, VALID))
def threshold_on_the_same_half(patch):
    """The half that chose the threshold also judges it."""
    rewrite(
        patch,
        "sfumato.audit.thresholds:choose_threshold",
        "bounds_at(judged_in, judged_out,",
        "bounds_at(tried_in, tried_out,",
    )


@fault("audit-thresholds-uncorrected", tests=(TOGETHER,))
def thresholds_uncorrected(patch):
    """The best of all candidates at the confidence of one."""
    rewrite(
        patch,
        "sfumato.audit.thresholds:simultaneous_bounds",
        "failure_probability / (2 * len(thresholds))",
        "failure_probability / 2",
    )


@fault("audit-delta-dropped", tests=(DELTA,))
def delta_dropped(patch):
    """ε as if δ were 0."""
    rewrite(patch, "sfumato.audit.bounds:epsilon_of_errors", "1 - fnr - delta", "1 - fnr")


@fault("audit-mu-turned-round", tests=(NULL,))
def mu_turned_round(patch):
    """A test with large errors is taken for a good one the other way round, by upper bounds of its rates."""
    rewrite(
        patch,
        "sfumato.audit.bounds:mu_of_errors",
        "-ndtri(fpr) - ndtri(fnr)",
        "np.abs(np.nan_to_num(-ndtri(fpr) - ndtri(fnr), neginf=0.0))",
    )


@fault("audit-two-sided-t", tests=("audit/test_bounds.py::test_the_bound_for_gaussian_scores_is_exact",))
def two_sided_t(patch):
    """The bound of a two-sided interval is given with the interval's confidence."""
    rewrite(
        patch,
        "sfumato.audit.gaussian:gaussian_scores_bound",
        "scores_in, scores_out, failure_probability)",
        "scores_in, scores_out, failure_probability / 2)",
    )


@fault("audit-one-run-delta-dropped", tests=(NAMED,))
def one_run_delta_dropped(patch):
    """Steinke et al.'s term for δ is left out."""
    rewrite(patch, "sfumato.audit.one_run:one_run_p_value", "if delta == 0:", "if True:")


@fault("audit-guesses-uncorrected", tests=(BEST_NUMBER, ONE_RUN))
def guesses_uncorrected(patch):
    """The best number of guesses at the confidence of one."""
    rewrite(
        patch,
        "sfumato.audit.one_run:_best_bound",
        "failure_probability / len(numbers)",
        "failure_probability",
    )


@fault("audit-ties-by-membership", tests=(TIES,))
def ties_by_membership(patch):
    """Among tied canaries the members come out on top."""
    rewrite(patch, "sfumato.audit.one_run:count_correct", "(~members, np", "(members, np")


@fault(
    "audit-gdp-recursion-too-steep",
    tests=("audit/test_one_run.py::test_both_theorems_allow_what_independent_gaussians_do",),
)
def gdp_recursion_too_steep(patch):
    """The recursion forces more probability than the theorem does."""
    rewrite(
        patch, "sfumato.audit.one_run:curve_refuted", "count / (num_guesses", "(count + 1) / (num_guesses"
    )


@fault("audit-canaries-of-a-training-as-independent", tests=(CLUSTERS,))
def canaries_as_independent(patch):
    """Every guess as a trial of its own: sharp, and no bound if one training's noise is everybody's."""
    rewrite(
        patch,
        "sfumato.audit.mechanism_size:total_error_above",
        "if canaries == 1:\n",
        "if True:\n        shares = np.repeat(shares, canaries)\n",
    )


@fault("audit-bets-won-too-early", tests=(CLUSTERS,))
def bets_won_too_early(patch):
    rewrite(
        patch,
        "sfumato.audit.intervals:upper_mean",
        "math.log(1 / failure_probability)",
        "math.log(1 / failure_probability) / 4",
    )


@fault("audit-canaries-last", tests=(FORETOLD,))
def canaries_last(patch):
    """Nobody's number depends on who is there, so that seeded draws of units go unnoticed."""
    import torch

    from sfumato.audit.pipeline import Pipeline
    from sfumato.training.inputs import Units

    original = Pipeline.units

    def units(self, present):
        data = original(self, present).data
        return Units.images(data.select(torch.arange(len(data)).flip(0)))

    patch.setattr(Pipeline, "units", units)


@fault(
    "audit-scores-of-any-code",
    tests=("audit/test_mechanism.py::test_scores_of_other_code_are_not_mixed_in",),
)
def audit_scores_of_any_code(patch):
    """An audit goes on with scores that another version of the code has left."""
    rewrite(patch, "sfumato.audit.score_file:ScoreFile._check", "if changed:", "if False:")


@fault(
    "audit-rows-do-not-share-failures",
    tests=("audit/test_paper.py::test_rows_of_one_table_share_the_failures_of_its_verdict",),
)
def audit_rows_do_not_share_failures(patch):
    """Each row of a table is a verdict at the whole table's confidence."""
    rewrite(patch, "sfumato.audit.paper_results:table_row", "(1 - CONFIDENCE) / num_rows", "(1 - CONFIDENCE)")
