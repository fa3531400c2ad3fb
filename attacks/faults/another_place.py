"""Planted faults in releases that are made for another place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

TESTS = "cli/test_adapt.py"
KNOWN = f"{TESTS}::test_images_that_the_model_was_trained_on_are_refused_by_their_content"


@fault("adapted-to-training-images", tests=(KNOWN,))
def adapted_to_training_images(patch: MonkeyPatch) -> None:
    """A number without noise is computed from protected images, and called post-processing."""
    patch.setattr("sfumato.release.another_place.were_trained_on", lambda run, released, image_ids: False)


@fault("unknown-taken-for-apart", tests=(KNOWN,))
def unknown_taken_for_apart(patch: MonkeyPatch) -> None:
    """Where nothing knows the training images, nobody is told that nobody checked."""
    rewrite(patch, "sfumato.release.another_place:check_apart", "shared is not None", "True")


@fault(
    "place-unmentioned", tests=(f"{TESTS}::test_every_file_of_the_new_release_says_whom_it_does_not_protect",)
)
def place_unmentioned(patch: MonkeyPatch) -> None:
    """The new release has the old statement, as if nobody else's images had entered it."""
    patch.setattr("sfumato.release.another_place.sentence", lambda classes, place, privacy: "")
