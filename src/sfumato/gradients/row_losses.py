"""The loss of each row on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map

from sfumato.errors import ConfigError, ModelError

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
