"""The convolutions of many LeNets in PyTorch alone: matrix products over windows.

- rows x channels everywhere, positions in the order of the 2 x 2 cells that are pooled together;
- the first convolution by 6 x 6 windows, one for each pooled cell: 24 outputs instead of 6 fill a vector;
- tanh(a) = 2 s(2a) - 1 with the logistic function s, which is six times as fast. The factors 2, 4 and 1/4 of
  tanh, its derivative and the pooling cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CELLS1, CELLS2 = 14 * 14, 5 * 5  # pooled positions after each convolution


class WindowConvolutions:
    """What ``lenet_kernel.Convolutions`` does: the same arguments, features and gradients.

    Rows of one model must be neighbours, as many for each, models in order.
    """

    def __init__(
        self,
        weights: tuple[Tensor, Tensor, Tensor, Tensor],
        images: Tensor,
        image_of: Tensor,
        model_of: Tensor,
    ) -> None:
        weight1, bias1, weight2, bias2 = weights
        models = len(weight1)
        if not torch.equal(model_of, torch.arange(models).repeat_interleave(len(image_of) // models)):
            raise ValueError("rows are not in the order of their models, as many for each")
        self.windows = _windows(images[image_of]).view(models, -1, 36)
        self.filters = weight2.permute(0, 1, 3, 4, 2)  # (models, 16, y, x, channels)
        spread = _spread(weight1[:, :, 0, :, :, None]).view(models, 24, 36)
        self.first = torch.baddbmm(_biases(bias1, 4), self.windows, 2 * spread.transpose(1, 2)).sigmoid_()
        self.patches = _patches(_pooled(self.first, 6).view(-1, 14, 14, 6)).view(models, -1, 150)
        flat = self.filters.reshape(models, 16, 150).transpose(1, 2)
        self.second = torch.baddbmm(_biases(bias2, 1), self.patches, 2 * flat).sigmoid_()
        self.features = _pooled(self.second, 16).view(-1, CELLS2, 16).transpose(1, 2).reshape(-1, 400)

    def backward(self, gradient: Tensor, rows_of_unit: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """From the gradient of ``features`` to those of each unit's weights: (units, values) each."""
        models, units = len(self.filters), len(gradient) // rows_of_unit
        cells = gradient.view(-1, 16, CELLS2).transpose(1, 2).reshape(-1, 1, 16)
        second = cells * (self.second * (1 - self.second)).view(-1, 4, 16)
        windows = second.view(models, -1, 64) @ _spread(self.filters).view(models, 64, 216)
        first = _unpooled(_folded(windows.view(-1, CELLS2 * 216)), self.first).view(units, -1, 24)
        second = second.view(units, -1, 16)
        return (
            _gathered(first.transpose(1, 2) @ self.windows.view(units, -1, 36)).reshape(units, 150),
            first.sum(1).view(units, 4, 6).sum(1),
            (self.patches.view(units, -1, 150).transpose(1, 2) @ second).view(units, 2400),
            second.sum(1),
        )


def _biases(bias: Tensor, positions: int) -> Tensor:
    """Twice the bias, for s(2a), at each position of a cell."""
    return 2 * bias.repeat(1, positions)[:, None]


def _windows(images: Tensor) -> Tensor:
    """(rows, 28, 28) -> (rows, 14, 14, 6, 6): what the four positions of each pooled cell see."""
    padded = pad(images, (2, 2, 2, 2))
    return padded.as_strided((len(images), 14, 14, 6, 6), (32 * 32, 64, 2, 32, 1)).contiguous()


def _patches(pooled: Tensor) -> Tensor:
    """(rows, 14, 14, 6) -> (rows, cells of 5 x 5, positions of 2 x 2, 5, 5 * 6)."""
    shape, steps = (len(pooled), 5, 5, 2, 2, 5, 30), (14 * 84, 2 * 84, 12, 84, 6, 84, 1)
    return pooled.contiguous().as_strided(shape, steps).contiguous()


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
    corners = [places[:, y, x, :, y : y + 5, x : x + 5] for y in range(2) for x in range(2)]
    return corners[0] + corners[1] + corners[2] + corners[3]


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
