"""Pictures of a budget: ε against steps, noise against batch size, and which batch size is worth its cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato import accounting
from sfumato.accounting import SampledGaussian
from sfumato.errors import ConfigError
from sfumato.privacy.plan import Plan
from sfumato.privacy.statement import round_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _ACCENT, _SOFT = "#26323f", "#b3541e", "#5b7f95"


@dataclass(frozen=True, kw_only=True)
class BatchCurve:
    """The noise that one budget needs at each batch size, for as many steps or for as many epochs."""

    batch_sizes: list[int]
    noise_multipliers: list[float]  # same number of steps
    step_noise: list[float]  # noise_multiplier / batch_size, same number of steps
    epoch_noise: list[float]  # the same quotient when the number of epochs is kept instead
    useful_batch_size: int  # the smallest whose step_noise is within a quarter of the full batch's


def batch_curve(plan: Plan, *, num_points: int = 13) -> BatchCurve:
    """Vary the batch size at the plan's ε.

    De et al. (2022, section 5): at a fixed number of steps a larger batch means less noise in the mean
    gradient, until sampling stops to amplify privacy; from there on noise grows as fast as the batch
    and only the cost grows. Every step then costs more epochs, so whoever pays for compute takes a
    moderate batch.
    """
    smallest = max(1, plan.num_examples // 1000)
    ratio = plan.num_examples / smallest
    sizes = sorted({round(smallest * ratio ** (i / (num_points - 1))) for i in range(num_points)})
    epochs = plan.num_steps * plan.sampling_rate
    noise = _noise_along(plan, [(size, plan.num_steps) for size in sizes])
    epoch_steps = [max(1, round(epochs * plan.num_examples / size)) for size in sizes]
    per_epoch = _noise_along(plan, list(zip(sizes, epoch_steps, strict=True)))
    step_noise = [sigma / size for sigma, size in zip(noise, sizes, strict=True)]
    useful = _first_below(sizes, step_noise, 1.25 * step_noise[-1])
    return BatchCurve(
        batch_sizes=sizes,
        noise_multipliers=noise,
        step_noise=step_noise,
        epoch_noise=[sigma / size for sigma, size in zip(per_epoch, sizes, strict=True)],
        useful_batch_size=useful,
    )


def _noise_along(plan: Plan, batches: list[tuple[int, int]]) -> list[float]:
    """The noise multiplier for each (batch size, steps) at the plan's ε.

    By the fast, rough ε, at the value it gives the plan itself: a curve through the plan's own point.
    """

    def rough(sigma: float, rate: float, num_steps: int) -> float:
        event = SampledGaussian(noise_multiplier=sigma, sampling_rate=rate, num_steps=num_steps)
        return accounting.rough_epsilon([event], delta=plan.delta, neighbouring=plan.neighbouring)

    target = rough(plan.noise_multiplier, plan.sampling_rate, plan.num_steps)
    noise_multipliers = [plan.noise_multiplier]
    for batch_size, num_steps in reversed(batches):
        rate = batch_size / plan.num_examples
        sigma = accounting.solve_noise_multiplier(
            partial(rough, rate=rate, num_steps=num_steps),
            target,
            tolerance=0.002,
            guess=noise_multipliers[-1],
        )
        noise_multipliers.append(sigma)
    return noise_multipliers[:0:-1]


def _first_below(sizes: list[int], values: list[float], limit: float) -> int:
    """Where a falling curve reaches the limit, straight lines between its points in logarithms."""
    for i in range(1, len(sizes)):
        if values[i] <= limit < values[i - 1]:
            share = math.log(values[i - 1] / limit) / math.log(values[i - 1] / values[i])
            return round(sizes[i - 1] * (sizes[i] / sizes[i - 1]) ** share)
    return sizes[0]


def plot_budget(plan: Plan, path: Path) -> BatchCurve:
    """Draw three panels into a PNG or SVG file; returns the curve that was drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError("bad-plot-file", f"{path} is neither .png nor .svg.", fix="Give one of the two.")
    curve = batch_curve(plan)
    figure = Figure(figsize=(13.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    _draw_steps(left, plan)
    _draw_noise(middle, plan, curve)
    _draw_guidance(right, plan, curve)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, which="major", color="#d9dee3", linewidth=0.6)
        axes.set_axisbelow(True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(
            "bad-plot-file", f"{path} could not be written: {error.strerror or error}.", fix="Choose another."
        ) from error
    return curve


def _draw_steps(axes: Axes, plan: Plan) -> None:
    steps, values = plan.epsilon_curve()
    axes.plot(steps, values, color=_INK)
    axes.plot(plan.num_steps, plan.epsilon, "o", color=_ACCENT)
    axes.annotate(
        f"ε = {round_up(plan.epsilon, 3)}",
        (plan.num_steps, plan.epsilon),
        xytext=(-8, -2),
        textcoords="offset points",
        ha="right",
        color=_ACCENT,
    )
    axes.set(
        title="Privacy spent",
        xlabel="steps",
        ylabel=f"ε at δ = {plan.delta:g}",
        xlim=(0, None),
        ylim=(0, None),
    )


def _draw_noise(axes: Axes, plan: Plan, curve: BatchCurve) -> None:
    axes.loglog(curve.batch_sizes, curve.noise_multipliers, color=_INK)
    axes.plot(plan.batch_size, plan.noise_multiplier, "o", color=_ACCENT, label="this plan")
    axes.legend(frameon=False, loc="upper left")
    axes.set(
        title=f"Noise for ε = {round_up(plan.epsilon, 3)} in {plan.num_steps:,} steps",
        xlabel="expected batch size",
        ylabel="noise multiplier σ",
    )


def _draw_guidance(axes: Axes, plan: Plan, curve: BatchCurve) -> None:
    axes.loglog(curve.batch_sizes, curve.step_noise, color=_INK, label=f"{plan.num_steps:,} steps")
    epochs = plan.num_steps * plan.sampling_rate
    axes.loglog(curve.batch_sizes, curve.epoch_noise, "--", color=_SOFT, label=f"{epochs:,.3g} epochs")
    axes.axvline(curve.useful_batch_size, color=_ACCENT, linewidth=1)
    axes.annotate(
        f"beyond {curve.useful_batch_size:,}\nlittle is gained",
        (curve.useful_batch_size, max(curve.step_noise)),
        xytext=(-6, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        color=_ACCENT,
    )
    axes.plot(plan.batch_size, plan.noise_multiplier / plan.batch_size, "o", color=_ACCENT)
    axes.set(
        title="Noise in the mean gradient",
        xlabel="expected batch size",
        ylabel="σ / batch size (in clip norms)",
    )
    lowest = math.floor(math.log10(min(curve.step_noise + curve.epoch_noise)))
    axes.set_ylim(10.0**lowest, None)
    axes.legend(frameon=False, loc="lower left")
