"""The loss of images with several findings, and its derivative for the closed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """A sigmoid for each finding; the loss of an image is the sum over findings.

    ``positive_weights`` count an image that has the finding so many times, one number for all findings or one
    for each. They are public: where they follow from how frequent a finding is, that must be publicly known.
    """

    positive_weights: tuple[float, ...] = ()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over images."""
        return self.of_rows(outputs, targets).mean()

    def of_rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(rows,)"""
        weights = self._weights(outputs)
        losses = binary_cross_entropy_with_logits(outputs, targets, pos_weight=weights, reduction="none")
        return losses.sum(-1)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The derivative of each row's loss by its outputs: p - y, where y = 1 times the weight."""
        residual = outputs.sigmoid() - targets
        weights = self._weights(outputs)
        return residual if weights is None else torch.where(targets > 0, residual * weights, residual)

    def _weights(self, outputs: Tensor) -> Tensor | None:
        if not self.positive_weights:
            return None
        return outputs.new_tensor(self.positive_weights)
