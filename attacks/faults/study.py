"""Planted faults in studies: each would treat private images as if they were public."""

from __future__ import annotations

from planting import fault, rewrite

TOLD = "study/test_study_commands.py::test_training_images_are_used_only_when_told_and_then_it_says_so"
COUNTED = (
    "study/test_reproduction.py::"
    "test_runs_on_a_folder_count_in_the_users_ledger_and_those_on_public_sets_do_not"
)
COMPARED = "study/test_study_commands.py::test_private_and_ordinary_runs_are_compared_class_by_class"


@fault("study-of-training-images-by-default", tests=(TOLD,))
def training_images_by_default(patch):
    """A study of a run looks at its training images although nobody told it to."""
    rewrite(patch, "sfumato.study.subjects:load_subject", 'on or "test"', 'on or "train"')


@fault("study-without-notice", tests=(TOLD,))
def without_notice(patch):
    """Figures of training images carry no word about it."""
    rewrite(
        patch,
        "sfumato.study.subjects:_of_run",
        "sensitive = is_sensitive(",
        "sensitive = False and is_sensitive(",
    )


@fault("fairness-without-notice", tests=(COMPARED,))
def fairness_without_notice(patch):
    """Scores on training images, class by class, as if they were public."""
    rewrite(
        patch,
        "sfumato.study.fairness:gather_answers",
        "any(answers.sensitive",
        "any(False and answers.sensitive",
    )


@fault("reproductions-on-folders-uncounted", tests=(COUNTED,))
def reproductions_on_folders_uncounted(patch):
    rewrite(
        patch,
        "sfumato.study.reproduction:Reproduction.run",
        "of_public_images if is_public else of_the_user",
        "of_public_images",
    )
