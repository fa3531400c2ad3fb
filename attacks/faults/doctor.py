"""Planted faults in the checks of a model before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013


@fault("batch-norm-accepted", tests=("doctor/test_row_independence.py",))
def batch_norm_accepted(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.doctor.row_independence:_moved",
        "    return not (first - second).abs().max().item() <= tolerance.outputs * scale\n",
        "    return False\n",
    )


@fault("only-the-last-row-disturbed", tests=("doctor/test_row_independence.py",))
def only_the_last_row_disturbed(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.doctor.row_independence:check_independence",
        "    for variant in VARIANTS:\n",
        "    examination.compare(Variant('another example changes', tuple(range(7)), replaced=(6,)))\n"
        "    return examination.drawing\n    for variant in VARIANTS:\n",
    )


@fault("probe-smaller-than-training", tests=("doctor/test_row_independence.py",))
def probe_smaller_than_training(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.doctor.row_independence:check_independence",
        "    if num_rows > NUM_ROWS:\n",
        "    if False:\n",
    )


@fault("state-between-passes-accepted", tests=("doctor/test_model_checks.py",))
def state_between_passes_accepted(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.doctor.row_independence:_Examination._repeat",
        "        if _moved(self.plain, outputs, self.tolerance):\n",
        "        if False:\n",
    )


@fault("changed-weights-accepted", tests=("doctor/test_model_checks.py",))
def changed_weights_accepted(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.doctor.row_independence:_Examination.finish",
        "            if name in parameters:\n                raise changes_weights(name)\n",
        "            if name in parameters:\n                return\n",
    )


@fault("zero-head-hides-the-rest", tests=("doctor/test_row_independence.py",))
def zero_head_hides_the_rest(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.doctor.probing:probed",
        "                if value.requires_grad and not data.any():\n",
        "                if False:\n",
    )


@fault("tolerance-of-the-whole", tests=("doctor/test_gradient_check.py",))
def tolerance_of_the_whole(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.doctor.gradient_check:RowGradients.compare",
        "            if not error <= limit * gradient_norm + floor:\n",
        "            if not error <= limit * self.clip_norm + floor:\n",
    )


@fault("units-not-compared-between-batches", tests=("doctor/test_gradient_check.py",))
def units_not_compared_between_batches(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.doctor.model_checks:_checked",
        "        _check_with_tolerances(gradients, model, inputs)\n",
        "",
    )


@fault("doctor-without-the-recipes-options", tests=("doctor/test_doctor_command.py",))
def doctor_without_the_recipes_options(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.cli.doctor:_run_findings",
        "    splits = splits or _blank_images(recipe)\n",
        "    splits = splits or _blank_images(recipe)\n    recipe.model.options.clear()\n",
    )
