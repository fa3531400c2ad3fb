"""Does the audit of one run bite? Faults are planted one at a time into a training with gradient canaries.

    python attacks/audit_run_faults.py [NAME ...] [--canaries 1000]

The training is a head in closed form on rows of noise, through the product's own loop, sampler, clip and
noise: what `sfumato audit run` would find in a run. A blind spot is a fault that no canary passes through.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

import sfumato.noise
from sfumato.audit.run import RunAudit, judge_scores, white_box_scores
from sfumato.privacy.plan import Plan
from sfumato.randomness import SecureSource, SeededSource
from sfumato.run.canaries import new_key
from sfumato.training.averaging import WeightAverage
from sfumato.training.canaries import Directions, WithGradientCanaries, toss_coins
from sfumato.training.gradient_sums import ClosedFormSum
from sfumato.training.head import ROUNDING, SoftmaxRegression
from sfumato.training.loop import fit

NUM_ROWS, NUM_CLASSES, CLIP_NORM = 500, 10, 1.0
Fault = Callable[[pytest.MonkeyPatch], None]


def less_noise(share: float) -> Fault:
    def plant(patch: pytest.MonkeyPatch) -> None:
        add_noise = sfumato.noise.add_noise
        patch.setattr(
            sfumato.noise,
            "add_noise",
            lambda total, *, stddev, **rest: add_noise(total, stddev=share * stddev, **rest),
        )

    return plant


def no_noise_in_every_fourth_step(patch: pytest.MonkeyPatch) -> None:
    add_noise = sfumato.noise.add_noise

    def sometimes(total, *, stddev, step, **rest):
        return add_noise(total, stddev=stddev * (1e-6 if step % 4 == 0 else 1.0), step=step, **rest)

    patch.setattr(sfumato.noise, "add_noise", sometimes)


def doubled_rate(patch: pytest.MonkeyPatch) -> None:
    sampler = Plan.sampler
    patch.setattr(
        Plan,
        "sampler",
        lambda self: dataclasses.replace(sampler(self), sampling_rate=min(1.0, 2 * self.sampling_rate)),
    )


def reused_noise(patch: pytest.MonkeyPatch) -> None:
    noise = Plan.noise
    patch.setattr(
        Plan, "noise", lambda self, total, **rest: noise(self, total, source=SeededSource(0), step=0)
    )


def canary_of_five_clips(patch: pytest.MonkeyPatch) -> None:
    added = Directions.added

    def longer(self, gradients, chosen, *, length):
        return added(self, gradients, chosen, length=5 * length)

    patch.setattr(Directions, "added", longer)


def real_units_unclipped(patch: pytest.MonkeyPatch) -> None:
    call = SoftmaxRegression.__call__

    def unclipped(self, weight, bias, *, clip_norm, indices=None):
        total = call(self, weight, bias, clip_norm=1e6 / (1 - ROUNDING), indices=indices)
        return dataclasses.replace(total, sensitivity=clip_norm)

    patch.setattr(SoftmaxRegression, "__call__", unclipped)


# name -> how it is planted, and whether 1,000 canaries are expected to show it at ε = 4
FAULTS: dict[str, tuple[Fault | None, bool]] = {
    "nothing planted": (None, False),
    "half noise": (less_noise(0.5), True),
    "a tenth less noise": (less_noise(0.9), True),
    "no noise in every fourth step": (no_noise_in_every_fourth_step, True),
    "noise of a step reused": (reused_noise, True),
    "sampling rate doubled": (doubled_rate, True),
    "canary of five clip norms": (canary_of_five_clips, True),
    "real units unclipped": (real_units_unclipped, False),
}


def audited(name: str, *, num_canaries: int = 1000) -> RunAudit:
    """The audit of a training with the fault of this name in it."""
    plan = Plan.calibrate(
        epsilon=4.0, delta=1e-5, num_examples=NUM_ROWS, batch_size=0.1 * NUM_ROWS, num_steps=50
    )
    fault = FAULTS[name][0]
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch)
        projections, members = trained(plan, num_canaries)
    # the rows have as many features as there are canaries: a softmax has no gradient along any of them
    scores = white_box_scores(projections, members.numpy(), plan, silent=True, confidence=0.95)
    return judge_scores(scores, plan, confidence=0.95)


def trained(plan: Plan, num_canaries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a run keeps of its canaries, and their coins."""
    source, draws = SecureSource(), torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_ROWS, num_canaries, generator=draws) / 4
    labels = torch.randint(0, NUM_CLASSES, (NUM_ROWS,), generator=draws)
    model = nn.Sequential()
    model.add_module("head", nn.Linear(num_canaries, NUM_CLASSES))
    key = new_key(source)
    directions, members = Directions.draw(key, num_canaries, model), toss_coins(key, num_canaries)
    sums = ClosedFormSum(
        head=model.head,
        sums=SoftmaxRegression(rows, labels, num_classes=NUM_CLASSES),
        clip_norm=CLIP_NORM,
        num_units=NUM_ROWS,
    )
    seen = torch.zeros(plan.num_steps, num_canaries)

    def observe(step: int, noisy: dict[str, torch.Tensor]) -> None:
        seen[step] = directions.projections(noisy) / CLIP_NORM

    steps = fit(
        model,
        WithGradientCanaries(others=sums, directions=directions, members=members),
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        learning_rate=lambda step: 1.0,
        average=WeightAverage.start(model, decay=0.0),
        source=source,
        spend=lambda steps: None,
        on_noisy_sum=observe,
    )
    for _ in steps:
        pass
    return seen, members


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*FAULTS, []], help="rows; all by default")
    parser.add_argument("--canaries", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    surprises = 0
    print("| fault | ε ≥ | noise ≤ | rate ≥ | repeated | |\n|---|---|---|---|---|---|")
    for name in arguments.names or FAULTS:
        result = audited(name, num_canaries=arguments.canaries)
        found = bool(result.violations)
        surprises += found != FAULTS[name][1]
        mark = ("FOUND" if found else "-") + ("" if found == FAULTS[name][1] else " (!)")
        seen = result.measured
        print(
            f"| {name} | {result.epsilon:.2f} | {seen.noise_upper:.3f} | {seen.rate_lower or 0:.3f} | "
            f"{seen.repeated_noise} | {mark} |",
            flush=True,
        )
    print(
        f"promised: ε ≤ {result.nominal_epsilon:.2f}; accounted: noise {result.noise_multiplier:.3f}, "
        f"rate {result.sampling_rate:g}"
    )
    print(f"{surprises} rows differ from what is expected")
    return int(surprises > 0)


if __name__ == "__main__":
    raise SystemExit(main())
