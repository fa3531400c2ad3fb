"""Two kinds of features side by side: what one of them misses, the other may see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from sfumato.data.generated import OnProgress
from sfumato.features.patch_bank import WidePatchFeatures
from sfumato.features.patch_features import PatchFeatures
from sfumato.features.scatter_features import ScatterFeatures

Part = PatchFeatures | WidePatchFeatures | ScatterFeatures


class CombinedFeatures(nn.Module):
    """Images (B, C, H, W) from 0 to 1 → the parts' rows side by side, each with the same weight; unit norm.

    ``parts`` are extractors that have been fitted on public images alone, or will be by ``fit``.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.described = {"combined": 1, "parts": [part.described for part in parts]}

    @property
    def num_features(self) -> int:
        return sum(part.num_features for part in self._parts())

    def _parts(self) -> list[Part]:
        return [cast(Part, part) for part in self.parts]

    def fit(
        self, *, num_images: int = 12_000, seed: int = 0, on_progress: OnProgress | None = None
    ) -> CombinedFeatures:
        """Fit each part on its own; equal seeds give equal features."""
        for part in self._parts():
            part.fit(num_images=num_images, seed=seed, on_progress=on_progress)
        return self

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([part(images) for part in self.parts], dim=1) / len(self.parts) ** 0.5
