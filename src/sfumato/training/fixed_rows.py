"""Training on rows instead of images: fixed features, their private mean, and sums in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sfumato.data import ImageSet
from sfumato.models.fixed_features import FeatureClassifier, FixedFeatures
from sfumato.training.head import private_mean
from sfumato.training.inputs import Microbatch, Units
from sfumato.training.last_layer import LastLayerViews

if TYPE_CHECKING:
    from sfumato.randomness import RandomSource, UnitRandomness
    from sfumato.recipes.feature_settings import FeatureSettings

ROWS_AT_ONCE = 4096  # of one pass; the engine adds no more than piece.UNITS_PER_CALL in one call


@dataclass(frozen=True, kw_only=True)
class FeatureViews:
    """Takes the place of ``Views`` where the inputs are features: rows of ``features``, as they are."""

    features: Tensor  # (N, d) of the training images, in their order
    rows_at_once: int = ROWS_AT_ONCE  # a linear head needs little memory, so that more fit than images
    mean: tuple[float, ...] = (0.0,)  # the extractor wants plain pixels from 0 to 1
    std: tuple[float, ...] = (1.0,)
    rows_per_image: int = 1  # rows have no views of their own

    def microbatches(
        self,
        units: Units,
        indices: Tensor,
        *,
        max_rows: int,
        randomness: UnitRandomness,
        device: torch.device,
    ) -> Iterator[Microbatch]:
        """The units' rows, as many at once as fit."""
        size = max(max_rows, self.rows_at_once)
        if units.are_images:
            for start in range(0, len(indices), size):
                chosen = units.rows[indices[start : start + size]]
                ids = indices[start : start + size]
                yield self._microbatch(units.data, chosen, torch.arange(len(chosen)), ids, device)
            return
        for group in units.pack(indices, max_rows=size, views=1, randomness=randomness):
            unit_index = torch.arange(len(group.unit_ids)).repeat_interleave(group.sizes)
            yield self._microbatch(units.data, group.images, unit_index, group.unit_ids, device)

    def _microbatch(
        self, data: ImageSet, chosen: Tensor, unit_index: Tensor, unit_ids: Tensor, device: torch.device
    ) -> Microbatch:
        return Microbatch(
            inputs=self.features[chosen].to(device),
            targets=data.labels[chosen].to(device),
            unit_index=unit_index.to(device),
            num_units=len(unit_ids),
            unit_ids=unit_ids,
        )


@torch.no_grad()
def release_centre(
    model: FixedFeatures,
    views: FeatureViews,
    units: Units,
    *,
    settings: FeatureSettings,
    source: RandomSource,
    private: bool,
) -> None:
    """Put the mean row into the model: with the noise of the settings; exact without privacy."""
    if not settings.mean_noise_multiplier:
        return
    if not private:
        model.centre.copy_(views.features.mean(0))
    else:
        owner = None
        if not units.are_images:  # patients: each counts once, with the mean of all their rows
            sizes = units.offsets.diff()
            owner = torch.empty(len(units.rows), dtype=torch.int64)
            owner[units.rows] = torch.arange(len(sizes)).repeat_interleave(sizes)
        centre = private_mean(
            views.features,
            noise_multiplier=settings.mean_noise_multiplier,
            source=source,
            unit_index=owner,
        )
        model.centre.copy_(centre)


def in_closed_form(model: nn.Module, views: object, units: Units) -> bool:
    """Whether a step is the sum over fixed rows under a linear head, each row a unit."""
    on_features = isinstance(views, FeatureViews) and isinstance(model, FeatureClassifier)
    if not (on_features or isinstance(views, LastLayerViews)) or not units.are_images:
        return False
    head = model.head
    if type(head) is not nn.Linear or head.bias is None or not head.bias.requires_grad:
        return False
    return head.weight.device.type == "cpu" and head.weight.dtype == torch.float32
