"""The compiled sums of bfloat16 images: exact sums of what was rounded, and the moments of what is summed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import PATHS, images, using
from torch.testing import assert_close

from sfumato.gradients import kernels
from sfumato.gradients.kernels import library

PAIRED = [path for path, found in PATHS.items() if library.multiplies_pairs(found)]
on_every_path = pytest.mark.parametrize("path", list(PATHS))
on_paired_paths = pytest.mark.parametrize("path", PAIRED)
STEP = 2.0**-8  # of bfloat16, relative

geometries = st.fixed_dictionaries(
    {
        "units": st.integers(1, 18),
        "views": st.sampled_from([1, 2, 5]),
        "channels": st.sampled_from([1, 3, 16, 17, 64, 70, 130]),
        "filters": st.integers(1, 14),
        "size": st.tuples(st.sampled_from([1, 4, 7, 40]), st.sampled_from([1, 5, 8, 40])),
        "kernel": st.tuples(st.integers(1, 4), st.integers(1, 4)),
        "stride": st.tuples(st.integers(1, 3), st.integers(1, 3)),
        "dilation": st.tuples(st.integers(1, 2), st.integers(1, 2)),
        "before": st.tuples(st.integers(0, 3), st.integers(0, 3)),
        "after": st.tuples(st.integers(0, 3), st.integers(0, 3)),
    }
)


def low(*shape: int) -> torch.Tensor:
    return images(*shape).bfloat16()


def case(units, views, channels, filters, size, kernel, stride, dilation, before, after):
    """Images in bfloat16, each unit's weight gradient by float64 autograd of them, and the geometry."""
    x = low(units * views, channels, *size)
    weight = torch.zeros(filters, channels, *kernel, dtype=torch.float64, requires_grad=True)
    padded = torch.nn.functional.pad(x.double(), (before[1], after[1], before[0], after[0]))
    if any(p < d * (k - 1) + 1 for p, d, k in zip(padded.shape[2:], dilation, kernel, strict=True)):
        return None  # the kernel does not fit
    out = torch.nn.functional.conv2d(padded, weight, stride=stride, dilation=dilation)
    g = torch.randn_like(out).bfloat16()
    pairs = zip(out.split(views), g.double().split(views), strict=True)
    each = [torch.autograd.grad(part, weight, part_g, retain_graph=True)[0] for part, part_g in pairs]
    return x, g, torch.stack(each).movedim(2, -1), (*kernel, *stride, *dilation, *before)


@on_paired_paths
@given(shape=geometries, seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_each_units_filters_equal_autograd_and_moments_are_of_what_is_kept(path, shape, seed):
    torch.manual_seed(seed)
    made = case(**shape)
    if made is None:
        return
    x, g, expected, geometry = made
    directions = torch.randn(expected.shape[1:])
    with using(path):
        assert kernels.offers_low_filters(x, g)
        kept, moments, shifts = kernels.low_filters(x, g, directions, shape["units"], geometry)
        empty, again, _ = kernels.low_filters(x, g, directions, shape["units"], geometry, keep=False)
    size = float(expected.abs().max()) + 1
    assert_close(kept.double(), expected, rtol=STEP, atol=1e-4 * size)
    assert not empty.numel()
    assert torch.equal(moments, again)  # of the same gradients, kept or not
    of = kept.double()
    assert_close(moments[0], of.flatten(2).square().sum(dim=2), rtol=1e-5, atol=1e-4)
    assert_close(moments[1], of.flatten(2).sum(dim=2), rtol=1e-4, atol=1e-3 * size)
    assert_close(moments[2], (of * directions).flatten(2).sum(dim=2), rtol=1e-4, atol=1e-3 * size)
    sums = g.double().unflatten(0, (shape["units"], shape["views"])).sum(dim=(1, 3, 4))
    assert_close(shifts.double(), sums, rtol=1e-5, atol=1e-4)


@on_paired_paths
def test_moments_of_the_unrounded_gradient_would_not_be_those_of_what_is_kept(path):
    """Control for the test above: rounding moves single norms by more than it allows."""
    torch.manual_seed(0)
    x, g = low(1, 16, 4, 4), low(1, 1, 4, 4)
    with using(path):
        kept, moments, _ = kernels.low_filters(x, g, torch.zeros(1, 1, 1, 16), 1, (1, 1, 1, 1, 1, 1, 0, 0))
    exact = torch.einsum("fyx,cyx->fc", g[0].double(), x[0].double()).square().sum()
    assert_close(moments[0, 0, 0], kept.double().square().sum(), rtol=1e-6, atol=0)
    assert abs(float(exact / moments[0, 0, 0]) - 1) > 1e-5


@on_paired_paths
@given(shape=geometries, seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_the_second_pass_sums_the_gradients_whose_moments_the_first_gave(path, shape, seed):
    torch.manual_seed(seed)
    made = case(**shape)
    if made is None:
        return
    x, g, expected, geometry = made
    units = shape["units"]
    factors = torch.rand(units) * (torch.arange(units) % 3 > 0)
    total = torch.ones(expected.shape[1:], dtype=torch.float64)
    with using(path):
        if not kernels.offers_low_filter_sum(x, g, shape["views"]):
            with pytest.raises(ValueError, match="does not have it"):
                kernels.low_filter_sum(x, g, factors, geometry, total)
            return
        kernels.low_filter_sum(x, g, factors, geometry, total)
        kept = kernels.low_filters(x, g, torch.zeros(expected.shape[1:]), units, geometry)[0]
    exact = torch.einsum("u,u...->...", factors.double(), kept.double()) + 1
    assert_close(total, exact, rtol=1e-6, atol=1e-6 * (1 + float(expected.abs().max())))


@on_paired_paths
def test_both_passes_form_the_same_bits(path):
    """One unit of factor 1: its sum has exactly the norm that the first pass says, where terms cancel too."""
    torch.manual_seed(0)
    x, g = low(1, 64, 8, 8), low(1, 16, 8, 8)
    g[:, :, 4:] = -g[:, :, :4] * 1.0078125
    x[:, :, 4:] = x[:, :, :4]
    total = torch.zeros(16, 3, 3, 64, dtype=torch.float64)
    geometry = (3, 3, 1, 1, 1, 1, 1, 1)
    with using(path):
        kernels.low_filter_sum(x * 1000, g, torch.ones(1), geometry, total)
        moments = kernels.low_filters(x * 1000, g, torch.zeros(16, 3, 3, 64), 1, geometry, keep=False)[1]
    assert torch.equal(total, total.float().double())  # nothing was added in between
    assert_close(moments[0, 0], total.flatten(1).square().sum(dim=1), rtol=2e-7, atol=0)


@on_paired_paths
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_unit_that_is_not_finite_shows_in_its_norm_and_is_not_read_at_factor_zero(path, bad):
    x, g = low(3, 16, 4, 4), low(3, 5, 4, 4)
    g[1, 2, 0, 0] = bad
    total, geometry = torch.zeros(5, 1, 1, 16, dtype=torch.float64), (1, 1, 1, 1, 1, 1, 0, 0)
    with using(path):
        kept, moments, _ = kernels.low_filters(x, g, torch.zeros(5, 1, 1, 16), 3, geometry)
        kernels.low_filter_sum(x, g, torch.tensor([1.0, 0.0, 1.0]), geometry, total)
        rows = kernels.weighted_rows(kept.flatten(1), torch.tensor([1.0, 0.0, 1.0]))
    assert (~moments[0].isfinite()).nonzero().tolist() == [[1, 2]]
    assert total.isfinite().all()
    assert rows.isfinite().all()


@on_paired_paths
def test_results_do_not_depend_on_the_number_of_threads(path):
    torch.manual_seed(0)
    x, g, geometry = low(21, 32, 6, 6), low(21, 14, 6, 6), (3, 3, 1, 1, 1, 1, 1, 1)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            total = torch.zeros(14, 3, 3, 32, dtype=torch.float64)
            with using(path):
                kernels.low_filter_sum(x, g, torch.linspace(0, 1, 21), geometry, total)
                results.append((total, *kernels.low_filters(x, g, torch.ones(14, 3, 3, 32), 21, geometry)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@on_every_path
@given(
    units=st.integers(1, 20),
    length=st.integers(1, 5000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=30, deadline=None)
def test_weighted_rows_are_those_of_float64(path, units, length, dtype):
    torch.manual_seed(units)
    rows, factors = torch.randn(units, length).to(dtype), torch.rand(units) * (torch.arange(units) % 4 > 0)
    with using(path):
        found = kernels.weighted_rows(rows, factors.double())
    assert_close(found, factors.double() @ rows.double(), rtol=1e-5, atol=1e-5)


@on_every_path
@given(shape=st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9)))
@settings(max_examples=30, deadline=None)
def test_group_norm_of_bfloat16_images_is_that_of_the_same_numbers_in_float32(path, shape):
    torch.manual_seed(0)
    rows, channels, height, width = shape
    x, g, weight = low(rows, 2 * channels, height, width), low(rows, 2 * channels, height, width), None
    weight = torch.rand(2 * channels) + 0.5
    mean, inverse = torch.randn(rows, 2), torch.rand(rows, 2) + 0.5
    with using(path):
        found = kernels.group_norm_backward(g, x, mean, inverse, weight)
        wide = kernels.group_norm_backward(g.float(), x.float(), mean, inverse, weight)
    with using(None):
        plain = kernels.group_norm_backward(g, x, mean, inverse, weight)
    assert found[0].dtype == plain[0].dtype == torch.bfloat16
    assert torch.equal(found[0], wide[0].bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(found[1:], wide[1:], strict=True))
    assert_close(found[0].float(), plain[0].float(), rtol=2 * STEP, atol=1e-4)
    assert_close(found[1:], plain[1:], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("path", [path for path in PATHS if path not in PAIRED])
def test_a_path_without_products_of_pairs_does_not_offer_them(path):
    x = torch.zeros(1, 16, 2, 2, dtype=torch.bfloat16)
    with using(path):
        assert not kernels.offers_low_filters(x, x)
        with pytest.raises(ValueError, match="does not have it"):
            kernels.low_filters(x, x, torch.zeros(16, 1, 1, 16), 1, (1,) * 6 + (0,) * 2)


def test_halves_are_rounded_to_the_nearest():
    """By the compiled rounding of group norm, of every kind of number."""
    values = torch.tensor([1.0, 1.00390625, 1.01171875, 3e38, 3.4e38, 1e-40, -2.5, math.inf, math.nan])
    ones = torch.ones(1)
    for path in PATHS:
        with using(path):
            wide = values.bfloat16().view(-1, 1, 1, 1).to(memory_format=torch.channels_last)
            zero = torch.zeros_like(wide)
            scale = torch.full((len(values), 1), 0.99)  # the product is no bfloat16
            found = kernels.group_norm_backward(wide, zero, torch.zeros(len(values), 1), scale, ones)[0]
            exact = kernels.group_norm_backward(wide.float(), zero.float(), scale * 0, scale, ones)[0]
        assert_close(found, exact.bfloat16(), rtol=0, atol=0, equal_nan=True)
