"""A loss and a clipping function of a caller's own, asked about noise before any budget is spent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sfumato.gradients import Clipping, clipped_sum
from sfumato.gradients.clipping import bounded_factors
from sfumato.privacy.noise_mechanisms import check_sensitivity
from sfumato.randomness import SeededSource, UnitRandomness
from sfumato.training.gradient_sums import Loss

_SQUARED_NORMS = (0.0, 1e-12, 1e-4, 1.0, 1e4, 1e12, 1e30, float("inf"))  # of units, in clip norms
_MARGIN = 1e-5  # about that of a step


def check_private_step(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    clip_norm: float,
    loss: Loss,
    clipping: Clipping,
) -> None:
    """Refuse a loss or a clipping function that a private step would refuse.

    ``inputs`` are noise of the images' shape: no private image is needed. What only certain gradients would
    show is still checked in every step.
    """
    check_sensitivity(clipping.sensitivity(clip_norm), clip_norm)
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    squares = torch.tensor(_SQUARED_NORMS, dtype=torch.float64) * clip_norm**2
    for shares in ([1.0] * len(trained), [1.0] + [0.0] * (len(trained) - 1)):  # all layers, the first alone
        norms = {
            name: squares * share if share else torch.zeros_like(squares)
            for name, share in zip(trained, shares, strict=True)
        }
        bounded_factors(clipping, norms, clip_norm, _MARGIN)
    clipped_sum(
        model,
        inputs,
        targets,
        clip_norm=clip_norm,
        loss=loss,
        clipping=clipping,
        randomness=UnitRandomness(SeededSource(0), purpose="model", step=0),  # nothing of it is kept
        unit_ids=torch.arange(len(inputs)),
    )
