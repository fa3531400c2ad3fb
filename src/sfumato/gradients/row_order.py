"""Whether what reaches row k of a layer is the gradient of row k's loss, and of no other.

The engine takes row k of every layer for row k of the batch. A model that sorts its rows, runs a layer and
puts them back has the same outputs, but each unit would be credited with another's gradient. The backward
pass is linear: if the loss of each row is multiplied by a number of its own, the gradient in row k of a layer
must be multiplied by the number of row k. Powers of two change no digit, so that rounding is no excuse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.errors import PrivacyError

# Nodes of autograd's graph that put rows where values of the data say. Whatever moves rows without looking at
# values is found when the model is first met.
_BY_VALUE = ("Index", "Gather", "Take", "Sort", "Topk", "Scatter", "Masked", "Kthvalue", "Embedding", "Put")
_PRODUCTS = ("MmBackward0", "AddmmBackward0")


def may_reorder(losses: Tensor) -> bool:
    """Whether rows may have been put elsewhere by their values between the layers and the losses."""
    seen, waiting = set(), [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [each for each, _ in node.next_functions]
        name = node.name()
        if name.startswith(_BY_VALUE) or (name in _PRODUCTS and following[-1] is not None):
            return True  # also a product from the left, as with a permutation matrix
        waiting.extend(following)
    return False


def row_weights(rows: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Powers of two for each row, several times: no two rows have the same in all of them."""
    base = 16 if dtype == torch.float16 else 64
    number = torch.arange(rows, device=device)
    result: list[Tensor] = []
    while not result or number.any():
        result.append(torch.exp2((number % base - base // 2).double()))
        number = number // base
    return result


def row_norms(gradient: Tensor) -> Tensor:
    """The norm of each row, float64."""
    return torch.linalg.vector_norm(gradient.detach().flatten(1).double(), dim=1)


def check_row_order(layer: str, plain: Tensor, weighted: Tensor, weights: Tensor) -> None:
    """Refuse a layer whose gradients, of norms ``plain``, are not multiplied by the weights of their rows."""
    expected = plain * weights
    # below or beyond, the working precision has lost the value itself
    told = (plain > 1e-25) & (plain < 1e25) & weighted.isfinite()
    ratio = torch.where(told, weighted / plain, weights)
    wrong = told & ((weighted - expected).abs() > 0.25 * expected)
    if not wrong.any():
        return
    powers = torch.log2(ratio[wrong])
    if ((powers - powers.round()).abs() < 1e-3).all():
        raise PrivacyError(
            "reorders-rows",
            f"the rows that {layer} receives are in another order than those of the model's input.",
            why="Each unit would be credited with another unit's gradient, and the clip would bound neither.",
            fix="Leave the rows in their order: do not sort them, by length or otherwise, inside the model.",
        )
    raise PrivacyError(
        "mixes-examples",
        f"the gradient that reaches a row of {layer} comes from the losses of other rows too.",
        why="Clipping one example then no longer bounds its influence.",
        fix="Use sfumato.doctor.check_model(model, inputs), which names the first layer that mixes rows.",
    )
