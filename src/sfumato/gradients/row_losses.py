"""The loss of each row on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map

from sfumato.errors import ConfigError, ModelError, PrivacyError

Loss = Callable[..., Tensor]


def row_losses(loss: Loss, outputs: Any, targets: Tensor) -> Tensor:
    """(rows,): whatever the loss function does with a batch, it sees one row at a time."""
    rows = len(targets)
    _check_outputs(loss, outputs, rows)
    if loss is cross_entropy:
        return cross_entropy(outputs, targets, reduction="none")

    def one(output: Any, target: Tensor) -> Tensor:
        value = loss(tree_map(lambda v: v.unsqueeze(0), output), target.unsqueeze(0))
        if value.numel() != 1:
            raise ConfigError(
                "loss-not-scalar",
                f"the loss of one row has shape {tuple(value.shape)}.",
                why="A row's gradient is that of one number.",
                fix="Let the loss take the mean or the sum over a row's values (no reduction='none').",
            )
        return value.reshape(())

    try:
        return vmap(one)(outputs, targets)
    except RuntimeError:  # the loss looks at values, which vmap does not allow
        return torch.stack([one(tree_map(lambda v, i=i: v[i], outputs), targets[i]) for i in range(rows)])


@torch.no_grad()
def check_stateless(loss: Loss, outputs: Any, targets: Tensor) -> None:
    """Refuse a loss that gives a row another value when it is asked again, or in another order.

    Rows of noise are asked that grow from one to the next, so that a running maximum, mean or count moves on
    each of them; ``outputs`` and ``targets`` tell their shapes and the labels that there are.
    """
    if loss is cross_entropy or not len(targets):
        return
    generator = torch.Generator().manual_seed(0)
    # up to sizes beyond whatever the loss may have met before; each with both signs, so that one is wrong
    scales = torch.tensor([0.1, 0.5, 1.0, 4.0, 1e2, 1e4, 1e6, 1e8], dtype=torch.float64).repeat_interleave(2)
    places = torch.arange(len(scales), device=targets.device)
    labels = targets[places % len(targets)]

    def noise(value: Tensor) -> Tensor:
        shape = (len(scales), *value.shape[1:])
        rows = torch.randn(shape, generator=generator, dtype=torch.float64)
        rows[1::2] = -rows[::2]
        rows = rows * scales.view(-1, *[1] * (len(shape) - 1))
        return rows.to(value) if value.is_floating_point() else value[:1].expand(shape)

    rows = tree_map(noise, outputs)
    compare_losses(loss, rows, labels, row_losses(loss, rows, labels))


@torch.no_grad()
def compare_losses(loss: Loss, outputs: Any, targets: Tensor, values: Tensor) -> None:
    """Refuse a loss whose ``values`` for these rows are others now, the rows being in the opposite order."""
    if loss is cross_entropy:
        return
    places = torch.arange(len(targets), device=targets.device).flip(0)
    again = row_losses(loss, tree_map(lambda v: v.detach()[places], outputs), targets[places]).flip(0)
    values = values.detach()
    tolerance = max(1e-4, 8 * torch.finfo(values.dtype).eps)
    comparable = values.isfinite() & again.isfinite()
    if ((values - again).abs() > tolerance * (values.abs() + 1e-3))[comparable].any():
        raise PrivacyError(
            "stateful-loss",
            "the loss gives the same outputs and target another value when it is asked again.",
            why="It remembers the rows before, or draws random numbers; one example then moves the gradients "
            "of all that follow, which no clip bounds.",
            fix="Let the loss depend on its arguments alone: fixed class weights, no running counts.",
        )


def _check_outputs(loss: Loss, outputs: Any, rows: int) -> None:
    leaves = tree_leaves(outputs)
    if not all(isinstance(value, Tensor) for value in leaves) or (
        loss is cross_entropy and not isinstance(outputs, Tensor)
    ):
        raise ModelError(
            "output-not-tensor",
            f"the model returns a {type(outputs).__name__}, which the loss cannot take.",
            fix="Pass loss=lambda outputs, targets: cross_entropy(outputs['logits'], targets), or wrap the "
            "model so that it returns the scores alone.",
        )
    if not leaves or any(value.dim() == 0 or len(value) != rows for value in leaves):
        raise ModelError(
            "no-rows",
            f"the model's output does not have one entry for each of its {rows} rows.",
            why="A unit's gradient can be bounded only if its rows can be told apart.",
            fix="Let the model take (rows, ...) and return (rows, ...), rows first.",
        )
