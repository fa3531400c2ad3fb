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
