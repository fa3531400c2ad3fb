"""The compiled sums equal their PyTorch forms, whatever the shapes; without them everything is the same."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from sfumato.gradients import clipped_sum, fused

needs_compiled = pytest.mark.skipif(fused._compiled() is None, reason="built without a C compiler")


@pytest.fixture
def without_compiled(monkeypatch):
    monkeypatch.setattr(fused, "_compiled", lambda: None)


def images(rows, channels, height, width, *, dtype=torch.float32, offset=0.0):
    made = torch.randn(rows, channels, height, width, dtype=dtype) + offset
    return made.to(memory_format=torch.channels_last)


shapes = st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(1, 12), st.integers(1, 12))


@needs_compiled
@given(shape=shapes, seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_channel_sums_are_those_of_float64(shape, seed):
    torch.manual_seed(seed)
    first, second = images(*shape), images(*shape)
    sums, products = fused.channel_sums(first, second)
    exact = first.double(), first.double() * second.double()
    assert_close(sums.double(), exact[0].sum(dim=(2, 3)), rtol=1e-5, atol=1e-5)
    assert_close(products.double(), exact[1].sum(dim=(2, 3)), rtol=1e-5, atol=1e-5)


@needs_compiled
@given(shape=shapes, groups=st.integers(1, 4), offset=st.sampled_from([0.0, 30.0]), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_group_norm_backward_equals_autograd_row_by_row(shape, groups, offset, seed):
    torch.manual_seed(seed)
    rows, channels, *space = shape
    if channels * math.prod(space) < 8:
        return  # of so few values a normalised gradient is mostly rounding
    x = images(rows, channels * groups, *space, offset=offset)
    g = images(rows, channels * groups, *space)
    weight = torch.rand(channels * groups) + 0.5
    exact_x = x.double().requires_grad_()
    scale = weight.double().expand(rows, -1).clone().requires_grad_()
    shift = torch.zeros_like(scale, requires_grad=True)
    plain = torch.nn.functional.group_norm(exact_x, groups)
    (plain * scale[:, :, None, None] + shift[:, :, None, None]).backward(g.double())
    _, mean, inverse = torch.native_group_norm(
        x, weight, torch.zeros_like(weight), rows, channels * groups, math.prod(space), groups, 1e-5
    )
    found = fused.group_norm_backward(g, x, mean, inverse, weight)
    # what float32 leaves of values far from zero: their mean is known to eps * offset
    tolerance = 3e-5 * (1 + offset) * float(inverse.max().clamp(min=1))
    for value, exact in zip(found, (exact_x.grad, scale.grad, shift.grad), strict=True):
        assert_close(value.double(), exact, rtol=tolerance, atol=tolerance * (1 + float(exact.abs().max())))


@needs_compiled
@given(
    parts=st.integers(1, 3),
    units=st.integers(1, 5),
    filters=st.integers(1, 9),
    length=st.integers(1, 600),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_filter_moments_are_those_of_float64(parts, units, filters, length, seed):
    torch.manual_seed(seed)
    room = torch.randn(parts, units + 2, filters, length)
    values, directions = room[:, 1:-1], torch.randn(parts, filters, length)  # some units out of many
    squares, sums, along = fused.filter_moments(values, directions)
    exact = values.double()
    assert_close(squares, exact.square().sum(dim=(0, 3)), rtol=1e-5, atol=0)
    assert_close(sums, exact.sum(dim=(0, 3)), rtol=1e-5, atol=1e-4)
    assert_close(along, (exact * directions[:, None]).sum(dim=(0, 3)), rtol=1e-5, atol=1e-4)


@needs_compiled
@given(
    units=st.integers(1, 4),
    views=st.sampled_from([1, 2, 5]),
    channels=st.integers(16, 90),
    filters=st.integers(1, 14),
    size=st.tuples(st.sampled_from([1, 4, 7, 33]), st.sampled_from([1, 5, 8, 40])),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    before=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    after=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
@settings(max_examples=80, deadline=None)
def test_each_units_filters_equal_autograd(
    units, views, channels, filters, size, kernel, stride, dilation, before, after
):
    x = images(units * views, channels, *size)
    weight = torch.randn(filters, channels, *kernel, dtype=torch.float64, requires_grad=True)
    padded = torch.nn.functional.pad(x.double(), (before[1], after[1], before[0], after[0]))
    if any(p < d * (k - 1) + 1 for p, d, k in zip(padded.shape[2:], dilation, kernel, strict=True)):
        return  # the kernel does not fit
    if not fused.offers_unit_filters(x, x):
        pytest.skip("the processor's vectors are too narrow")
    out = torch.nn.functional.conv2d(padded, weight, stride=stride, dilation=dilation)
    g = torch.randn_like(out)
    expected = torch.stack(
        [
            torch.autograd.grad(part, weight, part_g, retain_graph=True)[0]
            for part, part_g in zip(out.split(views), g.split(views), strict=True)
        ]
    )
    directions = torch.randn(filters, *kernel, channels)
    geometry = (*kernel, *stride, *dilation, *before)
    found, moments, shifts = fused.unit_filters(x, g.float(), directions, units, geometry)
    assert_close(found.double().movedim(-1, 2), expected, rtol=1e-4, atol=1e-4)
    assert_close(moments[0], expected.flatten(2).square().sum(dim=2), rtol=1e-4, atol=1e-4)
    assert_close(shifts.double(), g.unflatten(0, (units, views)).sum(dim=(1, 3, 4)), rtol=1e-4, atol=1e-4)
    along = (expected.movedim(2, -1) * directions).flatten(2).sum(dim=2)
    assert_close(moments[2], along, rtol=1e-4, atol=1e-3)


@needs_compiled
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(bad):
    values = torch.randn(1, 4, 3, 300)
    values[0, 2, 1, 17] = bad
    squares = fused.filter_moments(values, torch.randn(1, 3, 300))[0]
    assert (~squares.isfinite()).nonzero().tolist() == [[2, 1]]
    x = images(3, 8, 4, 4)
    g = images(3, 8, 4, 4)
    g[1, 2, 0, 0] = bad
    sums, _ = fused.channel_sums(g, x)
    assert (~sums.isfinite()).nonzero().tolist() == [[1, 2]]


@needs_compiled
def test_results_do_not_depend_on_the_number_of_threads():
    x, g, weight = images(7, 24, 9, 9), images(7, 24, 9, 9), torch.rand(24)
    mean, inverse = torch.randn(7, 3), torch.rand(7, 3)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(fused.group_norm_backward(g, x, mean, inverse, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def norm_net():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.GroupNorm(4, 8),
        torch.nn.ReLU(inplace=True),  # writes into the norm's output
        torch.nn.Conv2d(8, 8, 3),
        torch.nn.GroupNorm(2, 8),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 5),
    ).to(memory_format=torch.channels_last)


def test_a_net_without_the_compiled_sums_has_the_same_gradients(monkeypatch):
    model, inputs, targets = norm_net(), images(6, 3, 8, 8), torch.arange(6) % 5
    ours = clipped_sum(model, inputs, targets, clip_norm=0.5)
    asked = []
    monkeypatch.setattr(fused, "_compiled", lambda: asked.append(1))
    plain = clipped_sum(model, inputs, targets, clip_norm=0.5)
    assert_close(ours.norms, plain.norms, rtol=1e-5, atol=1e-6)
    assert_close(ours.gradients, plain.gradients, rtol=1e-4, atol=1e-6)
    assert asked  # control: the compiled sums would have been used


@needs_compiled
@pytest.mark.parametrize(("size", "views"), [(32, 1), (32, 16), (96, 4)])
def test_long_sums_keep_their_digits(size, views):
    """A constant image: every rounding goes the same way."""
    x, g = torch.full((views, 16, size, size), 0.7), torch.full((views, 6, size, size), 0.3)
    if not fused.offers_unit_filters(x, g):
        pytest.skip("the processor's vectors are too narrow")
    found = fused.unit_filters(x, g, torch.zeros(6, 1, 1, 16), 1, (1, 1, 1, 1, 1, 1, 0, 0))[0]
    exact = x[0, 0, 0, 0].double() * g[0, 0, 0, 0].double() * views * size**2
    assert_close(found.double(), exact.expand_as(found), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_left_to_pytorch(dtype):
    assert fused._library(torch.zeros(2, dtype=dtype)) is None


def test_the_pytorch_forms_are_exact_too(without_compiled):
    torch.manual_seed(0)
    first, second = images(3, 5, 4, 6, dtype=torch.float64), images(3, 5, 4, 6, dtype=torch.float64)
    sums, products = fused.channel_sums(first, second)
    assert_close(sums, first.sum(dim=(2, 3)))
    assert_close(products, (first * second).sum(dim=(2, 3)))
    values, directions = torch.randn(2, 4, 3, 7), torch.randn(2, 3, 7)
    moments = fused.filter_moments(values, directions)
    assert_close(moments[0], values.double().square().sum(dim=(0, 3)), rtol=1e-6, atol=0)
