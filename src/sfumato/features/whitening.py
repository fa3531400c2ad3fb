"""Public whitening: the metric in which generated images vary alike in all directions.

With rows of unit norm the noise on a logit is the same whatever the dimension; what counts is how much of the
classes the leading directions hold. Removing what all images share costs no privacy when the covariance comes
from generated or public images.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Whitening(nn.Module):
    """Standardise, rotate and scale by the fitted covariance, keep the leading directions, unit norm."""

    def __init__(self, num_features: int, num_directions: int) -> None:
        super().__init__()
        self.num_features, self.num_directions = num_features, min(num_directions, num_features)
        self.register_buffer("offset", torch.zeros(self.num_directions))
        self.register_buffer("projection", torch.zeros(num_features, self.num_directions))

    @torch.no_grad()
    def fit(self, features: Tensor, *, ridge: float = 1e-3) -> Whitening:
        """Take mean, deviation and covariance of ``features`` (N, num_features): public rows only.

        Directions are scaled by (λ + ridge · λ_max)^(-1/2).
        """
        mean, deviation = features.mean(0), features.std(0) + 1e-6  # a feature that never varies stays finite
        standard = (features - mean) / deviation
        values, vectors = torch.linalg.eigh(standard.T @ standard / len(standard))
        values = values.flip(0)[: self.num_directions].clamp_min(0)
        vectors = vectors.flip(1)[:, : self.num_directions]
        projection = vectors * (values + ridge * values[0]) ** -0.5 / deviation[:, None]
        self.projection.copy_(projection)
        self.offset.copy_(-mean @ projection)
        return self

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(torch.addmm(self.offset, features, self.projection), dim=1)
