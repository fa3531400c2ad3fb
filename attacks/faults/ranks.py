"""Planted faults in trainings on several ranks: noise, shares, order, draws, and ranks that are lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

RANKS = "training/test_ranks.py"
NOISE = f"{RANKS}::test_the_noise_of_an_update_does_not_depend_on_the_number_of_ranks"
SAME = f"{RANKS}::test_ranks_have_the_sums_of_one_process"
ANSWER = "sfumato.training.ranked_sum:RankedSum._answer"


@fault("noise-on-each-rank", tests=(NOISE,))
def noise_on_each_rank(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        ANSWER,
        "            answer[2] = total.sensitivity\n",
        "            answer[2] = total.sensitivity\n"
        "            total = replace(total, gradients={name: value + 0.4 * torch.randn_like(value)"
        " for name, value in total.gradients.items()})\n",
    )


@fault("no-noise-over-ranks", tests=(NOISE,))
def no_noise_over_ranks(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.training.loop:fit",
        "noisy = plan.noise(total, source=source, step=step)",
        "noisy = total.gradients if getattr(gradient_sum, 'keys', None) and gradient_sum.ranks.size > 1"
        " else plan.noise(total, source=source, step=step)",
    )


@fault("noise-shrinks-with-ranks", tests=(NOISE,))
def noise_shrinks_with_ranks(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.training.ranked_sum:RankedSum._checked",
        "return replace(own, gradients=gradients,",
        "return replace(own, sensitivity=own.sensitivity / self.ranks.size, gradients=gradients,",
    )


@fault(
    "unit-in-two-shares", tests=(f"{RANKS}::test_shares_are_every_unit_once_and_about_equally_large", SAME)
)
def unit_in_two_shares(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.training.ranks:stretch",
        "cuts[number + 1])",
        "min(cuts[-1], cuts[number + 1] + 1))",
    )


@fault(
    "shares-not-checked",
    tests=(f"{RANKS}::test_a_unit_that_two_ranks_take_is_refused_before_any_noise",),
)
def shares_not_checked(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.training.ranked_sum:RankedSum._checked",
        "if not bool((taken == 1).all()) or",
        "if",
    )


@fault(
    "sensitivity-of-the-first-rank",
    tests=(f"{RANKS}::test_ranks_whose_sums_have_another_sensitivity_are_refused",),
)
def sensitivity_of_the_first_rank(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.training.ranked_sum:RankedSum._checked",
        "not math.isclose(sensitivities, expected, rel_tol=1e-12)",
        "False",
    )


@fault("units-in-any-order", tests=(f"{RANKS}::test_units_must_have_the_same_numbers_on_every_rank",))
def units_in_any_order(patch: MonkeyPatch) -> None:
    import sfumato.run.ranks

    patch.setattr(sfumato.run.ranks, "ordered_checksum", lambda units: units.checksum())


@fault("ranks-draw-for-themselves", tests=(SAME, f"{RANKS}::test_a_rank_draws_nothing_of_its_own"))
def ranks_draw_for_themselves(patch: MonkeyPatch) -> None:
    from sfumato.randomness import SecureSource
    from sfumato.training.ranked_sum import StepKeys

    def draw(self: StepKeys, count: int, *, purpose: str, step: int) -> object:
        return SecureSource().random_bytes(count, purpose=purpose, step=step)

    patch.setattr(StepKeys, "random_bytes", draw)


@fault("old-weights-on-other-ranks", tests=(SAME,))
def old_weights_on_other_ranks(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.training.ranks:Ranks.broadcast_tensors",
        "value.copy_(part.view(value.shape))",
        "part.view(value.shape)",
    )


@fault(
    "ranks-added-in-float32",
    tests=(f"{RANKS}::test_sums_are_added_in_an_order_that_depends_on_nothing_but_their_number",),
)
def ranks_added_in_float32(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.training.ranks:Ranks.add_up",
        "total += received",
        "total = (total.float() + received.float()).double()",
    )


@fault(
    "failed-rank-counts-as-zero",
    tests=(f"{RANKS}::test_a_rank_that_fails_stops_all_and_the_first_one_says_why",),
)
def failed_rank_counts_as_zero(patch: MonkeyPatch) -> None:
    rewrite(patch, ANSWER, "            answer[0] = 1.0\n", "")


@fault(
    "spent-after-ranks-have-seen-it",
    tests=(f"{RANKS}::test_other_ranks_see_only_weights_of_steps_that_are_on_record",),
)
def spent_after_ranks_have_seen_it(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.training.loop:fit", "spend(step + 1)", "spend(step)")


@fault("no-sign-of-life", tests=(f"{RANKS}::test_an_idle_first_rank_is_waited_for_and_a_lost_one_is_not",))
def no_sign_of_life(patch: MonkeyPatch) -> None:
    from sfumato.training.ranks import Ranks

    patch.setattr(Ranks, "_beat", lambda self: None)


@fault("stop-of-one-rank-unheard", tests=(f"{RANKS}::test_a_rank_that_is_asked_to_stop_tells_the_first",))
def stop_of_one_rank_unheard(patch: MonkeyPatch) -> None:
    rewrite(patch, ANSWER, "answer[1] = float(self.ranks.stop_wanted())", "answer[1] = 0.0")


RUNS = "run/test_ranked_runs.py"


@fault("different-images-on-ranks", tests=(f"{RUNS}::test_what_ranks_cannot_do_is_refused_on_all_of_them",))
def different_images_on_ranks(patch: MonkeyPatch) -> None:
    import sfumato.run.ranks

    patch.setattr(sfumato.run.ranks, "identity", lambda prepared: {})


@fault("every-rank-speaks", tests=(f"{RUNS}::test_torchrun_trains_and_only_the_first_rank_speaks",))
def every_rank_speaks(patch: MonkeyPatch) -> None:
    import sfumato.cli.ranks

    rewrite(patch, "sfumato.cli.ranks:helped_first_rank", "return True", "print('{}')\n    return True")
    assert sfumato.cli.ranks
