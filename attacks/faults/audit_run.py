"""Planted faults around the audit of one run: in its canaries, in what it keeps, in what it must report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

RUN = "audit/test_audit_run.py"
CANARIES = "training/test_canaries.py"
PROJECTIONS = "audit/test_projections.py"
HONEST = f"{RUN}::test_an_honest_run_is_no_violation"


@fault("audited-run-with-half-noise", tests=(HONEST,))
def audited_run_with_half_noise(patch: MonkeyPatch) -> None:
    """The mechanism adds half of what is accounted: the audit of a run reports it."""
    import sfumato.noise

    add_noise = sfumato.noise.add_noise

    def half(total, *, stddev, **rest):
        return add_noise(total, stddev=stddev / 2, **rest)

    patch.setattr(sfumato.noise, "add_noise", half)


@fault(
    "canary-beyond-the-clip",
    tests=(
        f"{CANARIES}::test_a_sum_is_that_of_the_real_units_and_the_vectors_of_the_canaries_that_are_in",
        HONEST,
    ),
)
def canary_beyond_the_clip(patch: MonkeyPatch) -> None:
    """A canary moves the sum further than the noise is made for: the audit of a run reports it."""
    rewrite(patch, "sfumato.training.canaries:Directions.added", "length * (1 - ROUNDING)", "20 * length")


@fault(
    "canary-coins-loaded",
    tests=(f"{CANARIES}::test_coins_are_fair_and_independent_of_everything_else_that_follows_from_the_key",),
)
def canary_coins_loaded(patch: MonkeyPatch) -> None:
    """More canaries are in than out, which the theorems do not allow."""
    rewrite(patch, "sfumato.training.canaries:toss_coins", "drawn < 128", "drawn < 160")


@fault(
    "canaries-that-are-out-take-part",
    tests=(f"{CANARIES}::test_a_sum_is_that_of_the_real_units_and_the_vectors_of_the_canaries_that_are_in",),
)
def canaries_that_are_out_take_part(patch: MonkeyPatch) -> None:
    """The coins decide nothing, and the audit would find nothing whatever the noise."""
    rewrite(patch, "sfumato.training.canaries:divide", "canaries[members[canaries]]", "canaries")


@fault(
    "canaries-in-the-log-of-real-units",
    tests=(f"{CANARIES}::test_canaries_with_images_are_clipped_and_added_as_units_of_their_own",),
)
def canaries_in_the_log(patch: MonkeyPatch) -> None:
    """Losses and norms that are kept mix canaries with the real units."""
    rewrite(
        patch,
        "sfumato.training.canaries:WithInputCanaries.__call__",
        "replace(total + self.canaries(canaries, step), norms=total.norms, losses=total.losses)",
        "total + self.canaries(canaries, step)",
    )


@fault(
    "canary-scores-forgotten-on-resume",
    tests=(f"{RUN}::test_kept_projections_are_those_of_the_noisy_sums_through_an_interruption",),
)
def canary_scores_forgotten(patch: MonkeyPatch) -> None:
    """A resumed run begins its projections anew, with zeros for the steps before."""
    rewrite(
        patch,
        "sfumato.run.canaries:Projections.append",
        "file.seek(self.num_kept * self._row_bytes)",
        "file.truncate(0); file.seek(self.num_kept * self._row_bytes)",
    )


@fault("canary-key-not-compared", tests=(f"{RUN}::test_a_run_goes_on_with_its_own_canaries_or_not_at_all",))
def canary_key_not_compared(patch: MonkeyPatch) -> None:
    """A run goes on with the key that it finds, whosever it is."""
    rewrite(
        patch,
        "sfumato.run.canaries:Projections.restored",
        'state.values.get("canaries") != _checksum(key)',
        "False",
    )


@fault(
    "canary-key-for-everybody", tests=(f"{RUN}::test_the_key_is_the_owners_and_nothing_of_it_is_released",)
)
def canary_key_for_everybody(patch: MonkeyPatch) -> None:
    """Whoever reads the file knows which canaries were in, before any audit."""
    rewrite(patch, "sfumato.release.run_folder:RunFolder.keep_canary_key", "0o600", "0o644")


@fault(
    "audited-noise-bounded-on-the-wrong-side",
    tests=(f"{PROJECTIONS}::test_the_noise_is_never_measured_too_small",),
)
def audited_noise_bounded_on_the_wrong_side(patch: MonkeyPatch) -> None:
    """Noise that is as planned is called too small nearly always."""
    rewrite(
        patch,
        "sfumato.audit.projections:measured_noise",
        "chi2.ppf(failure_probability, count)",
        "chi2.isf(failure_probability, count)",
    )


@fault(
    "one-run-curve-without-delta",
    tests=(f"{PROJECTIONS}::test_the_bound_of_a_plan_exceeds_the_truth_no_more_often_than_it_says",),
)
def one_run_curve_without_delta(patch: MonkeyPatch) -> None:
    """The trade-off curve of pure differential privacy, which no noise multiplier has."""
    rewrite(
        patch,
        "sfumato.audit.one_run_sampled:_least_false",
        "np.array(_deltas(plan.events()))",
        "0.0 * np.array(_deltas(plan.events()))",
    )


@fault(
    "audited-rate-without-its-error",
    tests=(f"{PROJECTIONS}::test_the_rate_is_not_measured_above_the_plans_and_a_doubled_one_is_seen",),
)
def audited_rate_without_its_error(patch: MonkeyPatch) -> None:
    """A rate that is seen a little above the plan's by chance is called a violation."""
    rewrite(patch, "sfumato.audit.projections:measured_rate", "freedom)) * error", "freedom)) * 0")


@fault(
    "repeated-noise-not-seen",
    tests=(f"{PROJECTIONS}::test_noise_that_comes_twice_is_seen_and_noise_that_does_not_is_not",),
)
def repeated_noise_not_seen(patch: MonkeyPatch) -> None:
    """Only the step right before is compared."""
    rewrite(patch, "sfumato.audit.projections:repeated_noise", "distances.min()", "distances[-1]")


@fault(
    "repeated-noise-by-two-draws",
    tests=(f"{PROJECTIONS}::test_real_gradients_that_follow_earlier_noise_are_not_taken_for_a_repetition",),
)
def repeated_noise_by_two_draws(patch: MonkeyPatch) -> None:
    """Real gradients that react to the noise of an earlier step are called its repetition."""
    rewrite(
        patch,
        "sfumato.audit.projections:repeated_noise",
        "* noise_multiplier**2",
        "* 2 * noise_multiplier**2",
    )


@fault(
    "audited-rate-whatever-follows-canaries",
    tests=(f"{PROJECTIONS}::test_the_rate_counts_only_where_no_real_gradient_can_follow_a_canary",),
)
def audited_rate_whatever_follows_canaries(patch: MonkeyPatch) -> None:
    """A sound run whose real gradients follow its canaries is called a violation."""
    rewrite(patch, "sfumato.audit.projections:measure", "rate_lower if silent else None", "rate_lower")


@fault(
    "optimised-canaries-from-the-private-centre",
    tests=(f"{RUN}::test_optimised_canaries_are_made_once_for_public_features_and_kept",),
)
def optimised_canaries_from_the_private_centre(patch):
    """Canaries follow from the mean of the private images, and not from public features alone."""
    rewrite(
        patch, "sfumato.run.canaries:images_of_canaries", "_patches_of(model), drawn", "model.rows, drawn"
    )
