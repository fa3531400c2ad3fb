"""The loss on a plane through a network's weights, along filter-normalised directions (Li et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import RectBivariateSpline
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.errors import ConfigError
from sfumato.study.documents import INK, StudyResult, new_figure, styled
from sfumato.study.subjects import Subject, not_private

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
Weights = Mapping[str, Tensor]
_HIGHEST = 6.0  # above the lowest loss: higher walls would take the colours from the valley


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """losses[i][j] at ``coordinates[i]`` along the first direction, ``coordinates[j]`` along the second."""

    coordinates: list[float]
    losses: list[list[float | None]]  # None: not a finite number

    @property
    def centre(self) -> float | None:
        """The loss at the network itself."""
        middle = len(self.coordinates) // 2
        return self.losses[middle][middle]


def filter_normalised(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """A random direction whose filters (rows of a weight) are as long as the network's own.

    Gains, biases and other vectors stay as they are: they have no filters, and a step along them would
    rescale whole layers (Li et al. 2018, section 4). So do parameters that are not trained.
    """
    direction = {}
    for name, value in model.named_parameters():
        if value.ndim <= 1 or not value.requires_grad:
            direction[name] = torch.zeros_like(value)
            continue
        drawn = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        length = value.detach().flatten(1).norm(dim=1) / drawn.flatten(1).norm(dim=1).clamp_min(1e-10)
        direction[name] = drawn * length.view(-1, *[1] * (value.ndim - 1))
    return direction


def measure_landscape(
    subject: Subject,
    *,
    reach: float = 1.0,
    points: int = 15,
    seed: int = 0,
    batch_size: int = 256,
    on_progress: Callable[[int, int], None] | None = None,
) -> Landscape:
    """Mean loss on a grid of ``points`` x ``points`` from -reach to reach in both directions.

    ``points`` is odd, so that the middle is the network itself. Networks of equal shapes and equal seeds are
    seen along the same random directions, up to the lengths of their filters.
    """
    if points < 3 or points % 2 == 0:
        raise ConfigError(
            "bad-grid", f"a grid of {points} points a side has no middle", fix="Give an odd number from 3 on."
        )
    generator = torch.Generator().manual_seed(seed)
    across, along = (filter_normalised(subject.model, generator) for _ in range(2))
    centre = {name: value.detach() for name, value in subject.model.named_parameters()}
    coordinates = [reach * (2 * index / (points - 1) - 1) for index in range(points)]
    losses: list[list[float | None]] = []
    for row, first in enumerate(coordinates):
        losses.append([])
        for column, second in enumerate(coordinates):
            moved = {
                name: value + first * across[name] + second * along[name] for name, value in centre.items()
            }
            loss = _loss_at(subject, moved, batch_size)
            losses[-1].append(loss if np.isfinite(loss) else None)
            if on_progress is not None:
                on_progress(row * points + column + 1, points**2)
    return Landscape(coordinates=coordinates, losses=losses)


@torch.inference_mode()
def _loss_at(subject: Subject, weights: Weights, batch_size: int) -> float:
    total = 0.0
    for x, y in zip(subject.inputs.split(batch_size), subject.labels.split(batch_size), strict=True):
        logits = torch.func.functional_call(subject.model, dict(weights), (x,))
        total += cross_entropy(logits.double(), y, reduction="sum").item()
    return total / len(subject.labels)


def _smooth(coordinates: Sequence[float], surface: Array) -> tuple[Array, Array]:
    """The surface between its points, by splines of its logarithm; for the eye only, never for the data."""
    fine = np.linspace(coordinates[0], coordinates[-1], 121)
    degree = min(3, len(coordinates) - 1)
    spline = RectBivariateSpline(coordinates, coordinates, np.log(surface), kx=degree, ky=degree)
    return fine, np.clip(np.exp(spline(fine, fine)), surface.min(), surface.max())


def landscape_result(measured: Sequence[tuple[Subject, Landscape]]) -> StudyResult:
    """Document and rows of all subjects."""
    nets = [
        {
            **subject.described(),
            "loss": found.centre,
            "coordinates": found.coordinates,
            "losses": found.losses,
        }
        for subject, found in measured
    ]
    rows = [
        {"net": subject.name, "epsilon": subject.epsilon, "first": first, "second": second, "loss": loss}
        for subject, found in measured
        for first, line in zip(found.coordinates, found.losses, strict=True)
        for second, loss in zip(found.coordinates, line, strict=True)
    ]
    sensitive = next((subject.split for subject, _ in measured if subject.sensitive), None)
    notice = None if sensitive is None else not_private(sensitive)
    return StudyResult(study="landscape", document={"nets": nets}, rows=rows, notice=notice)


@styled
def draw_landscape(measured: Sequence[tuple[Subject, Landscape]]) -> Figure:
    """Contours side by side with one scale of colours, a cross where each network is."""
    from matplotlib.colors import LogNorm

    count = len(measured)
    figure, axes = new_figure(2.75 * count + 0.9, 2.9, 1, count, sharex=True, sharey=True)
    surfaces = [np.array(found.losses, dtype=float) for _, found in measured]
    lowest = min(float(np.nanmin(surface)) for surface in surfaces)
    highest = max(float(np.nanmax(surface)) for surface in surfaces)
    cut = highest > lowest + _HIGHEST
    highest = lowest + _HIGHEST if cut else highest
    lowest = max(lowest, 1e-6)
    highest = max(highest, 1.02 * lowest)
    scale = LogNorm(lowest, highest)
    levels = np.geomspace(lowest, highest, 25)
    for one, (subject, found), surface in zip(axes[0], measured, surfaces, strict=True):
        fine, shown = _smooth(
            found.coordinates, np.clip(np.nan_to_num(surface, nan=highest), lowest, highest)
        )
        filled = one.contourf(fine, fine, shown.T, levels, norm=scale, cmap="viridis")
        filled.set_edgecolor("face")  # no hairlines between the bands in a PDF
        one.contour(fine, fine, shown.T, levels[::3], colors="white", linewidths=0.5)
        one.plot(0, 0, marker="+", color="white", markersize=9, markeredgewidth=1.6)
        one.set_title(subject.label, loc="left", size=8.5)
        one.set(xlabel="first direction", aspect="equal")
        one.locator_params(nbins=5)
    axes[0, 0].set_ylabel("second direction")
    bar = figure.colorbar(filled, ax=list(axes[0]), shrink=0.85, pad=0.02)
    ticks = np.geomspace(lowest, highest, 5)
    bar.set_ticks(list(ticks), labels=[f"{tick:.2g}" for tick in ticks[:-1]] + [f"{'≥ ' * cut}{highest:.2g}"])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=7.5, color=INK)
    bar.set_label("loss", size=8.5)
    bar.outline.set_linewidth(0.5)
    return figure
