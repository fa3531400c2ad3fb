"""Planted faults in clip, noise, sampling, accounting, loop and ledger: how DP-SGD is usually got wrong."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

LOOP = "sfumato.training.loop:fit"
SENSITIVITY = "mechanism/test_sensitivity.py::test_the_sum_by_hand_and_ours_are_equal_and_both_bounded"
SCALE = "privacy/test_privacy.py::test_noise_has_the_multiplier_times_the_sensitivity_of_the_sum"


@fault("clip-after-averaging", tests=(SENSITIVITY,))
def clip_after_averaging(patch: MonkeyPatch) -> None:
    import torch

    from sfumato.gradients.clipping import FlatClipping

    original = FlatClipping.factors

    def factors(self, squared_norms, clip_norm, margin):
        found = original(self, squared_norms, clip_norm, margin)
        return {name: torch.full_like(one, one.mean().item()) for name, one in found.items()}

    patch.setattr(FlatClipping, "factors", factors)


@fault("wrong-divisor", tests=("training/test_training.py::test_fit_is_algorithm_1",))
def wrong_divisor(patch: MonkeyPatch) -> None:
    rewrite(patch, LOOP, "scale=1 / divisor", "scale=plan.batch_size / max(1, len(indices)) / divisor")


@fault("noise-before-clipping", tests=(SCALE,))
def noise_before_clipping(patch: MonkeyPatch) -> None:
    from sfumato.privacy.plan import Plan

    original = Plan.noise

    def noise(self, total, **options):
        noisy = original(self, total, **options)
        norm = sum(value.double().square().sum() for value in noisy.values()) ** 0.5
        return {name: one * min(1.0, float(self.clip_norm / norm)) for name, one in noisy.items()}

    patch.setattr(Plan, "noise", noise)


@fault("half-noise", tests=(SCALE,))
def half_noise(patch: MonkeyPatch) -> None:
    from sfumato.privacy.plan import Plan

    original = Plan.noise

    def noise(self, total, **options):
        halved = dataclasses.replace(self, noise_multiplier=self.noise_multiplier / 2)
        return original(halved, total, **options)

    patch.setattr(Plan, "noise", noise)


@fault(
    "noise-per-microbatch",
    tests=("training/test_training.py::test_microbatches_change_neither_the_sum_nor_the_noise",),
)
def noise_per_microbatch(patch: MonkeyPatch) -> None:
    once = "        noisy = plan.noise(total, source=source, step=step)\n"
    rewrite(
        patch,
        LOOP,
        once,
        once + "        for _ in range((len(indices) - 1) // gradient_sum.max_rows):\n"
        "            total = __import__('dataclasses').replace(total, gradients=noisy)\n"
        "            noisy = plan.noise(total, source=source, step=step)\n",
    )


@fault("wrong-sampling-rate", tests=("privacy/test_privacy.py::test_the_sampler_draws_as_the_plan_accounts",))
def wrong_sampling_rate(patch: MonkeyPatch) -> None:
    from sfumato.privacy.plan import Plan

    original = Plan.sampler

    def sampler(self):
        true = original(self)
        return dataclasses.replace(true, sampling_rate=min(1.0, 1.1 * true.sampling_rate))

    patch.setattr(Plan, "sampler", sampler)


@fault("missing-parameter", tests=(SENSITIVITY,))
def missing_parameter(patch: MonkeyPatch) -> None:
    import torch

    from sfumato.gradients.clipping import FlatClipping

    original = FlatClipping.factors

    def factors(self, squared_norms, clip_norm, margin):
        last = next(reversed(squared_norms))
        known = {**squared_norms, last: torch.zeros_like(squared_norms[last])}
        return original(self, known, clip_norm, margin)

    patch.setattr(FlatClipping, "factors", factors)


@fault("nan-passes", tests=(SENSITIVITY,))
def nan_passes(patch: MonkeyPatch) -> None:
    from sfumato.gradients import clipping

    def clip_factors(norms, clip_norm, margin=0.0):
        return (clip_norm * (1 - margin) / norms).clamp(max=1.0)

    patch.setattr(clipping, "clip_factors", clip_factors)


@fault(
    "average-of-raw-gradients",
    tests=("test_invariants.py::test_the_average_sees_noisy_weights_and_nothing_else",),
)
def average_of_raw_gradients(patch: MonkeyPatch) -> None:
    update = "        average.update(model)\n"
    rewrite(
        patch,
        LOOP,
        update,
        update + "        for name, value in average.weights.items():\n"
        "            value.sub_(total.gradients[name], alpha=rate / divisor)\n",
    )


@fault("seed-reuse-on-resume", tests=("mechanism/test_randomness.py",))
def seed_reuse_on_resume(patch: MonkeyPatch) -> None:
    from sfumato import randomness

    def rekey(self):
        self._process = os.getpid()
        self._stream = randomness._encryptor(bytes(32), bytes(16))

    patch.setattr(randomness.SecureSource, "_rekey", rekey)


@fault("one-rank-without-noise", tests=("test_invariants.py::test_noise_is_there_on_every_rank",))
def one_rank_without_noise(patch: MonkeyPatch) -> None:
    from sfumato.privacy.plan import Plan

    original = Plan.noise

    def noise(self, total, **options):
        if os.environ.get("RANK", "0") != "0":
            return dict(total.gradients)
        return original(self, total, **options)

    patch.setattr(Plan, "noise", noise)


@fault("view-wise-clipping", tests=("training/test_training.py::test_a_patient_moves_the_model_as_one_unit",))
def view_wise_clipping(patch: MonkeyPatch) -> None:
    from sfumato.training import gradient_sums

    original = gradient_sums.clipped_sum
    patch.setattr(
        gradient_sums,
        "clipped_sum",
        lambda *args, **options: original(*args, **{**options, "unit_index": None}),
    )


@fault(
    "spending-after-use",
    tests=("training/test_training.py::test_spending_returns_before_the_update_is_used",),
)
def spending_after_use(patch: MonkeyPatch) -> None:
    rewrite(patch, LOOP, "spend(step + 1)", "pass")
    update = "        average.update(model)\n"
    rewrite(patch, LOOP, update, update + "        spend(step + 1)\n")


@fault(
    "ledger-records-one-less",
    tests=("ledger/test_ledger.py::test_what_is_spent_is_on_record_before_the_call_returns",),
)
def ledger_records_one_less(patch: MonkeyPatch) -> None:
    from sfumato.ledger.ledger import Ledger

    original = Ledger._store

    def store(self, record, *rest, **options):
        less = dataclasses.replace(record, reserved_steps=max(0, record.reserved_steps - 1))
        return original(self, less, *rest, **options)

    patch.setattr(Ledger, "_store", store)


@fault(
    "low-bits-of-the-sum", tests=("mechanism/test_noise.py::test_every_result_lies_on_the_public_lattice",)
)
def low_bits_of_the_sum(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.noise:add_noise", ".round_()", "")


@fault(
    "tail-cut-at-eight",
    tests=("mechanism/test_noise.py::test_the_far_tail_is_exact_where_no_sample_will_ever_reach",),
)
def tail_cut_at_eight(patch: MonkeyPatch) -> None:
    from sfumato import noise

    original = noise._box_muller

    def box_muller(words, out, stddev):
        words[: words.numel() // 2].bitwise_or_(2**17)  # no uniform below 2^-46
        original(words, out, stddev)

    patch.setattr(noise, "_box_muller", box_muller)


@fault(
    "replacing-counted-as-removing",
    tests=("accounting/test_accounting.py::test_one_step_agrees_with_numeric_integration",),
)
def replacing_counted_as_removing(patch: MonkeyPatch) -> None:
    from sfumato.accounting import loss_distributions

    original = loss_distributions._one_step
    patch.setattr(
        loss_distributions,
        "_one_step",
        lambda noise, rate, neighbouring, interval: original(noise, rate, "add-or-remove", interval),
    )
