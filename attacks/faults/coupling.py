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


COUNTED = f"{COMPONENTS}::test_a_file_counts_what_the_component_itself_counted"
CAPPED = f"{COMPONENTS}::test_the_ledger_holds_a_component_of_ones_own_to_its_cap"


@fault("record-counts-by-the-rate", tests=(COUNTED, CAPPED))
def record_counts_by_the_rate(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.privacy.records:RecordedScheme.event",
        "return replace(self.recorded_event, num_steps=num_steps * self.recorded_event.num_steps)",
        "return replace(release, sampling_rate=self.rate, num_steps=num_steps)",
    )


@fault("record-counts-noise-by-its-deviation", tests=(COUNTED, CAPPED))
def record_counts_noise_by_its_deviation(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.privacy.records:RecordedMechanism.event",
        "return self.release",
        "return replace(self.release, noise_multiplier=noise_multiplier)",
    )


@fault("record-by-the-first-step", tests=(COUNTED,))
def record_by_the_first_step(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.privacy.records:record_scheme",
        "one if per_step else event(num_steps)",
        "one",
    )


@fault("record-stands-for-other-plans", tests=(f"{COMPONENTS}::test_a_record_stands_for_no_other_plan",))
def record_stands_for_other_plans(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.privacy.records:RecordedScheme.event",
        "if release != self.release or num_steps > self.num_steps:",
        "if False:",
    )


OWN = "run/test_own_components.py"


@fault(
    "components-compared-by-name",
    tests=(f"{OWN}::test_a_resumed_run_must_bring_the_same_arguments_too",),
)
def components_compared_by_name(patch: MonkeyPatch) -> None:
    from sfumato.training import component_identity, components

    patch.setattr(components, "identity_of", component_identity._name)


@fault(
    "own-components-checked-in-the-first-step",
    tests=(f"{OWN}::test_what_a_step_would_refuse_is_refused_before_anything_is_written",),
)
def own_components_checked_in_the_first_step(patch: MonkeyPatch) -> None:
    from sfumato.run import prepare

    patch.setattr(prepare, "check_components", lambda *_: None)
