"""The Hessian of quadratics with known spectra, and of a small net against differences of gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import eigh_tridiagonal
from test_activations import subject_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.errors import ModelError
from sfumato.study.curvature import (
    curvature_result,
    draw_curvature,
    hessian_product,
    lanczos,
    measure_curvature,
    spectral_density,
)

EIGENVALUES = [-3.0, -1.0, -0.5, 0.0, 0.25, 1.0, 2.0, 4.0, 10.0, 30.0]


def rotated(eigenvalues: list[float], seed: int = 1) -> Tensor:
    """A symmetric matrix with these eigenvalues and random eigenvectors."""
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64, generator=generator)
    vectors = torch.linalg.qr(square).Q
    return vectors @ torch.tensor(eigenvalues, dtype=torch.float64).diag() @ vectors.T


def test_a_quadratic_is_known_exactly() -> None:
    matrix = torch.tensor(EIGENVALUES, dtype=torch.float64).diag()
    found = measure_curvature(lambda v: matrix @ v, 10, num_vectors=3, dtype=torch.float64)
    assert found.trace == pytest.approx(sum(EIGENVALUES))  # sign vectors: exact for a diagonal matrix
    assert found.trace_error == pytest.approx(0, abs=1e-9)
    assert found.top_eigenvalues == pytest.approx([30, 10, 4, 2, 1, 0.25])
    assert found.lowest_eigenvalue == pytest.approx(-3)
    assert found.negative_ritz == 3
    assert found.num_negative == pytest.approx(3)
    assert found.negative_mass == pytest.approx(4.5 / 51.75)
    assert found.inverse_condition == pytest.approx(0, abs=1e-9)  # one eigenvalue is zero
    other = measure_curvature(lambda v: -(matrix @ v), 10, dtype=torch.float64)  # the control
    assert other.num_negative == pytest.approx(6)


def test_any_axes_give_the_same_spectrum_and_the_trace_within_its_error() -> None:
    matrix = rotated(EIGENVALUES)
    found = measure_curvature(lambda v: matrix @ v, 10, num_vectors=200, dtype=torch.float64)
    assert found.top_eigenvalues == pytest.approx([30, 10, 4, 2, 1, 0.25])
    assert found.trace_error is not None
    assert abs(found.trace - sum(EIGENVALUES)) < 4 * found.trace_error < 0.4 * sum(EIGENVALUES)
    assert found.num_negative == pytest.approx(3, abs=0.5)


def test_the_density_has_the_moments_of_the_spectrum() -> None:
    matrix = torch.tensor(EIGENVALUES, dtype=torch.float64).diag()
    found = measure_curvature(lambda v: matrix @ v, 10, num_vectors=1, dtype=torch.float64)
    grid, density = np.array(found.grid), np.array(found.density)
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-3)
    assert np.trapezoid(density * grid, grid) == pytest.approx(np.mean(EIGENVALUES), abs=0.05)
    spread = np.trapezoid(density * (grid - np.mean(EIGENVALUES)) ** 2, grid)
    assert spread == pytest.approx(np.var(EIGENVALUES) + found.width**2, rel=0.02)


def plain_lanczos(matrix: Tensor, start: Tensor, steps: int) -> np.ndarray:
    """The textbook's three-term recurrence, whose basis does not stay orthogonal."""
    before, vector, beta = torch.zeros_like(start), start / start.norm(), 0.0
    diagonal, beside = [], []
    for _ in range(steps):
        image = matrix @ vector - beta * before
        diagonal.append(float(image @ vector))
        image = image - diagonal[-1] * vector
        beta = float(image.norm())
        beside.append(beta)
        before, vector = vector, image / beta
    return eigh_tridiagonal(np.array(diagonal), np.array(beside[:-1]))[0]


def test_no_eigenvalue_is_found_twice() -> None:
    values = torch.cat([torch.linspace(-1, 1, 199), torch.tensor([100.0])])
    matrix, start = values.diag(), torch.ones(200)
    nodes = lanczos(lambda v: matrix @ v, start, 60).nodes
    assert (nodes > 50).sum() == 1
    assert (plain_lanczos(matrix, start, 60) > 50).sum() > 1  # the control: without orthogonalisation


def test_an_exhausted_space_ends_the_iteration() -> None:
    found = lanczos(lambda v: 5 * v, torch.ones(30), 20)
    assert found.nodes == pytest.approx([5])
    grid, density, _ = spectral_density([found])
    assert grid[np.argmax(density)] == pytest.approx(5, abs=0.1)


def small_net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.GroupNorm(1, 2), nn.Mish(), nn.Flatten(), nn.Linear(8, 3)
        ).double()


def test_the_product_is_the_difference_of_gradients() -> None:
    model, generator = small_net(), torch.Generator().manual_seed(2)
    inputs = torch.randn(5, 1, 3, 3, dtype=torch.float64, generator=generator)
    subject = subject_of(model, inputs)
    subject.labels[2:] = 2
    product, dimension = hessian_product(subject, batch_size=2)
    vector = torch.randn(dimension, dtype=torch.float64, generator=generator)
    parameters = list(model.parameters())
    centre = nn.utils.parameters_to_vector(parameters).detach()

    def gradient_at(weights: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(weights, parameters)
        loss = cross_entropy(model(inputs), subject.labels)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])

    step = 1e-5
    expected = (gradient_at(centre + step * vector) - gradient_at(centre - step * vector)) / (2 * step)
    nn.utils.vector_to_parameters(centre, parameters)
    torch.testing.assert_close(product(vector), expected, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(product(vector), 2 * expected)  # the control


def test_curvature_of_nets_is_written_and_drawn(tmp_path) -> None:
    subject = subject_of(small_net().float(), torch.randn(4, 1, 3, 3))
    product, dimension = hessian_product(subject)
    seen: list[tuple[int, int]] = []
    found = measure_curvature(
        product, dimension, num_iterations=5, on_progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (20, 20)
    result = curvature_result([(subject, found)], [subject.loss()])
    assert result.rows[0]["parameters"] == dimension == 41
    draw_curvature([(subject, found)]).savefig(tmp_path / "figure.png")


def test_a_diverged_net_is_refused() -> None:
    with pytest.raises(ModelError, match="no-curvature"):
        lanczos(lambda v: v * torch.nan, torch.ones(4), 3)
