"""One private step of any model against gradients taken one example at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sfumato


def example_gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[dict[str, Tensor]]:
    """Plain autograd on batches of one."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for x, y in zip(inputs, targets, strict=True):
        loss = cross_entropy(model(x[None]), y[None])
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        rows.append(
            {
                name: torch.zeros_like(p) if g is None else g
                for (name, p), g in zip(parameters.items(), gradients, strict=True)
            }
        )
    return rows


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


def assert_private_step_is_exact(model: nn.Module, inputs: Tensor, *, num_classes: int = 3) -> None:
    """The clipped sum equals the oracle's, in double precision, with about half of the examples clipped."""
    model, inputs = model.double(), inputs.double()
    targets = torch.arange(len(inputs)) % num_classes
    rows = [flat(row) for row in example_gradients(model, inputs, targets)]
    norms = torch.stack([row.norm() for row in rows])
    clip_norm = norms.sort().values[len(norms) // 2 - 1 : len(norms) // 2 + 1].mean().item()
    expected = sum(row * min(1.0, clip_norm / norm.item()) for row, norm in zip(rows, norms, strict=True))
    total = sfumato.clipped_sum(model, inputs, targets, clip_norm=clip_norm)
    torch.testing.assert_close(total.norms, norms, rtol=1e-6, atol=1e-9)
    tolerance = 1e-6 * expected.norm()
    assert (flat(total.gradients) - expected).norm() <= tolerance
    assert (sum(rows) - expected).norm() > 100 * tolerance  # without clipping it would not pass


def changes_with_another_example(model: nn.Module, inputs: Tensor) -> bool:
    """Whether the first output depends on the other rows of its batch."""
    with torch.no_grad():
        before = model(inputs)[0]
        after = model(torch.cat([inputs[:1], 3 * inputs[1:] + 1]))[0]
    return not torch.allclose(before, after, rtol=1e-6, atol=1e-9)
