"""Planted faults in the gradient engine: draws of the model, precision, odd modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013


@fault("draws-by-place", tests=("gradients/test_stochastic.py",))
def draws_by_place(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.stochastic:RowDraws.uniform",
        "words = self.randomness.words(self.units, self.rows, count, stream=stream)",
        "words = self.randomness.words(np.arange(len(self.units)), self.rows, count, stream=stream)",
    )


@fault("draws-of-the-global-generator", tests=("gradients/test_stochastic.py",))
def draws_of_the_global_generator(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.random_operations:RandomOperations.__torch_dispatch__",
        "if torch.Tag.nondeterministic_seeded not in func.tags or",
        "if func is not torch.ops.aten.poisson.default or",
    )


@fault("rows-of-a-unit-draw-alike", tests=("gradients/test_stochastic.py",))
def rows_of_a_unit_draw_alike(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.gradients.stochastic:RowDraws.of", "sizes), rows)", "sizes), 0 * rows)")


@fault("repeated-with-other-draws", tests=("gradients/test_stochastic.py",))
def repeated_with_other_draws(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.stochastic:Replay.uniform",
        "        return self.values.pop(0)\n",
        "        return torch.rand_like(self.values.pop(0))\n",
    )


@fault("views-by-place", tests=("training/test_inputs.py",))
def views_by_place(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.training.inputs:Views.microbatches",
        "owners = group.unit_ids.repeat_interleave(group.sizes).numpy()",
        "owners = torch.arange(len(group.unit_ids)).repeat_interleave(group.sizes).numpy()",
    )


@fault("sum-in-half-precision", tests=("gradients/test_precision.py",))
def sum_in_half_precision(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.summation:_add_clipped",
        "if name in totals else part.double()",
        "if name in totals else part.bfloat16()",
    )


@fault("working-precision-of-the-weights", tests=("gradients/test_precision.py",))
def working_precision_of_the_weights(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.piece:working_dtype",
        "return torch.promote_types(dtype, torch.float32)",
        "return dtype",
    )


@fault(
    "outputs-counted-twice",
    tests=("gradients/test_third_party.py::test_other_peoples_models_equal_autograd_call_after_call",),
)
def outputs_counted_twice(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.tape:Tape._watched",
        "elif value._is_view() or not alone:",
        "elif value._is_view():",
    )


@fault(
    "standardised-filters-of-norm-one",
    tests=(
        "gradients/test_uses.py::test_filters_standardised_by_their_variance_are_exact_by_every_strategy",
    ),
)
def standardised_filters_of_norm_one(patch: MonkeyPatch) -> None:
    """As if eps took nothing of the filters' norm: units' norms come out too small or too large."""
    rewrite(
        patch,
        "sfumato.gradients.weight_standardisation:filters_by_variance",
        "(2 - squares / norms.square())",
        "torch.ones_like(squares)",
    )


@fault(
    "any-standardised-filters",
    tests=("gradients/test_uses.py::test_filters_that_are_standardised_in_other_ways_are_exact_too",),
)
def any_standardised_filters(patch: MonkeyPatch) -> None:
    """A product with a number is taken for the parameter itself."""
    rewrite(
        patch,
        "sfumato.gradients.functions:_standardised",
        "if origin is None or origin[1] != 1 or not told",
        "if origin is None or not told",
    )


@fault("forward-may-keep", tests=("gradients/test_third_party.py",))
def forward_may_keep(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.suitability:check_untouched",
        "    if after == before:\n        return\n",
        "    return\n",
    )


@fault("order-of-one-row-is-enough", tests=("gradients/test_uses.py",))
def order_of_one_row_is_enough(patch: MonkeyPatch) -> None:
    """A pass of one row cannot show whether rows keep their order; later passes are not looked at."""
    rewrite(
        patch,
        "sfumato.gradients.passes:record",
        "is_ordered = is_ordered or len(inputs) > 1",
        "is_ordered = True",
    )


@fault("norm-from-a-rounded-output", tests=("gradients/test_low_precision.py",))
def norm_from_a_rounded_output(patch: MonkeyPatch) -> None:
    """The Gram norm of a standardised convolution reads <G, u> off an output in half precision."""
    place = "sfumato.gradients.weight_standardisation"
    rewrite(
        patch,
        f"{place}:weight_standardised_rule",
        "conv = operands(call, geometry)",
        "conv = operands(call, geometry).widened()",
    )
    rewrite(patch, f"{place}:_strategies", " and call.outputs[0].dtype == conv.gradients.dtype", "")


LOW = "gradients/test_low_precision.py"


@fault("norm-before-rounding", tests=("gradients/test_low_kernels.py",))
def norm_before_rounding(patch: MonkeyPatch) -> None:
    """Units' filters are rounded once more after their moments were taken."""
    rewrite(
        patch,
        "sfumato.gradients.kernels.low_tiles:low_filters",
        "    return result, moments, shifts",
        "    return (result * 1.003).to(result.dtype), moments, shifts",
    )


@fault(
    "units-decide-how-others-are-rounded",
    tests=(f"{LOW}::test_a_unit_of_many_rows_changes_nothing_in_how_the_others_are_rounded",),
)
def units_decide_how_others_are_rounded(patch: MonkeyPatch) -> None:
    """In bfloat16 a layer takes whichever way is fastest for the units that are there."""
    rewrite(patch, "sfumato.gradients.convolution:rounding_alike", "if not conv.is_low:", "if True:")


STANDARDISED = "sfumato.gradients.weight_standardisation"
SMALL = (
    "gradients/test_exactness.py::test_inputs_far_below_the_bias_of_standardised_filters_keep_to_the_bound"
)


@fault("lost-to-the-bias", tests=(SMALL,))
def lost_to_the_bias(patch: MonkeyPatch) -> None:
    """The Gram norm of standardised filters trusts an output that is the bias and rounding."""
    patch.setattr(f"{STANDARDISED}.LOST_TO_BIAS", 0)


@fault(
    "origin-of-changed-values",
    tests=("gradients/test_uses.py::test_derived_values_that_are_changed_in_place_are_what_they_are_then",),
)
def origin_of_changed_values(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.gradients.uses:multiple_of", "if value._version == value.version", "if True")
    rewrite(patch, "sfumato.gradients.uses:standardised_of", " and value._version == value.version", "")


@fault("second-pass-rounds-the-factors", tests=("gradients/test_low_precision.py",))
def second_pass_rounds_the_factors(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.kernels.low_tiles:low_filter_sum",
        "weights = factors.float()",
        "weights = factors.bfloat16().float()",
    )


@fault("second-pass-of-other-operands", tests=("gradients/test_low_precision.py",))
def second_pass_of_other_operands(patch: MonkeyPatch) -> None:
    """The sum is of output gradients that were scaled, and rounded again, after their norms were taken."""
    rewrite(
        patch,
        "sfumato.gradients.twice:twice_sum",
        "low_filter_sum(*images, factors[group.units], ",
        "low_filter_sum(images[0], images[1] * 1.01, factors[group.units], ",
    )


@fault("dropped-units-are-read", tests=("gradients/test_low_kernels.py",))
def dropped_units_are_read(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.kernels.sums:weighted_rows",
        "factors.float().contiguous()",
        "factors.float().clamp(min=1e-30)",
    )


@fault(
    "zeros-around-twice",
    tests=("gradients/test_exactness.py::test_an_input_that_was_padded_unevenly_is_not_padded_again",),
)
def zeros_around_twice(patch: MonkeyPatch) -> None:
    """An input that has its zeros around it gets them again."""
    rewrite(
        patch,
        "sfumato.gradients.weight_standardisation:weight_standardised_rule",
        "(0,) * 4 if call.padded else module.padding_for",
        "module.padding_for",
    )
