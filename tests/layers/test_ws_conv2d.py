"""Weight-standardised convolution against its formula, written out."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sfumato.layers import WSConv2d, same_padding


def standardised_by_hand(weight: torch.Tensor, gain: torch.Tensor, eps: float = 1e-4) -> torch.Tensor:
    filters = []
    for w, g in zip(weight, gain.flatten(), strict=True):
        mean = w.sum() / w.numel()
        variance = ((w - mean) ** 2).sum() / w.numel()
        filters.append(g * (w - mean) / torch.sqrt(torch.maximum(variance * w.numel(), torch.tensor(eps))))
    return torch.stack(filters)


def positions_by_hand(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, stride: int) -> torch.Tensor:
    """SAME convolution one output position at a time: windows start at -before, zeros outside."""
    kernel, size = weight.shape[-1], x.shape[-1]
    outputs = -(-size // stride)
    before = max((outputs - 1) * stride + kernel - size, 0) // 2
    wide = torch.zeros(*x.shape[:2], size + 2 * kernel, size + 2 * kernel, dtype=x.dtype)
    wide[..., kernel : kernel + size, kernel : kernel + size] = x
    rows = []
    for i in range(outputs):
        row = []
        for j in range(outputs):
            top, left = kernel - before + i * stride, kernel - before + j * stride
            window = wide[..., top : top + kernel, left : left + kernel]
            row.append(torch.einsum("bchw,ochw->bo", window, weight) + bias)
        rows.append(torch.stack(row, dim=-1))
    return torch.stack(rows, dim=-2)


def trained(layer: WSConv2d) -> WSConv2d:
    torch.nn.init.normal_(layer.gain, mean=1.0, std=0.3)
    torch.nn.init.normal_(layer.bias)
    return layer.double()


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [7, 8])
def test_it_computes_the_formula_of_the_paper(kernel: int, stride: int, size: int) -> None:
    torch.manual_seed(0)
    layer = trained(WSConv2d(3, 5, kernel, stride=stride))
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    weight = standardised_by_hand(layer.weight, layer.gain)
    expected = positions_by_hand(x, weight, layer.bias, stride)
    torch.testing.assert_close(layer(x), expected)
    if kernel > 1:  # a 1x1 filter's place does not depend on the padding
        evenly = F.conv2d(x, weight, layer.bias, stride, kernel // 2)
        same = evenly.shape == expected.shape and torch.allclose(evenly, expected)
        assert same == (stride == 1 or size % 2 == 1)  # the uneven padding makes a difference


def test_filters_have_mean_zero_and_norm_gain() -> None:
    torch.manual_seed(0)
    layer = trained(WSConv2d(6, 4, 3, groups=2))
    filters = layer.standardised_weight().flatten(1)
    torch.testing.assert_close(filters.mean(1), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(filters.norm(dim=1), layer.gain.abs().flatten())
    assert not torch.allclose(layer.weight.flatten(1).norm(dim=1), layer.gain.abs().flatten())


def test_a_constant_filter_does_not_divide_by_zero() -> None:
    layer = WSConv2d(2, 1, 3)
    with torch.no_grad():
        layer.weight.fill_(0.7)
    total = layer(torch.randn(1, 2, 4, 4)).sum()
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(layer.weight.grad).all()


def test_the_gradient_is_that_of_the_formula() -> None:
    torch.manual_seed(0)
    layer = trained(WSConv2d(3, 4, 3, stride=2))
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    inputs = (layer.weight, layer.gain, layer.bias)
    mine = torch.autograd.grad(layer(x).square().sum(), inputs)
    weight = standardised_by_hand(layer.weight, layer.gain)
    by_hand = torch.autograd.grad(positions_by_hand(x, weight, layer.bias, 2).square().sum(), inputs)
    for found, expected in zip(mine, by_hand, strict=True):
        torch.testing.assert_close(found, expected)


def test_padding_can_be_given_side_by_side() -> None:
    layer = WSConv2d(1, 1, 3, padding=(0, 2, 1, 0))
    assert layer.padding_for(8, 8) == (0, 2, 1, 0)
    assert layer(torch.zeros(1, 1, 8, 8)).shape == (1, 1, 7, 8)
    assert WSConv2d(1, 1, 3, padding=1).padding == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "expected"),
    [(32, 3, 1, (1, 1)), (32, 3, 2, (0, 1)), (7, 3, 2, (1, 1)), (224, 7, 2, (2, 3)), (32, 1, 2, (0, 0))],
)
def test_same_padding_puts_the_odd_zero_behind(
    size: int, kernel: int, stride: int, expected: tuple[int, int]
) -> None:
    assert same_padding(size, kernel=kernel, stride=stride) == expected


def test_memory_format_changes_nothing_but_the_layout() -> None:
    torch.manual_seed(0)
    layer = WSConv2d(8, 8, 3, stride=2)
    x = torch.randn(2, 8, 8, 8)
    last = layer(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(layer(x), last)
    assert last.is_contiguous(memory_format=torch.channels_last)  # so that no layer behind it has to copy
