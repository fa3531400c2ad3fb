"""Planted faults where an image has any number of findings."""

from __future__ import annotations

from planting import fault, rewrite

READING, LOSSES, RUN = "data/test_findings.py", "training/test_finding_losses.py", "run/test_findings_run.py"


@fault(
    "findings-of-the-rows",
    tests=(f"{READING}::test_no_image_decides_that_there_are_several_findings_or_which",),
)
def findings_of_the_rows(patch):
    """A label such as a|b becomes a class that one image made exist."""
    from sfumato.data.readers import manifest

    patch.setattr(manifest, "refuse_several", lambda labels: None)


@fault(
    "finding-of-a-stranger",
    tests=(f"{READING}::test_no_image_decides_that_there_are_several_findings_or_which",),
)
def finding_of_a_stranger(patch):
    """A finding that was not declared is left out without a word."""
    rewrite(patch, "sfumato.data.readers.findings:Findings.of_row", "if name not in self.names:", "if False:")


@fault("uncertain-is-absent", tests=(f"{READING}::test_what_is_not_clear_is_refused",))
def uncertain_is_absent(patch):
    """Whatever is not 1 counts as 0."""
    from sfumato.data.readers import findings

    cells = {"0": False, "0.0": False, "1": True, "1.0": True, "": False, "-1": False}
    patch.setattr(findings, "_CELLS", cells)


@fault(
    "same-units-with-other-findings", tests=(f"{READING}::test_the_checksum_of_units_tells_findings_apart",)
)
def same_units_with_other_findings(patch):
    """A run goes on with other findings of the same images."""
    import numpy as np

    from sfumato.training import inputs

    patch.setattr(inputs, "_label_numbers", lambda data: np.zeros(len(data), dtype=np.int64))


@fault("weights-left-out-of-the-residual", tests=(f"{LOSSES}::test_the_closed_form_is_autograd_row_by_row",))
def weights_left_out_of_the_residual(patch):
    """The closed form takes another gradient than the loss has."""
    from sfumato.training.losses import BinaryCrossEntropy

    patch.setattr(BinaryCrossEntropy, "residual", lambda self, outputs, targets: outputs.sigmoid() - targets)


@fault(
    "findings-not-clipped", tests=(f"{LOSSES}::test_a_row_moves_the_closed_form_by_at_most_the_clip_norm",)
)
def findings_not_clipped(patch):
    """The norm of a row is that of its largest finding."""
    rewrite(
        patch,
        "sfumato.training.head:LinearHead._share",
        "residual.double().square().sum(1)",
        "residual.double().square().amax(1)",
    )


@fault(
    "doctor-with-one-class",
    tests=(f"{LOSSES}::test_the_doctor_checks_with_the_loss_and_the_targets_of_findings",),
)
def doctor_with_one_class(patch):
    """The engine is compared under cross-entropy, whatever the run trains with."""
    rewrite(
        patch,
        "sfumato.doctor.gradient_check:check_engine",
        "RowGradients.of(model, inputs, loss, targets)",
        "RowGradients.of(model, inputs, None)",
    )


@fault(
    "findings-as-soft-labels",
    tests=(f"{RUN}::test_the_loss_follows_from_the_labels_and_one_that_does_not_fit_is_refused",),
)
def findings_as_soft_labels(patch):
    """PyTorch's cross-entropy takes a matrix for probabilities of classes."""
    rewrite(
        patch,
        "sfumato.run.task:with_task_settings",
        "(loss == OF_FINDINGS) != train.multi_label",
        "False",
    )


@fault("findings-compete", tests=(f"{RUN}::test_a_run_learns_findings_and_its_release_says_so",))
def findings_compete(patch):
    """A released model gives the likeliest finding alone."""
    from sfumato.release.release import ReleasedModel

    patch.setattr(ReleasedModel, "task", "single-label")


@fault("finding-of-one", tests=(f"{READING}::test_findings_may_be_columns_of_0_and_1_marked_or_declared",))
def finding_of_one(patch):
    """A column that one unit made exist is published."""
    rewrite(
        patch, "sfumato.doctor.data_checks:_classes", "owners == 1", "owners == 1 and not train.multi_label"
    )
