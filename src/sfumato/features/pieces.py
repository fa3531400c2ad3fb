"""A few images at once: their responses stay in a core's cache, and their memory is reused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def in_pieces(function: Callable[[Tensor], Tensor], images: Tensor, *, rows: int) -> Tensor:
    """``function`` of ``rows`` images at a time; a traced program has no loop over an unknown number."""
    if torch.compiler.is_exporting():
        return function(images)
    return torch.cat([function(piece) for piece in images.split(rows)])
