"""Planted faults in how scans are read: what a header says comes out, or one image decides for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

DICOM, DEPTHS, LAYOUTS = "data/test_dicom.py", "data/test_depths.py", "data/test_layouts.py"
DOCTOR = "doctor/test_doctor_command.py"
TOLD = f"{DICOM}::test_whatever_is_wrong_with_a_file_is_told_by_its_name_alone"


@fault("dicom-error-quotes", tests=(TOLD,))
def dicom_error_quotes(patch: MonkeyPatch) -> None:
    """pydicom's own words, which hold values of the header."""
    rewrite(patch, "sfumato.data.readers.dicom:_named_only", "({type(error).__name__})", "({error})")


@fault("dicom-error-chained", tests=(TOLD,))
def dicom_error_chained(patch: MonkeyPatch) -> None:
    """The error that quotes the header hangs on to the one that is shown, for whoever logs tracebacks."""
    rewrite(
        patch,
        "sfumato.data.readers.dicom:_named_only",
        "problem = corrupt(path,",
        "raise corrupt(path, 'cannot be read') from error\n        problem = corrupt(path,",
    )


@fault(
    "window-is-a-new-image",
    tests=(f"{DICOM}::test_the_same_image_remains_the_same_under_every_window_syntax_and_depth",),
)
def window_is_a_new_image(patch: MonkeyPatch) -> None:
    """The content id is made of the picture: with another window the ledger forgets what was spent."""
    rewrite(
        patch,
        "sfumato.data.readers.decode:decode_files",
        "pixel_id(identified_by)",
        "pixel_id(np.asarray(image))",
    )


@fault(
    "range-of-the-image",
    tests=(
        f"{DICOM}::test_without_any_window_the_full_range_of_the_stored_bits_is_shown_whatever_the_pixels_are",
    ),
)
def range_of_the_image(patch: MonkeyPatch) -> None:
    """Stretched to what the image happens to hold."""
    rewrite(
        patch,
        "sfumato.data.readers.dicom:_grey",
        "to_bytes(values, *_full_range(dataset))",
        "to_bytes(values, values.min(), values.max())",
    )


@fault(
    "patients-shown",
    tests=(f"{DICOM}::test_a_doctors_example_shows_a_number_in_place_of_a_name_from_a_header",),
)
def patients_shown(patch: MonkeyPatch) -> None:
    rewrite(
        patch, "sfumato.data.survey:survey", "entry.patient if in_file_names else number", "entry.patient"
    )


@fault(
    "unnamed-patient-accepted",
    tests=(f"{DICOM}::test_patients_are_those_of_the_headers_without_any_expression",),
)
def unnamed_patient_accepted(patch: MonkeyPatch) -> None:
    """Files without a PatientID are all one patient called nothing."""
    rewrite(
        patch,
        "sfumato.data.readers.listing:Listing.with_dicom_patients",
        "zip(self.entries, patients, strict=True) if not patient",
        "zip(self.entries, patients, strict=True) if False",
    )


@fault("keyless-patient-hash", tests=("run/test_dicom_privacy.py",))
def keyless_patient_hash(patch: MonkeyPatch) -> None:
    """Whoever guesses a PatientID can look it up in the ledger."""
    rewrite(
        patch,
        "sfumato.ledger.links:_tag",
        'digest = hmac.new(key, b"sfumato patient " + one_spelling(name).encode(), hashlib.sha256).digest()',
        "digest = hashlib.sha256(one_spelling(name).encode()).digest()",
    )


@fault("inverted-forgotten", tests=(f"{DICOM}::test_rescaling_and_the_headers_window_are_those_of_pydicom",))
def inverted_forgotten(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.data.readers.dicom:_grey", '== "MONOCHROME1"', '== "MONOCHROME0"')


@fault(
    "bits-cut",
    tests=(f"{DEPTHS}::test_what_does_not_fit_into_the_bits_is_refused_and_what_leaves_the_range_is_cut",),
)
def bits_cut(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.data.readers.rendering:Rendering.sixteen_to_eight",
        "if int(values.max()) >= 2**bits:",
        "if False:",
    )


@fault(
    "constants-not-released",
    tests=(f"{DEPTHS}::test_the_release_keeps_the_constants_and_predict_decodes_by_them",),
)
def constants_not_released(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.run.publish:model_config", "if rendering:", "if False:")


@fault("splits-by-exact-name", tests=(LAYOUTS,))
def splits_by_exact_name(patch: MonkeyPatch) -> None:
    """Train and Test become classes."""
    rewrite(
        patch,
        "sfumato.data.readers.splits:split_folders",
        "SPLIT_NAMES.get(name.lower())",
        "name if name in SPLITS else None",
    )


@fault(
    "file-names-as-patients",
    tests=(f"{DOCTOR}::test_an_expression_that_marks_whole_file_names_is_warned_of",),
)
def file_names_as_patients(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.doctor.plausibility:_patients", "if num_patients == len(train):", "if False:")


@fault("deflated-bomb", tests=(f"{DICOM}::test_a_deflated_bomb_is_refused_before_it_fills_the_memory",))
def deflated_bomb(patch: MonkeyPatch) -> None:
    patch.setattr("sfumato.data.readers.dicom._check_inflated", lambda path, file: None)


@fault("decoders-heard", tests=(f"{DICOM}::test_what_a_decoder_logs_of_a_broken_picture_is_not_heard",))
def decoders_heard(patch: MonkeyPatch) -> None:
    """What decoders log of a broken picture reaches the terminal."""
    patch.setattr("sfumato.data.readers.dicom.silence", lambda: None)


@fault(
    "first-to-end-opens",
    tests=(f"{DICOM}::test_while_one_thread_reads_another_that_has_done_so_opens_nothing",),
)
def first_to_end_opens(patch: MonkeyPatch) -> None:
    """The filters of warnings belong to each reader alone: whoever ends restores them for all."""
    from sfumato.data.readers import decode

    patch.setattr(decode, "_strict_readers", decode._strict_filters)
