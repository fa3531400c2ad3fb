"""The closed-form head: its sums against autograd, its bound, its noise and its accounting."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, normalize

from sfumato.bench.head import bench_head
from sfumato.gradients.kernels import library
from sfumato.randomness import SeededSource
from sfumato.training import head
from sfumato.training.head import SoftmaxRegression, private_mean


def slow_sum(rows, targets, weight, bias, clip_norm):
    """One row after another by autograd: the obvious reference."""
    total, norms = [torch.zeros_like(weight).double(), torch.zeros_like(bias).double()], []
    for row, target in zip(rows, targets, strict=True):
        w, b = weight.double().requires_grad_(), bias.double().requires_grad_()
        loss = cross_entropy(w @ row.double() + b, target)
        gradients = torch.autograd.grad(loss, (w, b))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        norms.append(norm)
        total = [a + g * min(1.0, clip_norm / norm) for a, g in zip(total, gradients, strict=True)]
    return total, torch.tensor(norms, dtype=torch.float64)


TILED = {path: kernels for path, kernels in library.available().items() if kernels.lanes}


@pytest.fixture(scope="module", params=[*TILED, "in PyTorch"], autouse=True)
def way(request):
    """Every property holds for all ways to take the sum: by each instruction set, and in PyTorch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "compiled", lambda: TILED.get(request.param))
        yield request.param


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(3)
    rows = normalize(torch.randn(37, 11, generator=generator)) * torch.linspace(0.2, 3, 37)[:, None]
    targets = torch.randint(5, (37,), generator=generator)
    weight, bias = torch.randn(5, 11, generator=generator), torch.randn(5, generator=generator)
    return rows, targets, weight, bias


def test_the_sum_is_that_of_autograd_row_by_row(problem):
    rows, targets, weight, bias = problem
    total = SoftmaxRegression(rows, targets, num_classes=5)(weight, bias, clip_norm=0.7)
    wanted, norms = slow_sum(rows, targets, weight, bias, 0.7)
    assert torch.allclose(total.norms, norms, rtol=1e-5)
    assert torch.allclose(total.gradients["weight"].double(), wanted[0], atol=1e-4)
    assert torch.allclose(total.gradients["bias"].double(), wanted[1], atol=1e-4)
    unclipped, _ = slow_sum(rows, targets, weight, bias, 1e9)
    assert not torch.allclose(total.gradients["weight"].double(), unclipped[0], atol=1e-2)


@pytest.mark.parametrize("num_classes", [1, 2, 6, 7, 13, 128])
@pytest.mark.parametrize("length", [3, 16, 47, 80, 131])
def test_the_compiled_sum_is_that_of_pytorch(way, num_classes, length, monkeypatch):
    generator = torch.Generator().manual_seed(length)
    rows = 3 * torch.randn(71, length, generator=generator)
    rows[5, 1], rows[9] = math.nan, 1e34
    targets = torch.randint(num_classes, (71,), generator=generator)
    weight = torch.randn(num_classes, length, generator=generator)
    sums, bias = SoftmaxRegression(rows, targets, num_classes=num_classes), torch.ones(num_classes)
    batch = torch.randperm(71, generator=generator)[:50].sort().values
    for indices in (None, batch, batch[:3]):
        one = sums(weight, bias, clip_norm=2.0, indices=indices)
        with monkeypatch.context() as patch:
            patch.setattr(head, "offers_head_sums", lambda *_: False)
            other = sums(weight, bias, clip_norm=2.0, indices=indices)
        for name, value in other.gradients.items():
            assert torch.allclose(one.gradients[name], value, rtol=1e-4, atol=1e-4)
        assert torch.allclose(one.norms, other.norms, rtol=1e-4, atol=1e-5, equal_nan=True)
        counts = one.norms.isfinite()
        assert torch.allclose(one.losses[counts], other.losses[counts], rtol=1e-4, atol=1e-4)
    if num_classes > 1:
        fewer = sums(weight, bias, clip_norm=2.0, indices=batch[10:]).gradients["weight"]
        whole = sums(weight, bias, clip_norm=2.0, indices=batch).gradients["weight"]
        assert not torch.allclose(fewer, whole, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused_before_memory_is_touched(problem):
    rows, targets, weight, bias = problem
    with pytest.raises(ValueError, match="targets"):
        SoftmaxRegression(rows, targets + 3, num_classes=5)
    sums = SoftmaxRegression(rows, targets, num_classes=5)
    with pytest.raises(ValueError, match="do not fit"):
        sums(weight[:, :-1], bias, clip_norm=1.0)
    for wrong in (-1, 37):
        with pytest.raises(IndexError):
            sums(weight, bias, clip_norm=1.0, indices=torch.tensor([wrong]))
    for clip in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(ValueError, match="clip_norm"):
            sums(weight, bias, clip_norm=clip)


def test_other_integers_and_a_transposed_weight_give_the_same_sum(problem):
    rows, targets, weight, bias = problem
    wanted = SoftmaxRegression(rows, targets, num_classes=5)(weight, bias, clip_norm=0.7).gradients["weight"]
    turned = weight.T.contiguous().T
    few = SoftmaxRegression(rows, targets.int(), num_classes=5)
    found = few(turned, bias, clip_norm=0.7, indices=torch.arange(37, dtype=torch.int32))
    assert torch.allclose(found.gradients["weight"], wanted, atol=1e-5)


def test_a_batch_is_the_sum_over_its_units_alone(problem):
    rows, targets, weight, bias = problem
    sums = SoftmaxRegression(rows, targets, num_classes=5)
    first = sums(weight, bias, clip_norm=1.0, indices=torch.arange(0, 20))
    second = sums(weight, bias, clip_norm=1.0, indices=torch.arange(20, 37))
    whole = sums(weight, bias, clip_norm=1.0)
    assert torch.allclose((first + second).gradients["weight"], whole.gradients["weight"], atol=1e-5)
    assert not torch.allclose(first.gradients["weight"], whole.gradients["weight"], atol=1e-2)
    empty = sums(weight, bias, clip_norm=1.0, indices=torch.arange(0))
    assert empty.gradients["weight"].abs().sum() == 0
    assert empty.sensitivity == 1.0


@pytest.mark.parametrize("batch", [None, torch.arange(0, 37, 2)])
def test_pieces_shared_among_workers_give_the_same_sum_and_every_row_once(problem, monkeypatch, batch):
    rows, targets, weight, bias = problem
    sums = SoftmaxRegression(rows, targets, num_classes=5)
    whole = sums(weight, bias, clip_norm=0.7, indices=batch)
    monkeypatch.setattr(head, "piece_rows", lambda _: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shared = sums(weight, bias, clip_norm=0.7, indices=batch)
    assert torch.allclose(shared.norms, whole.norms, rtol=1e-5)
    assert torch.allclose(shared.losses, whole.losses)
    assert torch.allclose(shared.gradients["weight"], whole.gradients["weight"], atol=1e-5)
    fewer = sums(weight, bias, clip_norm=0.7, indices=torch.arange(36))
    assert not torch.allclose(shared.gradients["weight"], fewer.gradients["weight"], atol=1e-3)


def length(total) -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in total.gradients.values()))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), exponent=st.floats(-3, 38), clip_exponent=st.floats(-15, 1))
def test_one_row_moves_the_sum_by_at_most_the_clip_norm(seed, exponent, clip_exponent):
    clip = 10.0**clip_exponent
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(6, 300, generator=generator) * 10.0**exponent
    targets = torch.randint(10, (6,), generator=generator)
    weight, bias = torch.randn(10, 300, generator=generator), torch.randn(10, generator=generator)
    sums, chosen = SoftmaxRegression(rows, targets, num_classes=10), torch.tensor([0])
    moved = length(sums(weight, bias, clip_norm=clip, indices=chosen))
    assert moved <= clip
    raw = length(sums(weight, bias, clip_norm=1e35, indices=chosen))
    if raw > clip * 1.01:  # without the clip the bound would be broken
        assert moved < raw


def test_a_row_too_long_for_exact_factors_counts_as_zero(monkeypatch):
    rows, targets = torch.full((1, 400), 3e36), torch.zeros(1, dtype=torch.int64)
    weight, bias = torch.zeros(2, 400), torch.zeros(2)
    assert length(SoftmaxRegression(rows, targets, num_classes=2)(weight, bias, clip_norm=0.01)) == 0
    monkeypatch.setattr(head, "_LARGEST_NORM", math.inf)
    assert length(SoftmaxRegression(rows, targets, num_classes=2)(weight, bias, clip_norm=0.01)) > 0.01 * (
        1 + 1e-6
    )


def test_a_row_that_is_not_finite_counts_as_zero(problem):
    rows, targets, weight, bias = problem
    poisoned = rows.clone()
    poisoned[4, 2], poisoned[9, 0] = math.nan, math.inf
    kept = torch.tensor([i for i in range(37) if i not in (4, 9)])
    clean = SoftmaxRegression(rows[kept], targets[kept], num_classes=5)(weight, bias, clip_norm=1.0)
    total = SoftmaxRegression(poisoned, targets, num_classes=5)(weight, bias, clip_norm=1.0)
    assert torch.allclose(total.gradients["weight"], clean.gradients["weight"], atol=1e-5)
    assert not torch.allclose(
        SoftmaxRegression(rows, targets, num_classes=5)(weight, bias, clip_norm=1.0).gradients["weight"],
        clean.gradients["weight"],
        atol=1e-5,
    )


def test_the_private_mean_is_the_mean_of_bounded_rows_plus_the_stated_noise():
    generator = torch.Generator().manual_seed(0)
    rows = normalize(torch.randn(500, 4000, generator=generator)) * 0.8
    rows[0] *= 1e6  # one row cannot move the mean by more than 1/500
    bounded = rows / rows.norm(dim=1, keepdim=True).clamp_min(1)
    released = private_mean(rows, noise_multiplier=7.0, source=SeededSource(1))
    noise = (released - bounded.mean(0)).double() * 500
    assert noise.std().item() == pytest.approx(7.0, rel=0.05)
    assert noise.std().item() != pytest.approx(8.0, rel=0.05)


def test_a_patient_with_many_images_moves_the_mean_no_further_than_one_with_one():
    rows = torch.zeros(101, 50)
    rows[:100, 0] = 1.0  # patient 0 has 100 images, patient 1 has one
    units = torch.cat([torch.zeros(100, dtype=torch.int64), torch.ones(1, dtype=torch.int64)])
    released = private_mean(rows, noise_multiplier=1e-4, source=SeededSource(1), unit_index=units)
    assert released[0].item() == pytest.approx(0.5, abs=1e-3)
    assert private_mean(rows, noise_multiplier=1e-4, source=SeededSource(1))[0].item() > 0.9


@pytest.mark.parametrize("images", [1, 3, 7, 10, 41, 97])
def test_no_rounding_lets_a_patients_rows_add_up_to_more_than_one(images, monkeypatch):
    sums = []
    monkeypatch.setattr(head, "add_noise", lambda values, **_: sums.append(values["mean"]) or values)
    units = torch.zeros(images, dtype=torch.int64)
    for row in ([1.0, 0.0], [0.6, 0.8], [3.0, 4.0], [0.1, 30.0]):
        private_mean(
            torch.tensor([row] * images), noise_multiplier=1.0, source=SeededSource(1), unit_index=units
        )
    assert all(1 - 1e-6 < total.norm().item() <= 1 for total in sums)


def test_shares_in_float32_would_add_up_to_more_than_one():
    """Control: three times a third of float32 is above 1, and so is that of other numbers."""
    assert (3 * (1 / torch.tensor(3.0)).double()).item() > 1


def test_the_bench_says_what_limits_it_and_how_near_it_comes():
    few = bench_head(num_examples=3000, num_features=512, num_classes=2, batch_size=2000, rounds=1)
    many = bench_head(num_examples=300, num_features=64, num_classes=2000, batch_size=300, rounds=1)
    assert many["limited_by"] == "matrix products"  # 2,000 products for each number that is read
    for result in (few, many):
        bound = "gflops" if result["limited_by"] == "matrix products" else "gb_per_second"
        best = "matmul_gflops" if bound == "gflops" else "bandwidth_gb_per_second"
        assert result["share_of_limit"] == pytest.approx(result[bound] / result[best])
