"""Images that lie where fixed features of ordinary images do not: a head says little of them by itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STEPS = 8
LEARNING_RATE = 0.3
AT_ONCE = 50  # images
STEEPNESS = 6  # of the weight of a coordinate in its rank: nearly all of it is on the last fifth


def rare_images(extractor: nn.Module, images: Tensor) -> Tensor:
    """uint8 ``images`` (N, C, H, W), moved so that their rows lie where rows of such images vary least.

    A few steps of gradient ascent through ``extractor``, which takes pixels from 0 to 1 and gives rows of
    unit norm. Coordinates are ranked by how much the rows of ``images`` themselves vary there.

    Guarantee: the result depends on the extractor and on these images alone.
    """
    with torch.no_grad():
        rows = torch.cat([extractor(part.float() / 255) for part in images.split(AT_ONCE)])
    ranks = rows.var(0, unbiased=False).argsort(descending=True, stable=True).argsort()
    weights = ((ranks + 1) / len(ranks)) ** STEEPNESS
    return torch.cat([_moved(extractor, part, weights) for part in images.split(AT_ONCE)])


@torch.enable_grad()
def _moved(extractor: nn.Module, images: Tensor, weights: Tensor) -> Tensor:
    # free of bounds: pixels are the logistic function of what is moved
    free = torch.logit((images.float() / 255).clamp(0.05, 0.95)).requires_grad_(True)
    optimizer = torch.optim.Adam([free], lr=LEARNING_RATE, betas=(0.8, 0.99))
    for _ in range(STEPS):
        optimizer.zero_grad()
        (-(extractor(free.sigmoid()).square() @ weights).mean()).backward()
        optimizer.step()
    return (free.detach().sigmoid() * 255).round().to(torch.uint8)
