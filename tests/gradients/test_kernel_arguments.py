"""The compiled functions check their arguments: what does not fit is refused, and nothing is written."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from sfumato.gradients.kernels import library
from sfumato.gradients.kernels.library import (
    Convolution,
    Doubles,
    Floats,
    Halves,
    Integers,
    Kernels,
    array,
    multiplies_pairs,
)

PATHS = library.available()
pytestmark = pytest.mark.skipif(not PATHS, reason="built without a C compiler")
UNTOUCHED = 77.0
NO_POINTER, MISALIGNED, WRONG_SIZE, OUT_OF_RANGE, UNSUPPORTED = 1, 2, 3, 4, 6
HUGE = 2**62


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def out(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, UNTOUCHED, dtype=dtype)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


SIZES_OF_A_CONVOLUTION = [name for name, _ in Convolution._fields_]
SHAPE = dict(zip(SIZES_OF_A_CONVOLUTION, [2, 1, 4, 4, 4, 4, 3, 16, 3, 3, 1, 1, 1, 1, 1, 1], strict=True))


def arguments(name: str) -> tuple[list, list[torch.Tensor]]:
    """What the function takes, and which tensors among it are results."""
    if name == "channel_sums":
        results = [out(2, 5), out(2, 5)]
        return [zeros(2, 9, 5), zeros(2, 9, 5), 2, 9, 5, *results], results
    if name == "group_norm_backward":
        results = [out(2, 9, 6), out(2, 6), out(2, 6)]
        inputs = [zeros(2, 9, 6), zeros(2, 9, 6), zeros(2, 3), zeros(2, 3), zeros(6)]
        return [*inputs, 2, 9, 6, 3, *results], results
    half = torch.bfloat16
    if name == "low_group_norm_backward":
        results = [out(2, 9, 6, dtype=half), out(2, 6), out(2, 6)]
        inputs = [zeros(2, 9, 6, dtype=half), zeros(2, 9, 6, dtype=half), zeros(2, 3), zeros(2, 3), zeros(6)]
        return [*inputs, 2, 9, 6, 3, *results], results
    if name in ("weighted_sum", "low_weighted_sum"):
        results = [out(7, dtype=torch.float64)]
        rows = torch.ones(3, 7, dtype=half if name.startswith("low") else torch.float32)
        return [rows, torch.ones(3), 3, 7, *results], results
    if name in ("low_filters", "low_filter_sum"):
        images = [torch.ones(2, 4, 4, 3, dtype=half), torch.ones(2, 4, 4, 16, dtype=half)]
        if name == "low_filter_sum":
            results = [out(3, 3, 3, 16, dtype=torch.float64)]
            return [Convolution(**SHAPE), *images, torch.ones(2), *results], results
        results = [out(2, 3, 3, 3, 16, dtype=half), out(3, 2, 3, dtype=torch.float64), out(2, 3)]
        return [Convolution(**SHAPE), *images, zeros(3, 3, 3, 16), *results], results
    if name == "filter_moments":
        results = [out(3, 2, 4, dtype=torch.float64)]
        return [zeros(2, 2, 4, 7), zeros(2, 4, 7), 2, 56, 2, 4, 7, *results], results
    if name == "unit_filters":
        results = [out(2, 3, 3, 3, 16), out(3, 2, 3, dtype=torch.float64), out(2, 3)]
        inputs = [Convolution(**SHAPE), zeros(2, 4, 4, 3), zeros(2, 4, 4, 16), zeros(3, 3, 3, 16)]
        return [*inputs, *results], results
    results = [*(out(*shape, dtype=torch.float64) for shape in ((3, 20), (3,), (4,))), out(4)]
    inputs = [zeros(9, 20), integers(0, 3, 8, 2), integers(0, 2, 1, 1), zeros(4, dtype=torch.float64)]
    return [*inputs, zeros(3, 20), zeros(3), 1.0, 4, 20, 3, *results], results


def status(name: str, passed: list, path: str) -> int:
    """What the function itself says, called without the Python side's checks."""
    kernels = PATHS[path]
    raw = (array(value) if isinstance(value, torch.Tensor) else value for value in passed)
    return getattr(kernels.library, name)(library.PATHS[path], *raw)


def refused(name: str, path: str, place: int, value: object) -> int:
    """The status with one argument replaced, which must be a refusal that leaves the results alone."""
    passed, results = arguments(name)
    passed[place] = value
    found = status(name, passed, path)
    assert found != 0
    assert all(bool((result == UNTOUCHED).all()) for result in results)
    return found


def has(kernels: Kernels, name: str) -> bool:
    """Whether a path has a function."""
    if name in ("low_filters", "low_filter_sum"):
        return multiplies_pairs(kernels)
    return bool(kernels.lanes) or name not in ("unit_filters", "head_sums")


def cases(wanted: type[ctypes.Structure] | tuple[type, ...]) -> list[tuple[str, str, int]]:
    """(function, path, place) of every argument of a type, on every path that has the function."""
    return [
        (name, path, place)
        for name, signature in library.SIGNATURES.items()
        for path, kernels in PATHS.items()
        if has(kernels, name)
        for place, kind in enumerate(signature)
        if issubclass(kind, wanted)
    ]


ARRAYS = cases((Floats, Halves, Doubles, Integers))
SIZES = cases(ctypes.c_int64)


@pytest.mark.parametrize(("name", "path"), sorted({case[:2] for case in ARRAYS}))
def test_arguments_that_fit_are_taken(name, path):
    passed, results = arguments(name)
    assert status(name, passed, path) == 0
    assert not any(bool((result == UNTOUCHED).any()) for result in results[-1:])  # control: it writes


@pytest.mark.parametrize(("name", "path", "place"), ARRAYS)
def test_every_array_is_checked(name, path, place):
    tensor = arguments(name)[0][place]
    whole = array(tensor)
    kind, count, size = type(whole), whole.count, tensor.element_size()
    shorter = refused(name, path, place, kind(whole.values, count - 1))
    assert shorter == WRONG_SIZE
    assert refused(name, path, place, kind(whole.values, -count)) == WRONG_SIZE
    assert refused(name, path, place, kind(whole.values, count + 1)) == WRONG_SIZE
    assert refused(name, path, place, kind(None, count)) == NO_POINTER
    assert refused(name, path, place, kind(whole.values + size // 2, count)) == MISALIGNED


@pytest.mark.parametrize(("name", "path", "place"), SIZES)
@pytest.mark.parametrize("wrong", [-1, HUGE, 2**63 - 1, -(2**63)])
def test_every_size_is_checked(name, path, place, wrong):
    assert refused(name, path, place, wrong) in (WRONG_SIZE, UNSUPPORTED)  # too many classes: unsupported


@pytest.mark.parametrize("path", [path for path, kernels in PATHS.items() if kernels.lanes])
@pytest.mark.parametrize("field", SIZES_OF_A_CONVOLUTION)
def test_every_size_of_a_convolution_is_checked(path, field):
    for wrong in (-1, HUGE, 2**31):
        assert refused("unit_filters", path, 0, Convolution(**SHAPE | {field: wrong})) == WRONG_SIZE
    if field not in ("units", "top", "left"):
        assert refused("unit_filters", path, 0, Convolution(**SHAPE | {field: 0})) == WRONG_SIZE
    narrow = refused("unit_filters", path, 0, Convolution(**SHAPE | {"channels": 1}))
    assert narrow == UNSUPPORTED
    assert refused("unit_filters", path, 0, None) == NO_POINTER


@pytest.mark.parametrize("path", [path for path, kernels in PATHS.items() if multiplies_pairs(kernels)])
@pytest.mark.parametrize("field", SIZES_OF_A_CONVOLUTION)
@pytest.mark.parametrize("name", ["low_filters", "low_filter_sum"])
def test_every_size_of_a_convolution_in_bfloat16_is_checked(name, path, field):
    wrong_ones = (-1, HUGE, 2**31) if field in ("units", "top", "left") else (-1, 0, HUGE, 2**31)
    for wrong in wrong_ones:
        assert refused(name, path, 0, Convolution(**SHAPE | {field: wrong})) == WRONG_SIZE
    assert refused(name, path, 0, None) == NO_POINTER


@pytest.mark.parametrize("path", [path for path, kernels in PATHS.items() if multiplies_pairs(kernels)])
def test_a_unit_too_long_for_one_stretch_is_not_summed_in_another_order(path):
    shape = Convolution(**SHAPE | {"units": 1, "height": 40, "width": 40, "filters": 1, "channels": 1})
    half, total = torch.bfloat16, out(1, 3, 3, 1, dtype=torch.float64)
    passed = [shape, zeros(1600, dtype=half), zeros(16, dtype=half), zeros(1), total]
    assert status("low_filter_sum", passed, path) == UNSUPPORTED
    assert bool((total == UNTOUCHED).all())


@pytest.mark.parametrize("path", [path for path, kernels in PATHS.items() if kernels.lanes])
def test_what_the_head_would_read_is_in_range(path):
    for wrong in (-1, 9, HUGE):
        assert refused("head_sums", path, 1, integers(0, 3, wrong, 2)) == OUT_OF_RANGE  # of 9 rows
    for wrong in (-1, 3, HUGE):
        assert refused("head_sums", path, 2, integers(0, wrong, 1, 1)) == OUT_OF_RANGE  # of 3 classes
    for wrong in (math.nan, math.inf, -1.0):
        assert refused("head_sums", path, 6, wrong) == OUT_OF_RANGE  # nothing would be clipped


@pytest.mark.parametrize("path", list(PATHS))
def test_groups_divide_the_channels(path):
    assert refused("group_norm_backward", path, 8, 4) == WRONG_SIZE
    assert refused("group_norm_backward", path, 8, 0) == WRONG_SIZE


@pytest.mark.parametrize("name", list(library.SIGNATURES))
def test_a_path_that_is_not_there_is_refused(name):
    passed, results = arguments(name)
    raw = [array(value) if isinstance(value, torch.Tensor) else value for value in passed]
    kernels = next(iter(PATHS.values()))
    absent = [99, -1, *(number for path, number in library.PATHS.items() if path not in PATHS)]
    for number in absent:
        assert kernels.library.kernels_lanes(number) == -1
        assert getattr(kernels.library, name)(number, *raw) == UNSUPPORTED
    assert all(bool((result == UNTOUCHED).all()) for result in results)


@pytest.mark.parametrize("name", list(library.SIGNATURES))
def test_a_tensor_of_another_type_is_refused(name):
    kernels = next(iter(PATHS.values()))
    passed, results = arguments(name)
    place = next(i for i, value in enumerate(passed) if isinstance(value, torch.Tensor))
    passed[place] = passed[place].double()
    with pytest.raises(ctypes.ArgumentError):
        kernels.call(name, *passed)
    passed, results = arguments(name)
    passed[place] = passed[place].flatten()[1:]
    # a processor that multiplies no pairs of bfloat16 lacks some functions, and is told so before all else
    reason = "does not fit" if has(kernels, name) else "this path does not have it"
    with pytest.raises(ValueError, match=f"{name} on .*{reason}"):
        kernels.call(name, *passed)
    assert all(bool((result == UNTOUCHED).all()) for result in results)
