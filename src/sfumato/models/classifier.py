"""What all models of the zoo share: features of an image, and a linear head on them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class Classifier(nn.Module, ABC):
    """Images (B, C, H, W) to class scores (B, num_classes), as ``head(features(x))``.

    The last linear layer is always ``head``: to train the head alone, freeze everything else.
    """

    head: nn.Linear

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """What the head sees: one row of numbers per image."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
