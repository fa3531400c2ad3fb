"""Planted faults where a hostile review found holes: people, weights, labels, and what can be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

SPELLINGS = "test_one_person_in_several_spellings_is_one_unit_in_training_and_in_the_ledger"


@fault("two-spellings-two-units", tests=(f"data/test_manifest.py::{SPELLINGS}",))
def two_spellings_two_units(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.data.readers.folder:_number_patients", "one_spelling(name)", "name")


@fault(
    "regrouped-on-resume",
    tests=("run/test_run.py::test_labels_and_patients_may_not_change_between_start_and_resume",),
)
def regrouped_on_resume(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.run.state:check_identity", 'saved["units"] != now["units"]', "False")


@fault("checksum-without-groups", tests=("run/test_state.py",))
def checksum_without_groups(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.training.inputs:Units.checksum", "columns.tobytes()", "columns[:2].tobytes()")


@fault(
    "callers-network-is-trained",
    tests=("run/test_run.py::test_a_callers_network_never_holds_steps_that_were_not_saved",),
)
def callers_network_is_trained(patch: MonkeyPatch) -> None:
    from sfumato.run import session

    patch.setattr(session, "training_copy", lambda model: model)


@fault(
    "own-weights-unmentioned",
    tests=("run/test_run.py::test_the_statement_says_what_an_own_network_brings_along",),
)
def own_weights_unmentioned(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.run.publish:stated_privacy", "prepared.resolved.custom_model", "False")


@fault(
    "steps-below-zero-imported", tests=("ledger/test_strangers.py::test_a_record_that_cannot_be_is_refused",)
)
def steps_below_zero_imported(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.ledger.receipt:read_receipt", "_Spending)", "dict)")


@fault(
    "any-noise-is-counted", tests=("ledger/test_strangers.py::test_a_plan_that_cannot_be_counted_is_refused",)
)
def any_noise_is_counted(patch: MonkeyPatch) -> None:
    from sfumato.accounting import events

    patch.setattr(events, "_countable", lambda noise: noise >= 0)


CHAIN = "run/test_ancestry.py"


@fault(
    "renamed-ancestor-accepted",
    tests=(f"{CHAIN}::test_images_behind_the_chain_are_recognised_under_any_name",),
)
def renamed_ancestor_accepted(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.run.provenance:check_ancestors",
        "in provenance.ancestors",
        "in provenance.ancestors[-1:-1]",
    )


@fault("unknown-ancestor-accepted", tests=(f"{CHAIN}::test_what_nothing_tells_of_must_be_declared",))
def unknown_ancestor_accepted(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.run.provenance:check_ancestors", "if not declared and", "if False and")


@fault("bare-file-forgotten", tests=(f"{CHAIN}::test_a_bare_file_is_remembered_as_unknown",))
def bare_file_forgotten(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.run.provenance:assess",
        "checkpoint.ancestors if counted else",
        "checkpoint.ancestors if counted or checkpoint.data is None else",
    )
