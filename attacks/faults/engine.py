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
        "owners = group.unit_ids.repeat_interleave",
        "owners = torch.arange(len(group.unit_ids)).repeat_interleave",
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


@fault("outputs-counted-twice", tests=("gradients/test_third_party.py",))
def outputs_counted_twice(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.tape:Tape._watched",
        "elif value._is_view() or not alone:",
        "elif value._is_view():",
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
    rule = "sfumato.gradients.weight_standardisation:weight_standardised_rule"
    rewrite(patch, rule, "conv = operands(call, geometry)", "conv = operands(call, geometry).widened()")
    rewrite(patch, rule, " and call.outputs[0].dtype == conv.gradients.dtype", "")
