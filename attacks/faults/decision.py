"""Planted faults in what is released besides the steps: class counts, score histograms, and their price."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

COUNTS = "training/test_private_counts.py"
RUN = "run/test_decision_run.py"


@fault(
    "class-counts-uncounted",
    tests=(f"{RUN}::test_what_a_run_releases_is_in_its_plan_its_ledger_and_its_statement",),
)
def class_counts_uncounted(patch: MonkeyPatch) -> None:
    """The plan knows nothing of the releases, and the guard is asleep: ε leaves out what they tell."""
    patch.setattr("sfumato.run.planning.private_releases", lambda recipe: ())
    patch.setattr("sfumato.run.decision.check_counted", lambda plan, releases: None)


@fault(
    "uncounted-release-allowed",
    tests=(f"{COUNTS}::test_a_release_that_the_plan_does_not_count_is_refused",),
)
def uncounted_release_allowed(patch: MonkeyPatch) -> None:
    """One event pays for two releases of equal noise."""
    rewrite(
        patch,
        "sfumato.training.private_counts:check_counted",
        "missing = wanted - Counter(plan.extra_events)",
        "missing = set(wanted) - set(plan.extra_events)",
    )


@fault(
    "patients-counted-by-image",
    tests=(f"{COUNTS}::test_a_patient_moves_the_counts_by_at_most_one_however_many_images_they_have",),
)
def patients_counted_by_image(patch: MonkeyPatch) -> None:
    """A patient with thirty images counts thirty times, and the noise is for one."""
    rewrite(
        patch,
        "sfumato.training.private_counts:_column_counts",
        "(_WHOLE // sizes)",
        "torch.full_like(sizes, _WHOLE)",
    )


@fault(
    "shares-in-floating-point",
    tests=(f"{COUNTS}::test_what_a_patient_moves_is_exact_whoever_else_is_counted",),
)
def shares_in_floating_point(patch: MonkeyPatch) -> None:
    """Thirds are added up in float64: one unit shifts how the sums of the others are rounded."""
    place = "sfumato.training.private_counts:_column_counts"
    rewrite(patch, place, "len(units.rows), dtype=torch.int64", "len(units.rows), dtype=torch.float64")
    rewrite(patch, place, "num_cells, dtype=torch.int64", "num_cells, dtype=torch.float64")
    rewrite(patch, place, "(_WHOLE // sizes)", "(_WHOLE / sizes.double())")


@fault("half-noise-counts", tests=(f"{COUNTS}::test_the_noise_of_the_counts_has_the_stated_scale",))
def half_noise_counts(patch: MonkeyPatch) -> None:
    """Counts are released with half the noise that is accounted."""
    rewrite(
        patch,
        "sfumato.training.private_counts:noisy_counts",
        "stddev=release.noise_multiplier",
        "stddev=release.noise_multiplier / 2",
    )


@fault("counts-before-spending", tests=(f"{RUN}::test_spending_is_on_record_before_anything_is_counted",))
def counts_before_spending(patch: MonkeyPatch) -> None:
    """Classes are counted before the ledger knows: a run killed then has spent nothing on record."""
    rewrite(patch, "sfumato.run.decision:Released.release_class_counts", "spend(1)", "pass")


@fault(
    "threshold-drawn-again",
    tests=(f"{RUN}::test_a_threshold_is_drawn_once_even_if_the_records_are_written_anew",),
)
def threshold_drawn_again(patch: MonkeyPatch) -> None:
    """Writing the records anew draws fresh noise: averages of many draws tell the histogram."""
    rewrite(
        patch,
        "sfumato.run.decision:Released.release_score_histogram",
        " or self.score_histogram is not None",
        "",
    )
    rewrite(patch, "sfumato.run.decision:Released.release_score_histogram", "spend(plan.num_steps)", "pass")
    rewrite(patch, "sfumato.ledger.account:Account._check_open", "if self.record.finished:", "if False:")


@fault(
    "weights-after-the-clip",
    tests=(
        "training/test_decision.py::test_weighted_sums_are_equal_by_the_engine_in_closed_form_and_by_autograd",
    ),
)
def weights_after_the_clip(patch: MonkeyPatch) -> None:
    """A heavy class is weighted once its rows are clipped: one row moves the sum by more than the bound."""
    rewrite(
        patch,
        "sfumato.training.head:SoftmaxRegression._residual",
        "return residual * row_weights[:, None], losses * row_weights",
        "return residual, losses * row_weights",
    )
    rewrite(
        patch,
        "sfumato.training.head:LinearHead._share",
        "residual = _finite(residual)",
        "residual = _finite(residual) * self._class_weights[targets[piece]][:, None]",
    )


@fault(
    "threshold-on-private-validation",
    tests=(f"{RUN}::test_public_validation_images_choose_threshold_and_temperature_for_nothing",),
)
def threshold_on_private_validation(patch: MonkeyPatch) -> None:
    """Validation images choose threshold and temperature whether or not they are public."""
    rewrite(
        patch,
        "sfumato.run.decision:Released.decision",
        "if val is None or not prepared.recipe.data.val_is_public:",
        "if val is None:",
    )


@fault(
    "findings-with-the-noise-of-one",
    tests=(
        f"{COUNTS}::test_findings_are_counted_each_by_itself_and_the_noise_grows_with_the_root_of_their_number",
    ),
)
def findings_with_the_noise_of_one(patch: MonkeyPatch) -> None:
    """Counts of fourteen findings have the noise of one, though a unit may have them all."""
    rewrite(
        patch,
        "sfumato.training.private_counts:noisy_counts",
        "1.0 if cells.ndim == 1 else",
        "1.0 if True else",
    )
