"""Planted faults in a run: values that change on the way, and decisions by scores that nobody counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

RESOLVE = "run/test_resolve.py"


@fault(
    "constant-rate-follows-scores",
    tests=("run/test_run.py::test_scores_on_held_out_private_images_do_not_change_a_constant_learning_rate",),
)
def constant_rate_follows_scores(patch: MonkeyPatch) -> None:
    """Stagnating scores cut the rate whatever the schedule; nobody asked whose images they are."""
    rewrite(
        patch,
        "sfumato.training.optimizers:Schedule.__init__",
        'settings.name == "plateau" and',
        'settings.name in ("plateau", "constant") and',
    )


@fault("steered-by-private-images", tests=("run/test_run.py",))
def steered_by_private_images(patch: MonkeyPatch) -> None:
    """Plateau and early stopping are allowed whatever the validation images are."""
    patch.setattr("sfumato.run.resolve.check_steering", lambda recipe, splits: None)


@fault(
    "resolved-not-compared",
    tests=(f"{RESOLVE}::test_a_run_goes_on_with_the_values_that_it_began_with_or_not_at_all",),
)
def resolved_not_compared(patch: MonkeyPatch) -> None:
    """A resumed run takes whatever is resolved now."""
    rewrite(patch, "sfumato.run.resolve:record_resolved", "if changed:", "if False:")


@fault("schedule-begins-anew", tests=("training/test_schedules.py",))
def schedule_begins_anew(patch: MonkeyPatch) -> None:
    """A resumed run forgets where its learning rate was."""
    from sfumato.training.optimizers import Schedule

    patch.setattr(Schedule, "load_state_dict", lambda self, saved: None)


@fault(
    "fingerprint-published",
    tests=(
        "run/test_derived_values.py::"
        "test_an_odd_image_in_the_place_of_another_changes_nothing_that_is_published",
    ),
)
def fingerprint_published(patch):
    rewrite(
        patch,
        "sfumato.run.filing:filing_of",
        "run_id=history.run_id",
        "run_id=history.fingerprint[:16]",
    )


@fault("unspent-plan-released", tests=("run/test_own_release.py",))
def unspent_plan_released(patch):
    rewrite(
        patch,
        "sfumato.run.own_release:_check_account",
        "record.reserved_steps < plan.num_steps",
        "record.reserved_steps < 0",
    )


@fault("another-plan-released", tests=("run/test_own_release.py",))
def another_plan_released(patch):
    rewrite(
        patch,
        "sfumato.run.own_release:_check_account",
        "plan_values(record.plan) != plan_values(plan)",
        "record.plan is None",
    )


@fault("earlier-runs-forgotten", tests=("run/test_filing.py",))
def earlier_runs_forgotten(patch):
    rewrite(patch, "sfumato.run.filing:History.earlier", "earlier < 1", "earlier < 100")


@fault(
    "runs-without-a-name-forgotten",
    tests=("ledger/test_names.py::test_a_ledger_of_an_earlier_version_counts_its_runs_under_every_name",),
)
def runs_without_a_name_forgotten(patch):
    rewrite(patch, "sfumato.ledger.ledger:Ledger.records_named", "name IN (?1, '') OR ?1 = ''", "name = ?1")


@fault(
    "history-of-another-name",
    tests=("run/test_own_release.py::test_what_does_not_fit_together_is_refused_and_nothing_is_written",),
)
def history_of_another_name(patch):
    rewrite(patch, "sfumato.run.own_release:_check_name", 'known not in ("", data)', "False")


@fault("cross-validation-spends-unseen", tests=("run/test_estimator.py",))
def cross_validation_spends_unseen(patch):
    from sfumato.run import estimator

    patch.setattr(estimator, "_called_by_search", lambda: False)


@fault(
    "rescaled-images-are-new",
    tests=("run/test_estimator.py::test_a_second_fit_on_some_of_the_images_is_refused_unless_it_is_meant",),
)
def rescaled_images_are_new(patch):
    from sfumato.run import estimator

    patch.setattr(estimator, "raw_ids", lambda pixels: None)


@fault(
    "search-not-admitted",
    tests=("run/test_estimator.py::test_cross_validation_is_refused_before_anything_is_spent",),
)
def search_not_admitted(patch):
    rewrite(
        patch,
        "sfumato.run.estimator:PrivateImageClassifier._recipe",
        'given["privacy.uncounted_search"] = True',
        "pass",
    )


@fault("repeated-fits-unseen", tests=("run/test_estimator.py",))
def repeated_fits_unseen(patch):
    from sfumato.run import estimator

    patch.setattr(estimator, "_check_first", lambda ledger, data: None)
