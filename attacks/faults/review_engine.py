"""Planted faults in what keeps a unit's gradient its own: clipping, losses, rows and their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013


@fault("own-clipping-unchecked", tests=("gradients/test_own_clipping.py",))
def own_clipping_unchecked(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.clipping:_checked",
        "if not usable or not (moved <= sensitivity * (1 + _ROUNDING)).all():",
        "if False:",
    )


@fault("own-clipping-sees-all-units", tests=("gradients/test_own_clipping.py",))
def own_clipping_sees_all_units(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.clipping:bounded_factors",
        "if type(clipping) in OURS:",
        "if True:",
    )


@fault("own-clipping-remembers", tests=("gradients/test_own_clipping.py",))
def own_clipping_remembers(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.gradients.clipping:_one_by_one", "copy.deepcopy(clipping)", "clipping")


@fault("subnormal-operands", tests=("gradients/test_own_clipping.py",))
def subnormal_operands(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.piece:scaled_operands",
        "x, g = x.double(), g.double()",
        "x, g = x, g",
    )


@fault("row-order-checked-once", tests=("gradients/test_row_order.py",))
def row_order_checked_once(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.gradients.passes:record", "or may_reorder(per_row)", "or False")


@fault("row-order-unchecked", tests=("gradients/test_row_order.py",))
def row_order_unchecked(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.gradients.row_order:check_row_order", "if not wrong.any():", "if True:")


@fault("rows-told-apart-by-one-digit", tests=("gradients/test_row_order.py",))
def rows_told_apart_by_one_digit(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.gradients.row_order:row_weights", "not result or number.any()", "not result")


@fault("loss-asked-once", tests=("gradients/test_row_order.py",))
def loss_asked_once(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.row_losses:check_stateless",
        "if loss is cross_entropy or not len(targets):",
        "if True:",
    )


@fault("loss-trusted-for-ever", tests=("gradients/test_row_order.py",))
def loss_trusted_for_ever(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.gradients.passes:record",
        "            compare_losses(loss, outputs, targets, per_row)\n",
        "",
    )


@fault("rows-of-one-kind", tests=("doctor/test_row_kinds.py",))
def rows_of_one_kind(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.doctor.row_independence:check_independence",
        "    examination.compare_kinds()\n",
        "",
    )
