"""A learnable scalar as a layer of its own, so that a gradient rule can treat it like any other layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sfumato.gradients.normalisation import scale_rule


class Scale(nn.Module):
    """Multiply by one learnable number: SkipInit (De & Smith 2020) at the end of a residual branch.

    Training from scratch under DP starts it at 1.0 (De et al. 2022, appendix C.1), ordinary training at 0.
    ``constant`` is a fixed factor beside the learnt one.
    """

    gradient_rule = staticmethod(scale_rule)

    def __init__(self, initial: float = 1.0, *, constant: float = 1.0) -> None:
        super().__init__()
        self.initial, self.constant = initial, constant
        self.scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.scale * self.constant)

    def extra_repr(self) -> str:
        return f"initial={self.initial}" + (f", constant={self.constant}" if self.constant != 1 else "")
