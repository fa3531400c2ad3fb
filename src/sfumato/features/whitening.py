"""Public whitening: the metric in which generated images vary alike in all directions.

With rows of unit norm the noise on a logit is the same whatever the dimension; what counts is how much of the
classes the leading directions hold. Removing what all images share costs no privacy when the covariance comes
from generated or public images.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfumato.data.generated import other_views
from sfumato.errors import ConfigError
from sfumato.features.cache import compute_features

_ALIGNMENT_RIDGE = 0.3  # of the mean variance between views
_MOST_FEATURES = 40_000  # of 12,000 generated images 2 GB, several times over while they are decomposed


class Whitening(nn.Module):
    """Standardise, rotate and scale by the fitted covariance, keep the leading directions, unit norm."""

    offset: Tensor
    projection: Tensor

    def __init__(self, num_features: int, num_directions: int) -> None:
        super().__init__()
        if num_features > _MOST_FEATURES:
            raise ConfigError(
                "bad-model-option",
                f"these options make {num_features:,} features; the directions of more than "
                f"{_MOST_FEATURES:,} do not fit into memory.",
                fix="Choose a smaller grid or fewer patches.",
            )
        self.num_features, self.num_directions = num_features, min(num_directions, num_features)
        self.register_buffer("offset", torch.zeros(self.num_directions))
        self.register_buffer("projection", torch.zeros(num_features, self.num_directions))

    @torch.no_grad()
    def fit(self, features: Tensor, *, views: Tensor | None = None, ridge: float = 1e-3) -> Whitening:
        """Take mean, deviation and covariance of ``features`` (N, num_features): public rows only.

        Directions are scaled by (λ + ridge · λ_max)^(-1/2). With ``views``, rows of other views of the same
        images in the same order, they are then turned and scaled once more, so that what changes from view
        to view changes alike in all of them: what tells images apart comes to the fore.
        """
        mean, deviation = features.mean(0), features.std(0) + 1e-6  # a feature that never varies stays finite
        standard = (features - mean) / deviation
        if self.num_features > len(standard):  # its covariance would be larger than the rows themselves
            values, vectors = leading_of_rows(standard, self.num_directions)
        else:
            values, vectors = leading_directions(standard.T @ standard / len(standard), self.num_directions)
        values = values.clamp_min(0)
        projection = vectors * (values + ridge * values[0]) ** -0.5 / deviation[:, None]
        if views is not None:
            projection = projection @ _aligning((features - views) @ projection)
        self.projection.copy_(projection)
        self.offset.copy_(-mean @ projection)
        return self

    def project(self, features: Tensor) -> Tensor:
        """Whitened, of whatever norm."""
        return torch.addmm(self.offset, features, self.projection)

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(self.project(features), dim=1)


def fit_whitening(
    whitening: Whitening, pooled: nn.Module, images: Tensor, *, seed: int, aligned: bool
) -> None:
    """Fit on what ``pooled`` makes of generated ``images``; if ``aligned``, of other views of them too."""
    seen_anew = compute_features(pooled, other_views(images, seed=seed)) if aligned else None
    whitening.fit(
        torch.from_numpy(compute_features(pooled, images)),
        views=None if seen_anew is None else torch.from_numpy(seen_anew),
    )


def _aligning(differences: Tensor) -> Tensor:
    """The rotation and scale in which ``differences`` of views (N, directions) are alike everywhere."""
    values, vectors = torch.linalg.eigh(differences.T @ differences / len(differences))
    # without it directions that happen to differ little between just these views would drown all others
    return vectors * (values.clamp_min(0) + _ALIGNMENT_RIDGE * values.mean()) ** -0.5


def leading_directions(covariance: Tensor, count: int, *, num_rounds: int = 3) -> tuple[Tensor, Tensor]:
    """The ``count`` largest eigenvalues, descending, and their eigenvectors as columns.

    Where few of many are wanted, by subspace iteration: three products with a block in place of a full
    decomposition, which at 9,000 features takes minutes. The last directions are then approximate.
    """
    size = len(covariance)
    if size < 1500 or count > 0.6 * size:
        values, vectors = torch.linalg.eigh(covariance)
        return values.flip(0)[:count], vectors.flip(1)[:, :count]
    start = torch.randn(size, min(size, count + 100), generator=torch.Generator().manual_seed(0))
    block = start.to(covariance)
    for _ in range(num_rounds):
        block = torch.linalg.qr(covariance @ block).Q
    values, rotation = torch.linalg.eigh(block.T @ (covariance @ block))
    return values.flip(0)[:count], (block @ rotation.flip(1))[:, :count]


def leading_of_rows(rows: Tensor, count: int, *, num_rounds: int = 3) -> tuple[Tensor, Tensor]:
    """The same of the covariance of centred ``rows`` (N, features), which is never formed.

    At most N eigenvalues are above zero; further directions come back with the value zero.
    """
    num_rows, size = rows.shape
    block = torch.randn(size, min(size, count + 100), generator=torch.Generator().manual_seed(0)).to(rows)
    for _ in range(num_rounds):
        block = torch.linalg.qr(rows.T @ (rows @ block)).Q
    seen = rows @ block
    values, rotation = torch.linalg.eigh(seen.T @ seen / num_rows)
    return values.flip(0)[:count], (block @ rotation.flip(1))[:, :count]
