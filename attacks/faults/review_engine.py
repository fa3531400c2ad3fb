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
