"""The Hessian of the loss at a network's weights: trace, ends of the spectrum, and its density.

Everything comes from products with random vectors, by two backward passes each, and from the Lanczos
algorithm with full reorthogonalisation (Golub & Meurant 2010; Ghorbani, Krishnan & Xiao 2019). Packages whose
products need forward-mode derivatives cannot be used: PyTorch has none for the backward pass of group norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from torch import Tensor
from torch.nn.functional import cross_entropy

from sfumato.errors import ModelError
from sfumato.study.documents import COLOURS, INK, StudyResult, new_figure, styled
from sfumato.study.subjects import Subject, not_private

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Product = Callable[[Tensor], Tensor]  # v to Hv
Array = NDArray[np.float64]
_NUM_POINTS = 801  # of the density
_CONVERGED = 1e-2  # relative to the spectrum's radius: what a Ritz value's residual may be
_ZERO = 1e-4  # the same: below it a Ritz value is not told from the many eigenvalues around zero


@dataclass(frozen=True, kw_only=True)
class Quadrature:
    """Ritz values of one Lanczos run, their weights (which add up to 1), and bounds on their errors."""

    nodes: Array
    weights: Array
    residuals: Array  # an eigenvalue lies within this distance of the node


@dataclass(frozen=True, kw_only=True)
class Curvature:
    """What is known of a Hessian of ``dimension`` rows after so many products."""

    dimension: int
    num_vectors: int
    num_iterations: int  # of Lanczos, for each vector
    trace: float
    trace_error: float | None  # standard error over the vectors; None with one vector
    top_eigenvalues: list[float]  # the largest that have converged, falling
    lowest_eigenvalue: float
    inverse_condition: float  # smallest |Ritz value| / largest
    zero_within: float  # eigenvalues nearer to zero do not count as negative
    negative_ritz: int  # of the first vector's Ritz values
    negative_share: float  # of all eigenvalues, by the density
    negative_share_error: float | None
    negative_mass: float  # share of the sum of |eigenvalues| that negative ones have
    grid: list[float]
    density: list[float]  # of eigenvalues, smoothed; its integral is 1
    width: float  # standard deviation of the smoothing

    @property
    def num_negative(self) -> float:
        """Negative eigenvalues of the whole Hessian, as the density has them."""
        return self.negative_share * self.dimension


def hessian_product(subject: Subject, *, batch_size: int = 64) -> tuple[Product, int]:
    """v → Hv for the mean cross-entropy over all images, and the number of parameters.

    Parameters that do not require gradients are left out. Deterministic: the model is in evaluation mode.
    """
    model = subject.model
    parameters = [value for value in model.parameters() if value.requires_grad]
    sizes = [value.numel() for value in parameters]

    def product(vector: Tensor) -> Tensor:
        pieces = [
            piece.view_as(value).to(value.dtype)
            for piece, value in zip(vector.split(sizes), parameters, strict=True)
        ]
        total = torch.zeros_like(vector)
        for x, y in zip(subject.inputs.split(batch_size), subject.labels.split(batch_size), strict=True):
            loss = cross_entropy(model(x), y, reduction="sum") / len(subject.labels)
            gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
            slope = sum(((g * v).sum() for g, v in zip(gradients, pieces, strict=True)), torch.zeros(()))
            if slope.requires_grad:  # a loss that is linear in its parameters has no curvature
                second = torch.autograd.grad(slope, parameters, materialize_grads=True)
                total += torch.cat([value.flatten() for value in second]).to(total.dtype)
        return total

    return product, sum(sizes)


def lanczos(
    product: Product,
    start: Tensor,
    num_iterations: int,
    *,
    on_product: Callable[[], None] = lambda: None,
) -> Quadrature:
    """Lanczos quadrature of the spectrum as ``start`` sees it.

    Guarantee: the basis stays orthogonal to rounding (each vector is orthogonalised twice against all
    others), so no eigenvalue appears twice. Where the Krylov space ends, the values are exact.
    """
    steps = min(num_iterations, len(start))
    basis = torch.empty(steps, len(start), dtype=start.dtype)
    basis[0] = start / start.norm()
    diagonal: list[float] = []
    beside: list[float] = []
    last = 0.0
    for step in range(steps):
        image = product(basis[step])
        on_product()
        diagonal.append(float(image.double() @ basis[step].double()))
        for _ in range(2):
            image = image - basis[: step + 1].T @ (basis[: step + 1] @ image)
        last = float(image.norm())
        scale = max(map(abs, [*diagonal, *beside]), default=0.0)
        if not math.isfinite(last):
            raise ModelError(
                "no-curvature",
                "the second derivatives of the loss are not finite numbers",
                fix="Look at the run: its training may have diverged.",
            )
        if step + 1 == steps or last <= 10 * torch.finfo(start.dtype).eps * max(scale, 1e-30):
            break
        beside.append(last)
        basis[step + 1] = image / last
    nodes, vectors = eigh_tridiagonal(np.array(diagonal), np.array(beside))
    return Quadrature(nodes=nodes, weights=vectors[0] ** 2, residuals=np.abs(last * vectors[-1]))


def measure_curvature(
    product: Product,
    dimension: int,
    *,
    num_vectors: int = 4,
    num_iterations: int = 40,
    num_top: int = 10,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    on_progress: Callable[[int, int], None] | None = None,
) -> Curvature:
    """Trace (Hutchinson), extreme eigenvalues and spectral density from random sign vectors.

    The first step of each Lanczos run is Hutchinson's estimate with that vector, so both share their cost:
    ``num_vectors`` times ``num_iterations`` products. The standard errors are over the vectors.
    """
    generator = torch.Generator().manual_seed(seed)
    total, done = num_vectors * min(num_iterations, dimension), 0

    def on_product() -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, total)

    runs = []
    for _ in range(num_vectors):
        signs = torch.randint(0, 2, (dimension,), generator=generator).to(dtype) * 2 - 1
        runs.append(lanczos(product, signs, num_iterations, on_product=on_product))
    if on_progress is not None and done < total:  # a Krylov space that ended early
        on_progress(total, total)
    traces = [dimension * float(run.weights @ run.nodes) for run in runs]
    shares = [float(run.weights[run.nodes < -_zero_within(run)].sum()) for run in runs]
    mass = sum(float(run.weights @ np.abs(run.nodes)) for run in runs)
    below = sum(float(run.weights @ np.maximum(-run.nodes, 0.0)) for run in runs)
    sizes = np.abs(runs[0].nodes)
    grid, density, width = spectral_density(runs)
    return Curvature(
        dimension=dimension,
        num_vectors=num_vectors,
        num_iterations=max(len(run.nodes) for run in runs),
        trace=float(np.mean(traces)),
        trace_error=_standard_error(traces),
        top_eigenvalues=_converged(runs)[:num_top],
        lowest_eigenvalue=min(float(run.nodes[0]) for run in runs),
        inverse_condition=float(sizes.min() / sizes.max()) if sizes.max() > 0 else 0.0,
        zero_within=_zero_within(runs[0]),
        negative_ritz=int((runs[0].nodes < -_zero_within(runs[0])).sum()),
        negative_share=float(np.mean(shares)),
        negative_share_error=_standard_error(shares),
        negative_mass=below / mass if mass else 0.0,
        grid=grid.tolist(),
        density=density.tolist(),
        width=width,
    )


def spectral_density(runs: Sequence[Quadrature]) -> tuple[Array, Array, float]:
    """(eigenvalues, density, width): the mean over runs, each node a Gaussian of that width."""
    low = min(float(run.nodes[0]) for run in runs)
    high = max(float(run.nodes[-1]) for run in runs)
    # about the distance between nodes: narrower bumps would show the nodes instead of the spectrum
    width = 0.6 * max(high - low, abs(high), 1e-12) / max(len(run.nodes) for run in runs)
    grid = np.linspace(low - 4 * width, high + 4 * width, _NUM_POINTS)
    density = np.zeros_like(grid)
    for run in runs:
        bumps = np.exp(-(((grid[:, None] - run.nodes) / width) ** 2) / 2) / (width * math.sqrt(2 * math.pi))
        density += bumps @ run.weights / len(runs)
    return grid, density, width


def _converged(runs: Sequence[Quadrature]) -> list[float]:
    """Eigenvalues at the upper end as the first run has them, falling, until one has not converged."""
    run = runs[0]
    tolerance = _CONVERGED * float(np.abs(run.nodes).max())
    found: list[float] = []
    for node, residual in zip(run.nodes[::-1], run.residuals[::-1], strict=True):
        if residual > tolerance or node <= 0:
            break
        found.append(float(node))
    return found or [float(run.nodes[-1])]


def _zero_within(run: Quadrature) -> float:
    """Below this size a Ritz value counts as zero."""
    return _ZERO * float(np.abs(run.nodes).max())


def _standard_error(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def curvature_result(measured: Sequence[tuple[Subject, Curvature]], losses: Sequence[float]) -> StudyResult:
    """Document and rows of all subjects."""
    nets = [
        {**subject.described(), "loss": loss, "num_negative": found.num_negative, **asdict(found)}
        for (subject, found), loss in zip(measured, losses, strict=True)
    ]
    rows = [
        {
            "net": subject.name,
            "trained": subject.trained,
            "epsilon": subject.epsilon,
            "loss": loss,
            "parameters": found.dimension,
            "trace": found.trace,
            "trace_error": found.trace_error,
            "largest_eigenvalue": found.top_eigenvalues[0],
            "lowest_eigenvalue": found.lowest_eigenvalue,
            "inverse_condition": found.inverse_condition,
            "negative_ritz": found.negative_ritz,
            "num_iterations": found.num_iterations,
            "num_negative": found.num_negative,
            "negative_share": found.negative_share,
            "negative_mass": found.negative_mass,
        }
        for (subject, found), loss in zip(measured, losses, strict=True)
    ]
    sensitive = next((subject.split for subject, _ in measured if subject.sensitive), None)
    notice = None if sensitive is None else not_private(sensitive)
    return StudyResult(study="hessian", document={"nets": nets}, rows=rows, notice=notice)


@styled
def draw_curvature(measured: Sequence[tuple[Subject, Curvature]]) -> Figure:
    """Densities over one another on a logarithmic scale, and the largest eigenvalues beside them."""
    figure, axes = new_figure(6.9, 2.7, 1, 2, gridspec_kw={"width_ratios": [1.7, 1]})
    left, right = axes[0]
    for number, (subject, found) in enumerate(measured):
        _draw_one(left, right, subject, found, number)
    # a vector resolves about one eigenvalue in ``dimension``; below that the curve shows Gaussians' tails
    floor = min(1 / (found.dimension * found.width) for _, found in measured) / 30
    peak = max(max(found.density) for _, found in measured)
    left.set(yscale="log", ylim=(max(floor, peak * 1e-9), 3 * peak), xlabel="eigenvalue $\\lambda$")
    left.set_ylabel("density of eigenvalues")
    left.axvline(0, color=INK, linewidth=0.7, linestyle=(0, (4, 2)))
    left.set_title("Spectral density", loc="left")
    left.legend()
    right.set_title("Largest eigenvalues", loc="left")
    right.set(xlabel="rank", ylabel="eigenvalue $\\lambda$")
    right.set_ylim(bottom=0)
    right.xaxis.get_major_locator().set_params(integer=True)
    right.grid(axis="y")
    return figure


def _draw_one(left: Axes, right: Axes, subject: Subject, found: Curvature, number: int) -> None:
    colour = COLOURS[number % len(COLOURS)]
    left.plot(found.grid, found.density, color=colour, linewidth=1.1, label=subject.label)
    left.fill_between(found.grid, found.density, 1e-300, color=colour, alpha=0.10, linewidth=0)
    ranks = range(1, len(found.top_eigenvalues) + 1)
    right.plot(ranks, found.top_eigenvalues, "os^Dv"[number % 5], ls="-", ms=3.5, lw=0.8, color=colour)
