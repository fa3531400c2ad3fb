"""Planted faults in what is larger than memory: rows that were not drawn, images of other files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

PREFETCH, PIXELS, CACHE = "training/test_prefetch.py", "data/test_pixels.py", "data/test_cache.py"
DRAWN = f"{PREFETCH}::test_a_mapped_set_gives_the_microbatches_of_one_in_memory"

HOLDOUT = f"{PIXELS}::test_a_holdout_of_a_large_set_copies_nothing_and_holds_the_same_images"


@fault("prefetched-batch-is-not-the-drawn-one", tests=(DRAWN,))
def prefetched_batch_is_not_the_drawn_one(patch: MonkeyPatch) -> None:
    """Each group gets the pixels of the one before: other people's images under these units' numbers."""
    rewrite(
        patch,
        "sfumato.training.inputs:_with_pixels",
        "return made_ahead(read) if are_large(images.shape) else read",
        "pairs = list(read)\n"
        "    shifted = [(pair[0], pairs[k - 1][1]) for k, pair in enumerate(pairs)]\n"
        "    return iter(shifted) if are_large(images.shape) else iter(pairs)",
    )


@fault("prefetch-drops-the-last", tests=(DRAWN,))
def prefetch_drops_the_last(patch: MonkeyPatch) -> None:
    """What was made ahead when the source ended is forgotten."""
    rewrite(
        patch,
        "sfumato.training.prefetch:made_ahead",
        "while found := made.popleft().result():",
        "while (found := made.popleft().result()) and made[0].result():",
    )


@fault("chosen-rows-of-the-whole", tests=(HOLDOUT,))
def chosen_rows_of_the_whole(patch: MonkeyPatch) -> None:
    """Row k of a selection is row k of the whole set: images of the holdout are trained on."""
    rewrite(
        patch,
        "sfumato.data.pixels:ChosenRows.__getitem__",
        "self.images[self.rows[rows]]",
        "self.images[: len(self.rows)][rows]",
    )


@fault(
    "decoding-goes-on-after-other-files",
    tests=(f"{CACHE}::test_of_changed_files_only_what_lies_before_the_change_is_kept",),
)
def decoding_goes_on_after_other_files(patch: MonkeyPatch) -> None:
    """What an interrupted decoding left is believed without comparing the files."""
    rewrite(
        patch,
        "sfumato.data.decoding:Decoding._common",
        "return int(other[0]) if len(other) else length",
        "return length",
    )


@fault("rows-before-their-images", tests=(f"{CACHE}::test_rows_without_their_images_are_not_believed",))
def rows_before_their_images(patch: MonkeyPatch) -> None:
    """The list is believed where the images are cut off: what is missing would be zeros."""
    rewrite(
        patch,
        "sfumato.data.decoding:Decoding._common",
        "length = min(len(rows), len(self.digests), there)",
        "length = min(len(rows), len(self.digests))",
    )
