"""Forward and backward passes of many LeNets at once, vectorised over the models.

The zoo's LeNet with tanh on 28 x 28 images of one channel, weights with a leading dimension of models. The
same function and gradients as autograd's, to rounding (tested against the gradient engine). Linear layers are
batched products; the convolutions are compiled (``lenet_kernel``), or products over windows here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot

from sfumato.audit import lenet_kernel
from sfumato.audit.lenet_windows import WindowConvolutions
from sfumato.gradients.piece import gram_norms, squared_norms

CONVOLUTIONS = ("trunk.0.weight", "trunk.0.bias", "trunk.3.weight", "trunk.3.bias")
FULL1, FULL2, HEAD = "hidden.0", "hidden.2", "head"


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
            x, g = (part.view(models * units, rows, -1) for part in (inputs, gradients))
            squares[f"{layer}.bias"] = squared_norms(g.sum(1) if rows > 1 else g)
            if rows > 1:
                x, g = (torch.bmm(part, part.transpose(1, 2)) for part in (x.double(), g.double()))
            else:  # the products of a row with itself
                x, g = squared_norms(x)[:, None, None], squares[f"{layer}.bias"][:, None, None]
            squares[f"{layer}.weight"] = gram_norms(x, g, inputs.dtype)
        return squares

    def weighted_sums(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each model's sum over units of factor * gradient; ``factors`` (models, units) by parameter."""
        models, _, rows = self.shape
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
        taps = sums["trunk.3.weight"].view(models, 5, 5, 6, 16)
        sums["trunk.3.weight"] = taps.permute(0, 4, 3, 1, 2)
        sums["trunk.0.weight"] = sums["trunk.0.weight"].view(models, 6, 1, 5, 5)
        return sums


@torch.no_grad()
def unit_gradients(
    weights: Mapping[str, Tensor], images: Tensor, image_of: Tensor, labels: Tensor
) -> UnitGradients:
    """Gradients of the mean loss of each unit's rows.

    ``weights`` are LeNet's by name, each with a leading dimension of models; ``image_of`` (models, units,
    rows) says which of ``images`` (., 28, 28) each row is, and ``labels`` are (models, units). A row of -1
    fills up a shorter batch: what comes out for its unit is finite, and means nothing.
    """
    models, units, rows = image_of.shape
    owners = torch.arange(models).repeat_interleave(units * rows)
    implementation = WindowConvolutions if lenet_kernel.compiled() is None else lenet_kernel.Convolutions
    weight1, bias1, weight2, bias2 = (weights[name] for name in CONVOLUTIONS)
    convolutions = implementation((weight1, bias1, weight2, bias2), images, image_of.flatten(), owners)
    x1 = convolutions.features.view(models, units * rows, 400)
    w1, w2, w3 = (weights[f"{layer}.weight"] for layer in (FULL1, FULL2, HEAD))
    x2 = _linear(x1, w1, weights[f"{FULL1}.bias"]).tanh_()
    x3 = _linear(x2, w2, weights[f"{FULL2}.bias"]).tanh_()
    logs = log_softmax(_linear(x3, w3, weights[f"{HEAD}.bias"]), dim=2)
    targets = one_hot(labels.repeat_interleave(rows, 1), logs.shape[2]).to(logs.dtype)
    g3 = (logs.exp() - targets) / rows  # a unit's gradient is the mean over its rows
    g2 = torch.ops.aten.tanh_backward(g3 @ w3, x3)
    g1 = torch.ops.aten.tanh_backward(g2 @ w2, x2)
    gradients = convolutions.backward((g1 @ w1).view(-1, 400), rows)
    return UnitGradients(
        shape=(models, units, rows),
        losses=-(logs * targets).sum(2).view(models, units, rows).mean(2),
        convolutions={
            name: value.view(models, units, -1) for name, value in zip(CONVOLUTIONS, gradients, strict=True)
        },
        linears={FULL1: (x1, g1), FULL2: (x2, g2), HEAD: (x3, g3)},
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))
