"""Units' filters formed twice, for their norms and again for their weighted sum, so that none is kept.

For layers of many filters and few positions, whose gradients are larger than what they are made of, under
autocast. In float32 the Gram norm keeps as little.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sfumato.gradients.kernels import low_filter_sum, low_filters, offers_low_filter_sum
from sfumato.gradients.operands import Convolution


def twice_pays(conv: Convolution) -> bool:
    """Whether the units' gradients are larger than what they are made of, and can be formed so.

    Only where the sum is, bit for bit, of the gradients whose norms were taken. They are those that
    ``direct`` keeps, so that units are rounded alike whichever of the two a microbatch takes.
    """
    kept = conv.segments.num_units * conv.weight.nbytes
    if conv.geometry.groups > 1 or kept <= conv.held_bytes:
        return False
    most = max((group.size for group in conv.segments.groups), default=1)
    return offers_low_filter_sum(conv.inputs, conv.gradients, most)


def twice_moments(conv: Convolution, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of each unit's filters, (3, units, out), and the bias's gradients, (units, out)."""
    directions, found = directions.movedim(1, -1), []
    for group in conv.segments.groups:
        images, units = (conv.inputs[group.rows], conv.gradients[group.rows]), group.units
        made = low_filters(*images, directions, units.stop - units.start, conv.geometry.sizes, keep=False)
        found.append(made[1:])
    moments, shifts = zip(*found, strict=True)
    return torch.cat(moments, dim=1), torch.cat(shifts)


def twice_sum(conv: Convolution) -> Callable[[Tensor], Tensor]:
    """The clipped sum in float64, by the same sums once more."""

    def form_sum(factors: Tensor) -> Tensor:
        out, channels, *kernel = conv.weight.shape
        total = torch.zeros(out, *kernel, channels, dtype=torch.float64, device=factors.device)
        for group in conv.segments.groups:
            images = conv.inputs[group.rows], conv.gradients[group.rows]
            low_filter_sum(*images, factors[group.units], conv.geometry.sizes, total)
        return total.movedim(-1, 1)

    return form_sum
