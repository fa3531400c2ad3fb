"""The compiled sums equal their PyTorch forms on every path, whatever the shapes; so does a whole net."""

import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from sfumato.errors import ConfigError
from sfumato.gradients import clipped_sum, kernels
from sfumato.gradients.kernels import library

PATHS = library.available()  # every instruction set that this build has and this processor can run
TILED = [path for path, kernels in PATHS.items() if kernels.lanes]
on_every_path = pytest.mark.parametrize("path", list(PATHS))
on_tiled_paths = pytest.mark.parametrize("path", TILED)


@contextmanager
def using(path):
    """The compiled sums by one path; None: those of PyTorch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "compiled", lambda: PATHS.get(path))
        yield


def images(rows, channels, height, width, *, dtype=torch.float32, offset=0.0):
    made = torch.randn(rows, channels, height, width, dtype=dtype) + offset
    return made.to(memory_format=torch.channels_last)


shapes = st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(1, 12), st.integers(1, 12))


@on_every_path
@given(shape=shapes, seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_channel_sums_are_those_of_float64(path, shape, seed):
    torch.manual_seed(seed)
    first, second = images(*shape), images(*shape)
    with using(path):
        sums, products = kernels.channel_sums(first, second)
    exact = first.double(), first.double() * second.double()
    assert_close(sums.double(), exact[0].sum(dim=(2, 3)), rtol=1e-5, atol=1e-5)
    assert_close(products.double(), exact[1].sum(dim=(2, 3)), rtol=1e-5, atol=1e-5)


@on_every_path
@given(shape=shapes, groups=st.integers(1, 4), offset=st.sampled_from([0.0, 30.0]), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_group_norm_backward_equals_autograd_row_by_row(path, shape, groups, offset, seed):
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
    with using(path):
        found = kernels.group_norm_backward(g, x, mean, inverse, weight)
    # what float32 leaves of values far from zero: their mean is known to eps * offset
    tolerance = 3e-5 * (1 + offset) * float(inverse.max().clamp(min=1))
    for value, exact in zip(found, (exact_x.grad, scale.grad, shift.grad), strict=True):
        assert_close(value.double(), exact, rtol=tolerance, atol=tolerance * (1 + float(exact.abs().max())))


@on_every_path
@given(
    parts=st.integers(1, 3),
    units=st.integers(1, 5),
    filters=st.integers(1, 9),
    length=st.integers(1, 600),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_filter_moments_are_those_of_float64(path, parts, units, filters, length, seed):
    torch.manual_seed(seed)
    room = torch.randn(parts, units + 2, filters, length)
    values, directions = room[:, 1:-1], torch.randn(parts, filters, length)  # some units out of many
    with using(path):
        squares, sums, along = kernels.filter_moments(values, directions)
    exact = values.double()
    assert_close(squares, exact.square().sum(dim=(0, 3)), rtol=1e-5, atol=0)
    assert_close(sums, exact.sum(dim=(0, 3)), rtol=1e-5, atol=1e-4)
    assert_close(along, (exact * directions[:, None]).sum(dim=(0, 3)), rtol=1e-5, atol=1e-4)


@on_tiled_paths
@given(
    units=st.integers(1, 4),
    views=st.sampled_from([1, 2, 5]),
    more_channels=st.integers(0, 74),
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
    path, units, views, more_channels, filters, size, kernel, stride, dilation, before, after
):
    channels = PATHS[path].lanes + more_channels
    x = images(units * views, channels, *size)
    weight = torch.randn(filters, channels, *kernel, dtype=torch.float64, requires_grad=True)
    padded = torch.nn.functional.pad(x.double(), (before[1], after[1], before[0], after[0]))
    if any(p < d * (k - 1) + 1 for p, d, k in zip(padded.shape[2:], dilation, kernel, strict=True)):
        return  # the kernel does not fit
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
    with using(path):
        assert kernels.offers_unit_filters(x, x)
        found, moments, shifts = kernels.unit_filters(x, g.float(), directions, units, geometry)
    assert_close(found.double().movedim(-1, 2), expected, rtol=1e-4, atol=1e-4)
    assert_close(moments[0], expected.flatten(2).square().sum(dim=2), rtol=1e-4, atol=1e-4)
    assert_close(shifts.double(), g.unflatten(0, (units, views)).sum(dim=(1, 3, 4)), rtol=1e-4, atol=1e-4)
    along = (expected.movedim(2, -1) * directions).flatten(2).sum(dim=2)
    assert_close(moments[2], along, rtol=1e-4, atol=1e-3)


@on_every_path
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(path, bad):
    values = torch.randn(1, 4, 3, 300)
    values[0, 2, 1, 17] = bad
    with using(path):
        squares = kernels.filter_moments(values, torch.randn(1, 3, 300))[0]
    assert (~squares.isfinite()).nonzero().tolist() == [[2, 1]]
    x = images(3, 8, 4, 4)
    g = images(3, 8, 4, 4)
    g[1, 2, 0, 0] = bad
    with using(path):
        sums, _ = kernels.channel_sums(g, x)
    assert (~sums.isfinite()).nonzero().tolist() == [[1, 2]]


@on_every_path
def test_results_do_not_depend_on_the_number_of_threads(path):
    x, g, weight = images(7, 24, 9, 9), images(7, 24, 9, 9), torch.rand(24)
    mean, inverse = torch.randn(7, 3), torch.rand(7, 3)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with using(path):
                results.append(kernels.group_norm_backward(g, x, mean, inverse, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def norm_net():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.GroupNorm(4, 8),
        torch.nn.ReLU(inplace=True),  # writes into the norm's output
        torch.nn.Conv2d(8, 16, 3),
        torch.nn.GroupNorm(2, 16),
        torch.nn.Conv2d(16, 5, 3, stride=2),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(5, 5),
    ).to(memory_format=torch.channels_last)


@on_every_path
def test_a_net_has_the_same_gradients_on_every_path_and_without(path, monkeypatch):
    model, inputs, targets = norm_net(), images(6, 3, 8, 8), torch.arange(6) % 5
    called, call = [], library.Kernels.call
    with using(None):
        plain = clipped_sum(model, inputs, targets, clip_norm=0.5)
    monkeypatch.setattr(library.Kernels, "call", lambda self, *a: (called.append(self.path), call(self, *a)))
    with using(path):
        ours = clipped_sum(model, inputs, targets, clip_norm=0.5)
    assert_close(ours.norms, plain.norms, rtol=1e-5, atol=1e-6)
    assert_close(ours.gradients, plain.gradients, rtol=1e-4, atol=1e-6)
    assert set(called) == {path}  # control: the compiled sums were used, and no other path's


@on_tiled_paths
@pytest.mark.parametrize(("size", "views"), [(32, 1), (32, 16), (96, 4)])
def test_long_sums_keep_their_digits(path, size, views):
    """A constant image: every rounding goes the same way."""
    x, g = torch.full((views, 16, size, size), 0.7), torch.full((views, 6, size, size), 0.3)
    with using(path):
        found = kernels.unit_filters(x, g, torch.zeros(6, 1, 1, 16), 1, (1, 1, 1, 1, 1, 1, 0, 0))[0]
    exact = x[0, 0, 0, 0].double() * g[0, 0, 0, 0].double() * views * size**2
    assert_close(found.double(), exact.expand_as(found), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_left_to_pytorch(dtype):
    assert library.kernels_for(torch.zeros(2, dtype=dtype)) is None


def test_the_pytorch_forms_are_exact_too():
    torch.manual_seed(0)
    first, second = images(3, 5, 4, 6, dtype=torch.float64), images(3, 5, 4, 6, dtype=torch.float64)
    values, directions = torch.randn(2, 4, 3, 7), torch.randn(2, 3, 7)
    with using(None):
        sums, products = kernels.channel_sums(first, second)
        moments = kernels.filter_moments(values, directions)
    assert_close(sums, first.sum(dim=(2, 3)))
    assert_close(products, (first * second).sum(dim=(2, 3)))
    assert_close(moments[0], values.double().square().sum(dim=(0, 3)), rtol=1e-6, atol=0)


@on_every_path
def test_a_path_without_tiles_does_not_offer_them(path):
    x, rows, weight = torch.zeros(1, 16, 2, 2), torch.zeros(3, 16), torch.zeros(2, 16)
    with using(path):
        tiled = path in TILED
        assert (
            kernels.offers_unit_filters(x, x) == kernels.offers_head_sums(rows, weight, weight[:, 0]) == tiled
        )
        too_narrow = x[:, : max(PATHS[path].lanes - 1, 0)]
        assert not kernels.offers_unit_filters(too_narrow, x)
        with pytest.raises(ValueError, match="does not have it"):
            kernels.unit_filters(
                too_narrow, x, torch.zeros(16, 1, 1, too_narrow.shape[1]), 1, (1,) * 6 + (0,) * 2
            )


def test_the_environment_names_the_path(monkeypatch):
    choose = library.compiled.__wrapped__
    for path in PATHS:
        monkeypatch.setenv("SFUMATO_KERNELS", path)
        assert choose().path == path
    monkeypatch.setenv("SFUMATO_KERNELS", "none")
    assert choose() is None
    monkeypatch.delenv("SFUMATO_KERNELS")
    assert (choose().path if PATHS else choose()) == next(iter(PATHS), None)  # the best
    monkeypatch.setenv("SFUMATO_KERNELS", "mmx")
    with pytest.raises(ConfigError, match="no-kernels") as error:
        choose()
    assert all(path in error.value.fix for path in (*PATHS, "none"))


def test_a_library_of_another_version_is_not_called(monkeypatch):
    monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    assert not library.available.__wrapped__()
