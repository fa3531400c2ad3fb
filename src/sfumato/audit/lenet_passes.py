"""Forward and backward passes of many LeNets at once, in matrix products over the models.

The zoo's LeNet with tanh on 28 x 28 images of one channel, weights with a leading dimension of models. The
same function and gradients as autograd's, to rounding (tested against the gradient engine), laid out so that
a model costs a fifth of what it costs on its own:

- rows x channels everywhere, positions in the order of the 2 x 2 cells that are pooled together;
- the first convolution by 6 x 6 windows, one for each pooled cell: 24 outputs instead of 6 fill a vector;
- tanh(a) = 2 s(2a) - 1 with the logistic function s, which is six times as fast. The factors 2, 4 and 1/4 of
  tanh, its derivative and the pooling cancel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot, pad

from sfumato.gradients.piece import gram_norms, squared_norms

CONV1, CONV2, FULL1, FULL2, HEAD = "trunk.0", "trunk.3", "hidden.0", "hidden.2", "head"
LAYERS = (CONV1, CONV2, FULL1, FULL2, HEAD)
CELLS1, CELLS2 = 14 * 14, 5 * 5  # pooled positions after each convolution


@dataclass(frozen=True)
class UnitGradients:
    """The gradients of (models, units), as far as their norms and weighted sums need them."""

    shape: tuple[int, int, int]  # models, units of each, rows of each unit
    losses: Tensor  # (models, units): the mean over a unit's rows
    convolutions: Mapping[str, Tensor]  # (models, units, values): a unit's gradient, by parameter
    linears: Mapping[str, tuple[Tensor, Tensor]]  # (models, rows, values): inputs, and gradients of outputs

    def squared_norms(self) -> dict[str, Tensor]:
        """(models * units,) in float64, by parameter."""
        models, units, rows = self.shape
        squares = {name: squared_norms(value.flatten(0, 1)) for name, value in self.convolutions.items()}
        for layer, (inputs, gradients) in self.linears.items():
            of_unit = [part.view(models * units, rows, -1) for part in (inputs, gradients)]
            squares[f"{layer}.bias"] = squared_norms(of_unit[1].sum(1))
            x, g = (torch.bmm(part, part.transpose(1, 2)) for part in map(Tensor.double, of_unit))
            squares[f"{layer}.weight"] = gram_norms(x, g, inputs.dtype)
        return squares

    def weighted_sums(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum over each model's units of factor * gradient; ``factors`` are (models, units) by parameter."""
        models, units, rows = self.shape
        sums = {}
        for name, value in self.convolutions.items():
            sums[name] = (factors[name].to(value.dtype)[:, None] @ value)[:, 0]
        for layer, (inputs, gradients) in self.linears.items():
            weights, biases = (
                factors[f"{layer}.{part}"].to(inputs.dtype).repeat_interleave(rows, 1)[:, None]
                for part in ("weight", "bias")
            )
            sums[f"{layer}.weight"] = (gradients.transpose(1, 2) * weights) @ inputs
            sums[f"{layer}.bias"] = (biases @ gradients)[:, 0]
        return _in_parameter_order(sums, models)


def image_windows(images: Tensor) -> Tensor:
    """(rows, 1, 28, 28) -> (rows, 196, 36): what the four positions of each pooled cell see."""
    padded = pad(images[:, 0], (2, 2, 2, 2))
    windows = padded.as_strided((len(images), 14, 14, 6, 6), (32 * 32, 64, 2, 32, 1))
    return windows.reshape(len(images), CELLS1, 36)


@torch.no_grad()
def unit_gradients(weights: Mapping[str, Tensor], windows: Tensor, labels: Tensor) -> UnitGradients:
    """Gradients of the mean loss of each unit's rows.

    ``weights`` are LeNet's by name, each with a leading dimension of models; ``windows`` (models, units, rows,
    196, 36) are those of the images (``image_windows``), and ``labels`` (models, units).
    """
    models, units, rows = windows.shape[:3]
    each = rows * units  # rows of a model
    windows = windows.view(models, each * CELLS1, 36)
    first = torch.baddbmm(_biases(weights[f"{CONV1}.bias"], 4), windows, _window_filters(weights)).sigmoid_()
    patches = _patches(_pooled(first, 6).view(-1, 14, 14, 6)).view(models, each * 4 * CELLS2, 150)
    filters = weights[f"{CONV2}.weight"].permute(0, 1, 3, 4, 2)  # (models, 16, y, x, channels)
    flat = filters.reshape(models, 16, 150).transpose(1, 2)
    second = torch.baddbmm(_biases(weights[f"{CONV2}.bias"], 1), patches, 2 * flat).sigmoid_()
    x1 = _pooled(second, 16).view(models, each, 400)
    w1 = _cells_first(weights[f"{FULL1}.weight"])
    w2, w3 = weights[f"{FULL2}.weight"], weights[f"{HEAD}.weight"]
    x2 = _linear(x1, w1, weights[f"{FULL1}.bias"]).tanh_()
    x3 = _linear(x2, w2, weights[f"{FULL2}.bias"]).tanh_()
    logs = log_softmax(_linear(x3, w3, weights[f"{HEAD}.bias"]), dim=2)
    wanted = one_hot(labels.repeat_interleave(rows, 1), logs.shape[2]).to(logs.dtype)
    losses = -(logs * wanted).sum(2).view(models, units, rows).mean(2)
    g3 = (logs.exp() - wanted) / rows  # a unit's gradient is the mean over its rows
    g2 = torch.ops.aten.tanh_backward(g3 @ w3, x3)
    g1 = torch.ops.aten.tanh_backward(g2 @ w2, x2)
    g_second = (g1 @ w1).view(-1, 1, 16) * (second * (1 - second)).view(-1, 4, 16)
    g_windows = g_second.view(models, each * CELLS2, 64) @ _spread(filters).view(models, 64, 216)
    g_first = _unpooled(_folded(g_windows.view(-1, CELLS2 * 216)), first)
    by_unit = models * units
    g_first, g_second = g_first.view(by_unit, -1, 24), g_second.view(by_unit, -1, 16)
    convolutions = {
        f"{CONV1}.weight": _gathered(g_first.transpose(1, 2) @ windows.view(by_unit, -1, 36)),
        f"{CONV1}.bias": g_first.sum(1).view(by_unit, 4, 6).sum(1),
        f"{CONV2}.weight": g_second.transpose(1, 2) @ patches.view(by_unit, -1, 150),
        f"{CONV2}.bias": g_second.sum(1),
    }
    return UnitGradients(
        shape=(models, units, rows),
        losses=losses,
        convolutions={name: value.reshape(models, units, -1) for name, value in convolutions.items()},
        linears={FULL1: (x1, g1), FULL2: (x2, g2), HEAD: (x3, g3)},
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))


def _biases(bias: Tensor, positions: int) -> Tensor:
    """Twice the bias, for s(2a), at each position of a cell."""
    return 2 * bias.repeat(1, positions)[:, None]


def _patches(pooled: Tensor) -> Tensor:
    """(rows, 14, 14, 6) -> (rows, cells of 5 x 5, positions of 2 x 2, 5, 5 * 6)."""
    shape, steps = (len(pooled), 5, 5, 2, 2, 5, 30), (14 * 84, 2 * 84, 12, 84, 6, 84, 1)
    return pooled.contiguous().as_strided(shape, steps).contiguous()


def _window_filters(weights: Mapping[str, Tensor]) -> Tensor:
    """Twice the first filters, each at its four places in a window: (models, 36, 24)."""
    filters = weights[f"{CONV1}.weight"][:, :, 0, :, :, None]  # (models, 6, y, x, 1)
    return 2 * _spread(filters).view(len(filters), 24, 36).transpose(1, 2)


def _spread(filters: Tensor) -> Tensor:
    """(models, filters, 5, 5, channels) -> (models, 2, 2, filters, 6, 6, channels), zero elsewhere."""
    models, count, _, _, channels = filters.shape
    spread = filters.new_zeros(models, 2, 2, count, 6, 6, channels)
    for y in range(2):
        for x in range(2):
            spread[:, y, x, :, y : y + 5, x : x + 5] = filters
    return spread


def _gathered(windows: Tensor) -> Tensor:
    """The transpose of ``_spread`` for one channel: (units, 24, 36) -> (units, 6, 5, 5)."""
    places = windows.view(-1, 2, 2, 6, 6, 6)
    return sum(places[:, y, x, :, y : y + 5, x : x + 5] for y in range(2) for x in range(2))


def _pooled(logistic: Tensor, channels: int) -> Tensor:
    """The mean of 2 s - 1 over the four positions of each cell."""
    a, b, c, d = logistic.view(-1, 4, channels).unbind(1)
    return (a + b).add_(c).add_(d).mul_(0.5).sub_(1.0)


def _unpooled(gradient: Tensor, logistic: Tensor) -> Tensor:
    """Back through the first pooling and tanh: the gradient of a cell times s (1 - s) of its positions."""
    copies = torch.eye(6, dtype=gradient.dtype).repeat(1, 4)  # a product: broadcasting over 6 values is slow
    spread = (gradient.view(-1, 6) @ copies).view_as(logistic)
    return torch.ops.aten.sigmoid_backward(spread, logistic)


def _folded(windows: Tensor) -> Tensor:
    """Sum the gradients of overlapping 6 x 6 windows at stride 2: (rows, 25 * 216) -> (rows, 14 * 14 * 6)."""
    parts = windows.view(-1, 5, 5, 6, 3, 12)
    across = windows.new_zeros(len(parts), 5, 6, 7, 12)
    for shift in range(3):
        across[:, :, :, shift : shift + 5] += parts[:, :, :, :, shift].transpose(2, 3)
    bands = across.view(-1, 5, 3, 2 * 84)
    down = windows.new_zeros(len(parts), 7, 2 * 84)
    for shift in range(3):
        down[:, shift : shift + 5] += bands[:, :, shift]
    return down


def _cells_first(weight: Tensor) -> Tensor:
    """The first linear layer's columns, from (channels, cells) to the (cells, channels) that are used here."""
    return weight.unflatten(2, (16, CELLS2)).transpose(2, 3).flatten(2)


def _in_parameter_order(sums: dict[str, Tensor], models: int) -> dict[str, Tensor]:
    """Sums in the shapes of LeNet's parameters."""
    sums[f"{CONV1}.weight"] = sums[f"{CONV1}.weight"].view(models, 6, 1, 5, 5)
    sums[f"{CONV2}.weight"] = sums[f"{CONV2}.weight"].view(models, 16, 5, 5, 6).permute(0, 1, 4, 2, 3)
    columns = sums[f"{FULL1}.weight"].unflatten(2, (CELLS2, 16)).transpose(2, 3).flatten(2)
    return {**sums, f"{FULL1}.weight": columns}
