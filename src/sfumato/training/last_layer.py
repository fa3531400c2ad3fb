"""The last layer alone: what the frozen layers make of each image is computed once, then the steps are cheap.

De et al. 2022, section 4.2, fine-tune the last layer on stored features, with batches of up to 2^18 images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sfumato.data import ImageSet
from sfumato.features.cache import OnProgress, features_of
from sfumato.models.classifier import Classifier
from sfumato.randomness import UnitRandomness
from sfumato.training.inputs import Inputs, Microbatch, Units, Views


@dataclass(frozen=True, kw_only=True)
class LastLayerViews:
    """The images' views as ever, and beside them the rows that the last layer sees."""

    images: Views
    features: Tensor  # (N, d), in the order of the training images

    @property
    def mean(self) -> tuple[float, ...]:
        return self.images.mean

    @property
    def std(self) -> tuple[float, ...]:
        return self.images.std

    @property
    def rows_per_image(self) -> int:
        return self.images.rows_per_image

    def microbatches(
        self,
        units: Units,
        indices: Tensor,
        *,
        max_rows: int,
        randomness: UnitRandomness,
        device: torch.device,
    ) -> Iterator[Microbatch]:
        """The images themselves, for whoever does not use ``features``."""
        return self.images.microbatches(
            units, indices, max_rows=max_rows, randomness=randomness, device=device
        )


class Trunk(nn.Module):
    """Everything before the last layer, on pixels from 0 to 1; ``described`` tells its cache entry apart."""

    def __init__(self, network: Classifier, *, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.network = network
        self.described = {"network": repr(network), "mean": mean, "std": std}
        self.mean, self.std = torch.tensor(mean).view(1, -1, 1, 1), torch.tensor(std).view(1, -1, 1, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        inputs = (pixels - self.mean.to(pixels.device)) / self.std.to(pixels.device)
        return self.network.features(inputs.contiguous(memory_format=torch.channels_last))


def last_layer_views(
    model: nn.Module,
    train: ImageSet,
    views: Inputs,
    *,
    on_progress: OnProgress | None = None,
    compute: bool = True,
) -> Inputs:
    """The views with rows for the last layer, which alone is trained; as given if steps see new views.

    Without ``compute`` the rows have their shape alone, for an estimate.
    """
    if not isinstance(model, Classifier) or not isinstance(views, Views) or views.count:
        return views
    if not compute:
        width = model.head.in_features if isinstance(model.head, nn.Linear) else 1
        return LastLayerViews(images=views, features=torch.empty(len(train), width, device="meta"))
    trunk = Trunk(model, mean=views.mean, std=views.std)
    return LastLayerViews(images=views, features=features_of(trunk, train.images, on_progress=on_progress))
