"""Planted faults in methods against the noise: mixtures with other images, points clipped apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

METHODS = "training/test_noise_methods.py"
DISK = f"{METHODS}::test_fit_with_the_filter_is_disk_with_one_clip_per_unit_and_noise_on_every_sum"


@fault("mixed-with-another-image", tests=(f"{METHODS}::test_a_units_mixtures_depend_on_no_other_unit",))
def mixed_with_another_image(patch: MonkeyPatch) -> None:
    """Ordinary mix-up: the second view is one of the neighbour in the batch."""
    rewrite(
        patch,
        "sfumato.data.augmentation:mix_views",
        "torch.lerp(views[image, second],",
        "torch.lerp(views[image.roll(1, 0), second],",
    )


@fault(
    "mixed-by-place",
    tests=(f"{METHODS}::test_mixtures_do_not_depend_on_the_units_place_or_on_microbatches",),
)
def mixed_by_place(patch: MonkeyPatch) -> None:
    """Mixtures are drawn by the place in the microbatch: who else is there decides on a unit's rows."""
    rewrite(
        patch,
        "sfumato.training.inputs:Views._drawn",
        "randomness.words(owners, ",
        "randomness.words(np.arange(len(owners)) if stream == MIX else owners, ",
    )


@fault("distorted-by-place", tests=("training/test_inputs.py",))
def distorted_by_place(patch: MonkeyPatch) -> None:
    """Distortions are drawn by the place in the microbatch: who else is there decides on a unit's rows."""
    rewrite(
        patch,
        "sfumato.training.inputs:Views._drawn",
        "randomness.words(owners, ",
        "randomness.words(np.arange(len(owners)) if stream == DISTORTION else owners, ",
    )


@fault("contrast-around-the-batch", tests=("data/test_distortion.py",))
def contrast_around_the_batch(patch: MonkeyPatch) -> None:
    """Contrast is changed around the mean grey of all images in memory, so that each enters the others."""
    rewrite(
        patch,
        "sfumato.data.distortion:distort",
        "images = 0.5 + (images - 0.5) *",
        "images = images.mean() + (images - images.mean()) *",
    )


@fault("filter-before-noise", tests=(DISK,))
def filter_before_noise(patch: MonkeyPatch) -> None:
    """The filter takes the sum as it was before the noise."""
    rewrite(
        patch,
        "sfumato.training.loop:fit",
        "apply_gradient(model, optimizer, noisy,",
        "apply_gradient(model, optimizer, noisy if kalman is None else total.gradients,",
    )


@fault("two-points-clipped-apart", tests=(DISK,))
def two_points_clipped_apart(patch: MonkeyPatch) -> None:
    """The filter's two points, each clipped on its own and then combined: a unit counts up to three times."""
    rewrite(
        patch,
        "sfumato.training.loop:fit",
        "        noisy = plan.noise(",
        "        here = gradient_sum(indices, step).gradients\n"
        "        for key, value in total.gradients.items():\n"
        "            value.mul_(2).sub_(here[key])\n"
        "        noisy = plan.noise(",
    )
