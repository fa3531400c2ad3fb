"""Planted faults between the plan, its components and its record, and in sums that round too often."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

COMPONENTS = "privacy/test_components.py"


@fault(
    "thousands-in-one-call",
    tests=("gradients/test_precision.py::test_a_microbatch_of_thousands_is_added_a_few_at_a_time",),
)
def thousands_in_one_call(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.piece:summed_by_parts",
        "if segments.num_units <= UNITS_PER_CALL:",
        "if True:",
    )


@fault(
    "patient-shares-in-float32",
    tests=("training/test_head.py::test_no_rounding_lets_a_patients_rows_add_up_to_more_than_one",),
)
def patient_shares_in_float32(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.training.head:private_mean",
        "shares /= torch.bincount(unit_index)[unit_index]",
        "shares = 1 / torch.bincount(unit_index)[unit_index]",
    )
