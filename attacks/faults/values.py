"""Planted faults in what is derived from the data, and in what strangers' files may ask for."""

from __future__ import annotations

from planting import fault, rewrite

DERIVED = (
    "run/test_derived_values.py::test_an_odd_image_in_the_place_of_another_changes_nothing_that_is_published"
)


@fault("size-of-the-images", tests=(DERIVED,))
def size_of_the_images(patch):
    """The size that all files share is taken over; one odd image then changes the released model."""
    rewrite(
        patch,
        "sfumato.data.readers.folder:load_folder",
        "image_size or DEFAULT_SIZE",
        "image_size or min(header.width for header in read_headers(paths)) + 8",
    )


@fault("channels-of-the-images", tests=(DERIVED,))
def channels_of_the_images(patch):
    """Grey if all files are grey."""
    rewrite(
        patch,
        "sfumato.data.readers.folder:load_folder",
        "channels or DEFAULT_CHANNELS",
        "channels or (1 if all(header.grey for header in read_headers(paths)) else 3)",
    )


@fault("mean-of-the-images", tests=(DERIVED,))
def mean_of_the_images(patch):
    """Normalisation constants out of the private images."""
    from sfumato.run import resolve

    original = resolve.normalisation

    def of_the_images(network, images, provenance):
        _, deviation = original(network, images, provenance)
        return (float(images.images.double().mean() / 255),), deviation

    patch.setattr(resolve, "normalisation", of_the_images)


@fault("declared-class-decides", tests=("data/test_folder.py",))
def declared_class_decides(patch):
    """A declared class without images is refused: that it was not tells that somebody has it."""
    rewrite(patch, "sfumato.data.readers.listing:Listing.check", "if not self.declared and", "if True and")


@fault(
    "class-of-one",
    tests=("run/test_derived_values.py::test_a_class_of_a_single_unit_is_refused_or_declared_beforehand",),
)
def class_of_one(patch):
    """A class that one unit made exist is published."""
    from sfumato.doctor import data_checks

    original = data_checks._classes
    patch.setattr(
        data_checks,
        "_classes",
        lambda *arguments: [item for item in original(*arguments) if item.code != "class-of-one"],
    )


@fault("command-as-typed", tests=("release/test_run_folder.py",))
def command_as_typed(patch):
    """Paths and names of the command stand in environment.json."""
    from sfumato.release import run_folder

    patch.setattr(run_folder, "public_command", lambda arguments: " ".join(["sfumato", *arguments]))


@fault(
    "private-score-unmarked",
    tests=("cli/test_cli_run.py::test_scores_on_private_images_say_that_they_are_sensitive_everywhere",),
)
def private_score_unmarked(patch):
    """The accuracy on held-out private images is printed as if it could be shown."""
    rewrite(patch, "sfumato.run.publish:publish", "scored is not None and scored.sensitive,", "False,")


@fault(
    "any-depth",
    tests=("models/test_registry.py::test_a_wide_resnet_beyond_all_sizes_is_refused_before_it_is_drafted",),
)
def any_depth(patch):
    """A Wide-ResNet may have any number of layers, and a name in a release keeps the machine busy."""
    from sfumato.models import wrn

    patch.setattr(wrn, "check_size", lambda depth, width: None)


@fault(
    "description-trusted",
    tests=("release/test_release.py::test_a_network_larger_than_its_weights_is_never_built",),
)
def description_trusted(patch):
    """The network that config.json describes is built before anybody asks whether the weights are its own."""
    rewrite(patch, "sfumato.release.release:build_model", "if weight_shapes(", "if False and weight_shapes(")


@fault("pattern-without-end", tests=("data/test_folder.py",))
def pattern_without_end(patch):
    """The patient expression is given all the time of a test."""
    rewrite(patch, "sfumato.data.readers.patients:find_patients", "timeout=seconds", "timeout=seconds + 20")


@fault("digits-of-all-scripts", tests=("data/test_folder.py", "data/test_manifest.py"))
def digits_of_all_scripts(patch):
    """A class called ² is taken for a number."""
    from sfumato.data.readers import listing, manifest

    def whole_number(text):
        return int(text) if text.isdigit() else None

    patch.setattr(listing, "whole_number", whole_number)
    patch.setattr(manifest, "whole_number", whole_number)


@fault("advice-by-private-images", tests=("run/test_advice.py::test_only_public_facts_decide",))
def advice_by_private_images(patch):
    rewrite(
        patch,
        "sfumato.data.counting:_count_files",
        "num_units=len(patients)",
        "num_units=len(train)",
    )
